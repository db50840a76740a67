"""DeepSpeed's ZeRO checkpoints: the files of a tag, and how they belong together. No tensor is read.

Sources: DeepSpeed 0.19.8 `runtime/engine.py` (`_get_zero_ckpt_name`, `_save_checkpoint`), `utils/zero_to_fp32.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from lora_tool.core.errors import CorruptFile, Defect, NotACheckpoint, Problem, UnsupportedCheckpoint
from lora_tool.formats.files import require_inside
from lora_tool.formats.pickle_names import problems_of
from lora_tool.formats.torch_zip import PickleMemory, TorchFile, read_torch_file
from lora_tool.formats.zero_files import (
    BY_ITS_PROGRAM,
    FOLDER,
    GATHER,
    Master,
    ModelStates,
    OptimStates,
    ZeroFile,
    as_in,
    is_universal,
    model_states,
    optim_states,
    read_masters,
)

States = TypeVar("States")

_RANK = r"zero_pp_rank_(?P<rank>0|[1-9]\d{0,5})_"
_OPTIM = re.compile(rf"(?P<prefix>bf16_|fp16_)?{_RANK}mp_rank_00_optim_states\.pt\Z")
_MODEL = re.compile(rf"(?:{_RANK})?mp_rank_00_model_states\.pt\Z")
_NOT_UNIVERSAL = "move the folder or the optimizer files away: they belong to two checkpoints"
_REFUSED = (
    (r"zero\Z", "has the folder of a universal one (ds_to_universal.py) beside optimizer files", _NOT_UNIVERSAL),
    (
        r"(?:layer_\d+_)?expert_\d+_mp_rank_|expp_rank_",
        "was trained with DeepSpeed-MoE, whose experts lora-tool does not put together",
        BY_ITS_PROGRAM,
    ),
    (
        r"layer_\d+-",
        "was trained with pipeline parallelism, and its layers have numbers instead of the model's names",
        BY_ITS_PROGRAM,
    ),
    (
        r"(?:(?:bf16_|fp16_)?zero_pp_rank_\d+_)?mp_rank_(?!00_)\d{2,}_(?:model|optim)_states\.pt\Z",
        "was trained with tensor parallelism (AutoTP), and lora-tool does not join the slices of its parameters",
        BY_ITS_PROGRAM,
    ),
    (r"offloaded_tensors\Z", "keeps optimizer state in NVMe swap files", GATHER),
)
"""Pattern of a file's name, the checkpoint described in words, and the remedy."""


class ZeroTag(Struct, frozen=True, kw_only=True):
    """One saved step: the rank files by rank. Files that cannot be read are in `problems` and in no mapping."""

    folder: Path
    name: str
    stage: int
    """The `ZeroStage`, or another number that a file has; 0 where no file shows that ZeRO was on (the weights are then
    whole in `module`).
    """
    world_size: int
    """How many ranks the masters were cut into, as most files say; else how many files there are."""
    model: Mapping[int, ModelStates]
    optim: Mapping[int, OptimStates]
    model_files: Mapping[int, str]
    """Rank → name of its model file, the unreadable ones too."""
    optim_files: Mapping[int, str]
    masters: Mapping[str, Master] | None = None
    """The trained parameters of a universal checkpoint, which has no optimizer files; None of any other."""
    problems: tuple[Problem, ...] = ()

    @property
    def files(self) -> tuple[ZeroFile, ...]:
        """The files that can be read."""
        return (*self.model.values(), *self.optim.values())

    @property
    def first(self) -> ModelStates | None:
        """The model file of the lowest rank, whose names count; None where none can be read."""
        return self.model[min(self.model)] if self.model else None


def read_tag(folder: Path, name: str) -> ZeroTag:
    """Return the structure of the rank files in `folder`, the tag `name`.

    Unreadable files are in `problems`. Raises `UnsupportedCheckpoint` for layouts that are refused by name, and
    `NotACheckpoint` without rank files.
    """
    names = sorted(entry.name for entry in folder.iterdir())
    universal = is_universal(folder, names)
    _require_supported(folder, [name for name in names if name != FOLDER] if universal else names)
    # stages 1 and 2 write one model file, and no rank in its name
    model = [(int(match["rank"] or 0), match[0]) for match in map(_MODEL.match, names) if match]
    optim = [(int(match["rank"]), match[0]) for match in map(_OPTIM.match, names) if match]
    if not model and not optim:
        raise NotACheckpoint(f"{folder} holds no DeepSpeed rank files")
    problems: list[Problem] = []
    models = _read_files(folder, model, model_states, problems)
    optims = _read_files(folder, optim, optim_states, problems)
    first = models[min(models)] if models else None
    stage = next((states.stage for states in optims.values()), first.stage if first else 0)
    masters = as_in(first.module if first else {}, read_masters(folder, problems)) if universal else None
    stage = stage if masters is None else max(stage, 1)
    ranks = max(rank for rank, _ in (*model, *optim)) + 1
    counts = Counter(states.world_size for states in optims.values() if states.world_size)
    stated = first.world_size if first and stage else None
    return ZeroTag(
        folder=folder,
        name=name,
        stage=stage,
        world_size=counts.most_common(1)[0][0] if counts else max(stated or 1, ranks),
        model=models,
        optim=optims,
        model_files=dict(model),
        optim_files=dict(optim),
        masters=masters,
        problems=tuple(problems),
    )


def _require_supported(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        for pattern, what, hint in _REFUSED:
            if re.match(pattern, name):
                raise UnsupportedCheckpoint(f"{folder / name}: the checkpoint {what}", hint=hint)
    models, optims = ([match for match in map(pattern.match, names) if match] for pattern in (_MODEL, _OPTIM))
    prefixes = {match["prefix"] or "" for match in optims}
    held = None
    if len({match["rank"] is None for match in models}) > 1:
        held = f"`{models[0][0]}` and `{models[-1][0]}`: two runs, one with ZeRO-3 and one without,"
    elif len(prefixes) > 1:
        held = f"optimizer files of two sorts, with and without `{max(prefixes)}` in front: two runs"
    if held:
        message = f"{folder} holds {held} were saved into one folder"
        raise UnsupportedCheckpoint(
            message, hint="move the files of the other run away; their dates tell which those are"
        )


def _read_files(
    folder: Path,
    files: Iterable[tuple[int, str]],
    interpret: Callable[[TorchFile, int, States | None], States],
    problems: list[Problem],
) -> dict[int, States]:
    """Return rank → `interpret`'s result for its file; the faults of unreadable files go into `problems`.

    `interpret` also gets the states of the rank before where both files say the same.
    """
    found: dict[int, States] = {}
    memory, before, value = PickleMemory(), None, None
    for rank, name in files:
        path = folder / name
        try:
            require_inside(folder, path)
            file = read_torch_file(path, memory=memory)
            if not isinstance(file.value, dict):
                raise CorruptFile.of(path, Defect.BAD_HEADER, "does not hold a dictionary: not written by DeepSpeed")
            problems += problems_of(path, file.unknown)
            found[rank] = before = interpret(file, rank, before if file.value is value else None)
            value = file.value
        except CorruptFile as error:
            problems.append(error.problem)
    return found
