"""The experts of DeepSpeed's own mixtures (`deepspeed.moe`): a file for each, of each layer, in the model's type.

``layer_L_expert_E_mp_rank_00_model_states.pt`` is written by `engine.py` (`_save_moe_checkpoint`, DeepSpeed 0.19.8). L
counts the mixtures of the module, E the experts of one mixture over all ranks, and the names in the file use the same
E. The shapes in the model file, which rank 0 wrote, and the flat groups number the experts as each rank holds them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from lora_tool.errors import Problem
from lora_tool.formats.whole_files import WholeFile, read_whole_files

EXPERT_FILE = re.compile(r"layer_(?P<layer>\d{1,6})_expert_(?P<expert>\d{1,6})_mp_rank_00_model_states\.pt\Z")
_EXPERT = re.compile(r"(?<=\.deepspeed_experts\.)\d{1,6}(?=\.)")

Place = tuple[int, int]
"""The number of a mixture in the module, and that of an expert in it."""


def file_name(place: Place) -> str:
    """Return the name of the file of one expert."""
    layer, number = place
    return f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt"


def read_experts(folder: Path, names: Iterable[str], problems: list[Problem]) -> dict[Place, WholeFile]:
    """Return the experts whose files are among `names`; what is wrong with unreadable ones goes into `problems`."""
    files = {(int(match["layer"]), int(match["expert"])): match[0] for match in map(EXPERT_FILE.match, names) if match}
    return read_whole_files(folder, files, "an expert", problems)


def layout(expert: WholeFile) -> tuple[object, ...]:
    """Return what it shares with the other experts of its mixture: names without the number, types and shapes."""
    return tuple((_EXPERT.sub("N", name), tensor.dtype, tensor.shape) for name, tensor in expert.tensors.items())


def number_of(name: str) -> int | None:
    """Return which expert of its mixture a tensor of this name belongs to, None where it is no expert's."""
    found = _EXPERT.search(name)
    return int(found[0]) if found else None


def experts_of_a_rank(names: Iterable[str]) -> dict[str, int]:
    """Return mixture → how many of its experts one rank holds, from the names that a rank gives their tensors."""
    held: dict[str, int] = {}
    for name in names:
        number = number_of(name)
        if number is not None:
            held[_mixture(name)] = max(held.get(_mixture(name), 0), number + 1)
    return held


def in_the_module(name: str, part: int, held: Mapping[str, int]) -> str:
    """Return the name in the whole module of a tensor that the rank numbered `part` of an expert-parallel group holds.

    `held` are the `experts_of_a_rank`.
    """
    number = number_of(name)
    return name if number is None else _EXPERT.sub(str(part * held[_mixture(name)] + number), name, count=1)


def _mixture(name: str) -> str:
    return _EXPERT.split(name, maxsplit=1)[0]
