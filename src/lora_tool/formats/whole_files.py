"""DeepSpeed's files of whole tensors, in the model's type: of a pipeline's layer, or of an expert. Each is a dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from lora_tool.errors import CorruptFile, Defect, Problem
from lora_tool.formats.files import require_inside
from lora_tool.formats.state_dicts import require_read
from lora_tool.formats.torch_objects import LazyTensor
from lora_tool.formats.torch_zip import PickleMemory, TorchFile, read_torch_file
from lora_tool.tensors import is_tensor_name

Key = TypeVar("Key", int, tuple[int, int])


class WholeFile(Struct, frozen=True, kw_only=True):
    """The weights of one layer or expert, by the names that they have in the whole module."""

    file: TorchFile
    tensors: Mapping[str, LazyTensor]

    @property
    def path(self) -> Path:
        return self.file.path


def read_whole_files(folder: Path, names: Mapping[Key, str], of: str, problems: list[Problem]) -> dict[Key, WholeFile]:
    """Return the files of these names in `folder`, in the order of the keys; tensors have the names that the file gives.

    `of` is what each is of, in words: "a layer". What is wrong with unreadable ones goes into `problems`.
    """
    found: dict[Key, WholeFile] = {}
    memory = PickleMemory()
    for key, name in sorted(names.items()):
        path = folder / name
        try:
            require_inside(folder, path)
            found[key] = _whole(read_torch_file(path, memory=memory), of)
        except CorruptFile as error:
            problems.append(error.problem)
    return found


def _whole(file: TorchFile, of: str) -> WholeFile:
    table = file.value
    if not isinstance(table, dict) or not all(isinstance(name, str) and is_tensor_name(name) for name in table):
        raise CorruptFile.of(file.path, Defect.BAD_HEADER, f"is not a dictionary of {of}'s weights")
    tensors = {name: value for name, value in table.items() if isinstance(require_read(file, name, value), LazyTensor)}
    return WholeFile(file=file, tensors=tensors)
