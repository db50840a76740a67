"""The weights of one folder: one file, or shards and their index, as one table.

The index (`model.safetensors.index.json`, `pytorch_model.bin.index.json`) is transformers' format: `weight_map` gives
the shard of each tensor, `metadata.total_size` the sum of their bytes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from lora_tool.core.display import counted
from lora_tool.core.errors import CorruptFile, Defect, Problem
from lora_tool.core.tensors import FileStamp, StoredTensor
from lora_tool.formats.fields import shown
from lora_tool.formats.files import MAX_JSON_BYTES, parse_names, read_all, require_inside
from lora_tool.formats.safetensors import WeightsFile, scan_file

TORCH_SUFFIX = ".bin"
GGUF_SUFFIX = ".gguf"


class Weights(Struct, frozen=True, kw_only=True):
    """All tensors of one set of weight files, in file order, and everything that is wrong with the files."""

    files: tuple[WeightsFile, ...]
    tensors: Mapping[str, StoredTensor]
    index: Path | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def stamps(self) -> tuple[FileStamp, ...]:
        return tuple(map(attrgetter("stamp"), self.files))

    @property
    def is_broken(self) -> bool:
        """Whether a file has a fault after which its tensors cannot be believed."""
        return any(problem.fatal for problem in self.problems)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, headers not counted."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


class _Gathering(Struct):
    """Results collected while the files of one set are read, one after the other."""

    root: Path
    files: list[WeightsFile] = field(default_factory=list)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add(self, name: str) -> None:
        path = self.root / name
        try:
            require_inside(self.root, path)
            file = _scan(path)
        except CorruptFile as error:
            self.problems.append(error.problem)
            return
        self.files.append(file)
        self.problems.extend(file.problems)
        for tensor_name, tensor in file.tensors.items():
            earlier = self.tensors.setdefault(tensor_name, tensor)
            if earlier is not tensor:
                message = f"is also in {earlier.path.name}"
                self.note(Defect.DUPLICATE_KEY, path, message, tensor_name)

    def note(self, defect: Defect, path: Path, message: str, subject: str | None, *, fatal: bool = True) -> None:
        self.problems.append(Problem(defect=defect, path=str(path), message=message, subject=subject, fatal=fatal))

    def weights(self, index: Path | None = None) -> Weights:
        return Weights(files=tuple(self.files), tensors=self.tensors, index=index, problems=tuple(self.problems))


def _scan(path: Path) -> WeightsFile:
    if path.suffix == TORCH_SUFFIX:
        # a twentieth of a second to import, and most folders have none
        from lora_tool.formats.torch_zip import scan_torch_weights

        return scan_torch_weights(path)
    if path.suffix == GGUF_SUFFIX:
        from lora_tool.formats.gguf import scan_gguf  # for few folders

        return scan_gguf(path).weights
    return scan_file(path)


def read_single(path: Path) -> Weights:
    """Return the weights in the one file `path`: a torch file if it ends in `.bin`, llama.cpp's if in `.gguf`, else safetensors. Defects are in `problems`."""
    gathering = _Gathering(path.parent)
    gathering.add(path.name)
    return gathering.weights()


def read_sharded(index: Path) -> Weights:
    """Return the weights that the index file names. Defects of the index and of each shard are in `problems`."""
    gathering = _Gathering(index.parent)
    try:
        require_inside(index.parent, index)
        weight_map, total_size = _read_index(index)
    except CorruptFile as error:
        gathering.problems.append(error.problem)
        return gathering.weights(index)
    for name, held in Counter(weight_map.values()).items():  # in the order of the index
        if not is_bare(name):
            gathering.note(Defect.SHARD_NAME, index, "is not a bare file name: refused", name)
        elif not os.path.exists(index.parent / name):  # noqa: PTH110 - Path.exists raises for names that are too long
            gathering.note(Defect.SHARD_MISSING, index, f"is missing, and {counted(held, 'tensor')} with it", name)
        else:
            gathering.add(name)
    _compare(gathering, index, weight_map)
    held_bytes = sum(map(_bytes_held, gathering.files))
    if not any(problem.fatal for problem in gathering.problems) and total_size != held_bytes:
        message = f"is {total_size!r}, the shards hold {held_bytes} bytes"
        gathering.note(Defect.TOTAL_SIZE, index, message, "metadata.total_size", fatal=False)
    return gathering.weights(index)


def _bytes_held(file: WeightsFile) -> int:
    """Return the bytes of the file's tensors; those of a torch file may share them, which transformers counts once."""
    spans = {(span.offset, span.nbytes) for tensor in file.tensors.values() for span in tensor.spans}
    return sum(nbytes for _, nbytes in spans)


_NOT_IN_A_NAME = frozenset("/\\\0:")


def is_bare(name: str) -> bool:
    """Whether `name` is a file name and nothing else: no folder, no drive, no NUL, not `.` or `..`."""
    return bool(name) and name not in (".", "..") and _NOT_IN_A_NAME.isdisjoint(name)


def _read_index(index: Path) -> tuple[dict[str, str], object]:
    raw = parse_names(read_all(index, limit=MAX_JSON_BYTES, too_large=Defect.BAD_JSON), index)
    weight_map: Any = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict):
        message = "has no `weight_map` of tensor names to file names"
        raise CorruptFile.of(index, Defect.BAD_JSON, message, "weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            message = f"expected the name of a file, found {shown(shard)}"
            raise CorruptFile.of(index, Defect.BAD_JSON, message, f"weight_map[{shown(name)}]")
    metadata = raw.get("metadata")
    return weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None


def _compare(gathering: _Gathering, index: Path, weight_map: Mapping[str, str]) -> None:
    # a shard that is missing or broken has its own problem already
    whole = {
        file.path.name: file.tensors for file in gathering.files if not any(problem.fatal for problem in file.problems)
    }
    for name, shard in weight_map.items():
        if shard in whole and name not in whole[shard]:
            gathering.note(Defect.INDEX_MISMATCH, index, f"the index puts it in {shard}, which does not hold it", name)
    for name, tensor in gathering.tensors.items():
        if name not in weight_map:
            gathering.note(Defect.INDEX_MISMATCH, index, f"is in {tensor.path.name}, but not in the index", name)
