"""The layers of DeepSpeed's pipelines: a file for each, with all of its tensors in the model's type.

``layer_03-model_states.pt`` is written by `PipelineModule.save_state_dict` (DeepSpeed 0.19.8, `runtime/pipe/module.py`),
with ``-model_00`` in its name where the topology has tensor parallelism, if only of one rank. The number is the layer's
in the whole pipeline, and the module calls its parameters after it: ``3.up.weight``. Masters lie in the rank files of the
stages, which are numbered as ranks of tensor parallelism are elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from msgspec.structs import replace

from lora_tool.errors import Problem
from lora_tool.formats.whole_files import WholeFile, read_whole_files

LAYER_FILE = re.compile(r"layer_(?P<layer>\d{2,6})(?:-model_00)?-model_states\.pt\Z")
TIED = "tied_modules."
"""What the names of parameters begin with that several layers share, whose files do not say so."""


def layer_of(name: str) -> int | None:
    """Return which layer the parameter of this name belongs to, None where its name does not begin with a number."""
    number = name.partition(".")[0]
    return int(number) if number.isdecimal() and len(number) <= 6 else None  # noqa: PLR2004 - as in names of files


def read_layers(folder: Path, names: Iterable[str], problems: list[Problem]) -> dict[int, WholeFile]:
    """Return the layers whose files are among `names`; what is wrong with unreadable ones goes into `problems`."""
    files = {int(match["layer"]): match[0] for match in map(LAYER_FILE.match, names) if match}
    return {
        number: replace(layer, tensors={f"{number}.{name}": tensor for name, tensor in layer.tensors.items()})
        for number, layer in read_whole_files(folder, files, "a layer", problems).items()
    }
