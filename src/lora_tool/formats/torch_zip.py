"""Reading what `torch.save` writes: structure and places of tensors, without torch and without running the pickle.

Since torch 1.6 the file is a zip archive (`torch/csrc/jit/serialization`, `caffe2/serialize/inline_container.cc`):
``<root>/data.pkl`` is the object, ``<root>/data/<key>`` the bytes of each storage, stored and not compressed, so every
tensor is one span of the file. ``<root>`` is the name that the file had when it was written.
"""

from __future__ import annotations

import io
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lora_tool.errors import CorruptFile, Defect
from lora_tool.formats.distributed_tensors import KNOWN
from lora_tool.formats.files import instead_of_weights, open_regular, read_at
from lora_tool.formats.pickles import MAX_PICKLE_BYTES, load
from lora_tool.formats.torch_objects import ElementType, LazyTensor, Storage
from lora_tool.tensors import DType, FileStamp, Span, StoredTensor, TensorSpec

_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first pickle of the format before 1.6 (`torch/serialization.py`, MAGIC_NUMBER)."""

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_ENCRYPTED = 1
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, struct.error, OSError, ValueError, OverflowError)
"""What `zipfile` raises for a broken archive: ValueError for names that are no UTF-8, RuntimeError for odd versions."""


class Record(NamedTuple):
    """One stored member of the archive: where its local header begins, its size and CRC32 by the central directory."""

    path: Path
    name: str
    header_at: int
    nbytes: int
    crc: int

    def data_at(self) -> int:
        """Return the offset of its first byte in the file. Raises `CorruptFile` where the local header disagrees."""
        # only the local header knows: torch pads each one so that the data is aligned to 64 bytes
        with open_regular(self.path) as fd:
            raw = read_at(self.path, fd, self.header_at, _LOCAL_HEADER.size + len(os.fsencode(self.name)))
            size = os.fstat(fd).st_size
        if len(raw) < _LOCAL_HEADER.size or raw[:4] != b"PK\x03\x04":
            message = "has no local header where the directory says"
            raise CorruptFile.of(self.path, Defect.BAD_HEADER, message, self.name)
        fields = _LOCAL_HEADER.unpack_from(raw)
        if raw[_LOCAL_HEADER.size :] != self.name.encode() or fields[9] != len(self.name.encode()):
            raise CorruptFile.of(self.path, Defect.BAD_HEADER, "has another name in its local header", self.name)
        start: int = self.header_at + _LOCAL_HEADER.size + fields[9] + fields[10]
        if start + self.nbytes > size:
            message = f"ends at byte {start + self.nbytes:,}, the file at {size:,}"
            raise CorruptFile.of(self.path, Defect.TRUNCATED, message, self.name)
        return start


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFile:
    """What one file holds: the object, with `LazyTensor`s and `Stub`s in it, and the archive's own facts."""

    stamp: FileStamp
    root: str
    """Name of the archive's only folder: the stem of the file's name when it was written, or ``archive``."""
    value: Any
    records: Mapping[str, Record]
    """Key of each storage → its record."""
    serialization_id: str | None = None
    """What torch derives from the records' names and CRCs: two files have the same only if they are copies."""

    @property
    def path(self) -> Path:
        return self.stamp.path

    def record(self, tensor: LazyTensor) -> Record:
        """Return the record that holds a tensor of this file."""
        return self.records[tensor.key]

    def stored(self, tensor: LazyTensor, name: str) -> StoredTensor:
        """Return a tensor of this file, called `name`. Raises `CorruptFile`, also where it is no single span."""
        if not tensor.is_contiguous:
            message = f"is stored with strides {list(tensor.stride)} for shape {list(tensor.shape)}: lora-tool reads only contiguous tensors"
            raise CorruptFile.of(self.path, Defect.BAD_HEADER, message, name)
        spec = TensorSpec(name=name, dtype=tensor.dtype, shape=tensor.shape)
        offset = self.record(tensor).data_at() + tensor.start * tensor.dtype.bits // 8
        return StoredTensor(spec=spec, spans=(Span(path=self.path, offset=offset, nbytes=spec.nbytes),))


class PickleMemory:
    """The last pickle that was read, and what it says: every rank's file has the same one, but for its own device."""

    def __init__(self) -> None:
        self._pickled = b""
        self._value: Any = None
        self._storages: Mapping[str, Storage] = {}

    def value(self, pickled: bytes, records: Mapping[str, Record]) -> Any:  # noqa: ANN401
        """Return what `pickled` says. Raises ValueError as `load` does, and where it does not fit the `records`."""
        same = pickled == self._pickled or _DEVICE.sub(b"", pickled) == _DEVICE.sub(b"", self._pickled)
        if same and self._pickled:
            for storage in self._storages.values():
                _require_record(storage, records)
            return self._value
        storages: dict[str, Storage] = {}

        def found(pid: Any) -> Storage:  # noqa: ANN401 - what the pickle says
            kind, of, key, _, numel = pid
            if kind != "storage" or not isinstance(of, ElementType) or type(key) is not str or type(numel) is not int:
                raise ValueError("a persistent id is not that of a storage")
            storages[key] = Storage(key, of.dtype, numel)
            _require_record(storages[key], records)
            return storages[key]

        self._value = load(pickled, known=KNOWN, persistent=found)
        self._pickled, self._storages = pickled, storages
        return self._value


def read_torch_file(
    path: Path, *, offset: int = 0, nbytes: int | None = None, memory: PickleMemory | None = None
) -> TorchFile:
    """Return the object in the torch file `path`, or in the archive of `nbytes` bytes embedded in it at `offset`.

    With the `memory` of the file before, what both say is one object. No tensor is read, no code runs. Raises
    `CorruptFile`: no such archive, truncated, members that are compressed, encrypted or of one name, a broken pickle.
    """
    with open_regular(path) as fd:
        stamp = FileStamp.from_stat(path, os.fstat(fd))
        length = stamp.size - offset if nbytes is None else nbytes
        if offset < 0 or length < 0 or offset + length > stamp.size:
            message = f"should hold {length:,} bytes at {offset:,}, it is {stamp.size:,} bytes long"
            raise CorruptFile.of(path, Defect.TRUNCATED, message)
        window = io.BufferedReader(_Window(path, fd, offset, length), 1 << 16)
        _require_zip(path, read_at(path, fd, offset, max(16, len(_LEGACY_MAGIC))), length)
        try:
            with zipfile.ZipFile(window) as archive:
                return _read_archive(archive, stamp, offset, memory or PickleMemory())
        except _ZIP_ERRORS as error:
            raise CorruptFile.of(path, Defect.TRUNCATED, f"is not a whole torch file ({error}): truncated?") from error


class _Window(io.RawIOBase):
    """`nbytes` bytes of a descriptor from `offset`, as a file of their own."""

    def __init__(self, path: Path, fd: int, offset: int, nbytes: int) -> None:
        self._path, self._fd, self._offset, self._nbytes, self._at = path, fd, offset, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        if base + offset < 0:
            raise OSError("seek before the start")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - typeshed's WriteableBuffer
        wanted = max(0, min(len(buffer), self._nbytes - self._at))
        data = read_at(self._path, self._fd, self._offset + self._at, wanted)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _require_zip(path: Path, head: bytes, length: int) -> None:
    if head.startswith(b"PK"):
        return
    if length == 0:
        raise CorruptFile.of(path, Defect.TRUNCATED, "is empty: it was never written")
    defect, message = (
        Defect.BAD_HEADER,
        instead_of_weights(head) or "is not a torch file, so lora-tool does not read it",
    )
    if head.startswith(_LEGACY_MAGIC):
        defect = Defect.PICKLE
        message = "is in torch's format from before 1.6, not a zip archive: reading it would mean running its pickle"
    elif head.startswith(b"\x80"):
        defect, message = (
            Defect.PICKLE,
            "is a bare pickle, which can run code when it is loaded; lora-tool does not read it",
        )
    elif head[8:10] == b'{"':
        message = "is a safetensors file, not a torch file"
    raise CorruptFile.of(path, defect, message)


def _read_archive(archive: zipfile.ZipFile, stamp: FileStamp, offset: int, memory: PickleMemory) -> TorchFile:
    path, infos = stamp.path, archive.infolist()
    members = {info.filename: info for info in infos}
    if len(members) != len(infos):
        raise CorruptFile.of(path, Defect.DUPLICATE_KEY, "holds two members with the same name")
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise CorruptFile.of(path, Defect.BAD_HEADER, "is compressed, which torch never does", info.filename)
        if info.flag_bits & _ENCRYPTED:
            raise CorruptFile.of(path, Defect.BAD_HEADER, "is encrypted", info.filename)
    roots = [name.removesuffix("/data.pkl") for name in members if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        message = "is a zip archive without one data.pkl: not written by torch.save"
        raise CorruptFile.of(path, Defect.BAD_HEADER, message)
    root = roots[0]
    if f"{root}/constants.pkl" in members:
        raise CorruptFile.of(path, Defect.PICKLE, "is a TorchScript program, not a checkpoint")
    if _text(archive, members, f"{root}/byteorder") not in (None, "little"):
        raise CorruptFile.of(path, Defect.BAD_HEADER, "was written on a big-endian machine")
    data = f"{root}/data/"
    records = {
        name[len(data) :]: Record(path, name, offset + info.header_offset, info.file_size, info.CRC)
        for name, info in members.items()
        if name.startswith(data)
    }
    return TorchFile(
        stamp=stamp,
        root=root,
        value=_unpickled(archive, members[f"{root}/data.pkl"], path, records, memory),
        records=records,
        serialization_id=_text(archive, members, f"{root}/.data/serialization_id"),
    )


def _text(archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo], name: str) -> str | None:
    """Return the content of a small member, None where it is not there or not small."""
    info = members.get(name)
    return None if info is None or info.file_size > 200 else archive.read(info).decode("latin-1").strip()  # noqa: PLR2004


def _unpickled(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path, records: Mapping[str, Record], memory: PickleMemory
) -> Any:  # noqa: ANN401
    if info.file_size > MAX_PICKLE_BYTES:
        message = f"has a pickle of {info.file_size:,} bytes, more than the {MAX_PICKLE_BYTES:,} that lora-tool reads"
        raise CorruptFile.of(path, Defect.PICKLE, message)
    try:
        return memory.value(archive.read(info), records)
    except ValueError as error:
        raise CorruptFile.of(path, Defect.PICKLE, str(error)) from error


_DEVICE = re.compile(rb"X[\x05\x06]\0\0\0[a-z]{3,4}:\d")
"""The text in a pickle that says where a tensor was: `cuda:3`."""


def _require_record(storage: Storage, records: Mapping[str, Record]) -> None:
    record = records.get(storage.key)
    if record is None:
        raise ValueError(f"storage {storage.key!r:.40} is not in the archive")
    if record.nbytes * 8 != storage.numel * storage.dtype.bits:
        raise ValueError(
            f"storage {storage.key!r:.40} should be {storage.numel:,} × {storage.dtype}, "
            f"its record has {record.nbytes:,} bytes"
        )


_SCALARS = {DType.F32: "<f", DType.F64: "<d", DType.I64: "<q", DType.I32: "<i"}


def read_scalar(file: TorchFile, tensor: LazyTensor) -> float | None:
    """Return the value of a tensor of one element of `file`, None where it is none or of a type that counts nothing."""
    layout = _SCALARS.get(tensor.dtype)
    if tensor.numel != 1 or layout is None:
        return None
    (span,) = file.stored(tensor, "scalar").spans
    with open_regular(span.path) as fd:
        (value,) = struct.unpack(layout, read_at(span.path, fd, span.offset, span.nbytes))
    return float(value)
