"""The layers of DeepSpeed's pipelines: a file for each, with all of its tensors in the model's type.

``layer_03-model_states.pt`` is written by `PipelineModule.save_state_dict` (DeepSpeed 0.19.8, `runtime/pipe/module.py`),
with ``-model_00`` in its name where the topology has tensor parallelism, if only of one rank. The number is the layer's
in the whole pipeline, and the module calls its parameters after it: ``3.up.weight``. Masters lie in the rank files of the
stages, which are numbered as ranks of tensor parallelism are elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_tool.errors import CorruptFile, Defect, Problem
from lora_tool.formats.files import require_inside
from lora_tool.formats.state_dicts import require_read
from lora_tool.formats.torch_objects import LazyTensor
from lora_tool.formats.torch_zip import PickleMemory, TorchFile, read_torch_file
from lora_tool.tensors import is_tensor_name

LAYER_FILE = re.compile(r"layer_(?P<layer>\d{2,6})(?:-model_00)?-model_states\.pt\Z")
TIED = "tied_modules."
"""What the names of parameters begin with that several layers share, whose files do not say so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFile:
    """The weights of one layer, by the names that they have in the whole module."""

    file: TorchFile
    tensors: Mapping[str, LazyTensor]

    @property
    def path(self) -> Path:
        return self.file.path


def layer_of(name: str) -> int | None:
    """Return which layer the parameter of this name belongs to, None where its name does not begin with a number."""
    number = name.partition(".")[0]
    return int(number) if number.isdecimal() and len(number) <= 6 else None  # noqa: PLR2004 - as in names of files


def read_layers(folder: Path, names: Iterable[str], problems: list[Problem]) -> dict[int, LayerFile]:
    """Return the layers whose files are among `names`; what is wrong with unreadable ones goes into `problems`."""
    found = {}
    memory = PickleMemory()
    for match in filter(None, map(LAYER_FILE.match, names)):
        path, number = folder / match[0], int(match["layer"])
        try:
            require_inside(folder, path)
            found[number] = _layer(read_torch_file(path, memory=memory), number)
        except CorruptFile as error:
            problems.append(error.problem)
    return dict(sorted(found.items()))


def _layer(file: TorchFile, number: int) -> LayerFile:
    table = file.value
    if not isinstance(table, dict) or not all(isinstance(name, str) and is_tensor_name(name) for name in table):
        raise CorruptFile.of(file.path, Defect.BAD_HEADER, "is not a dictionary of a layer's weights")
    held = {name: value for name, value in table.items() if isinstance(require_read(file, name, value), LazyTensor)}
    return LayerFile(file=file, tensors={f"{number}.{name}": tensor for name, tensor in held.items()})
