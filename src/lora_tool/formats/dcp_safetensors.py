"""`.distcp` files of safetensors, which torch's writers make under `SerializationFormat.SAFETENSORS`.

Source: torch 2.13 `distributed/checkpoint/filesystem.py` (`_write_files_from_queue`): pickled objects come first, then one
safetensors archive up to the end of the file. For each of its tensors `.metadata` has the beginning of the archive; where
a tensor lies in the whole one stands in the archive's header, too. Torch has no reader for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core.errors import CorruptFile, Defect
from lora_tool.core.tensors import StoredTensor, TensorSpec
from lora_tool.formats.cut_safetensors import CutPart, cut_parts
from lora_tool.formats.files import open_regular, read_at, require_inside
from lora_tool.formats.safetensors import scan_file

_BEGINNING = b'{"'
"""What follows the 8 bytes of the header's length."""


class Archive(Struct, frozen=True, kw_only=True):
    """What one process saved of each tensor."""

    path: Path
    parts: Mapping[str, CutPart]

    def tensor(self, fqn: str, offsets: tuple[int, ...], wanted: TensorSpec) -> StoredTensor:
        """Return the part of the tensor `fqn` that begins at `offsets`, named as in `wanted`. Raises `CorruptFile`."""
        part = self.parts.get(fqn)
        if part is None:
            raise CorruptFile.of(self.path, Defect.WRONG_SIZE, "holds none of this tensor, but .metadata says so", fqn)
        held = f"{part.stored.dtype} {list(part.stored.shape)} from {list(part.offsets)} on"
        said = f"{wanted.dtype} {list(wanted.shape)} from {list(offsets)} on"
        if held != said:
            message = f"holds {held}, but .metadata says {said}: it is another rank's file, or from another run"
            raise CorruptFile.of(self.path, Defect.WRONG_SIZE, message, fqn)
        return replace(part.stored, spec=wanted)


def read_archive(folder: Path, name: str, at: int) -> Archive | None:
    """Return the archive of safetensors that begins at byte `at` of a file of `folder`, None where another format does.

    Raises `CorruptFile` for a file that cannot be read, or an archive that is not whole.
    """
    path = folder / name
    require_inside(folder, path)
    with open_regular(path) as fd:
        if read_at(path, fd, at, 8 + len(_BEGINNING))[8:] != _BEGINNING:
            return None
    scanned = scan_file(path, start=at)
    fatal = next((problem for problem in scanned.problems if problem.fatal), None)
    if fatal is not None:
        raise CorruptFile(fatal)
    return Archive(path=path, parts=dict(cut_parts(scanned)))
