"""Reading files of `torch.save`: structure and places of tensors, without torch and without running the pickle.

Since torch 1.6 the file is a zip archive (`torch/csrc/jit/serialization`, `caffe2/serialize/inline_container.cc`):
``<root>/data.pkl`` is the object, ``<root>/data/<key>`` the bytes of each storage, stored and not compressed, so every
tensor is one span of the file. ``<root>`` is the name that the file had when it was written.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from msgspec import Struct

from lora_tool.core.errors import CorruptFile, Defect, Problem
from lora_tool.core.tensors import DType, FileStamp, Span, StoredTensor, TensorSpec, TransposedSpan, is_tensor_name
from lora_tool.formats.distributed_tensors import KNOWN, DistributedTensor
from lora_tool.formats.files import instead_of_weights, open_regular, read_at
from lora_tool.formats.pickle_names import problems_of
from lora_tool.formats.pickle_objects import Global, name_of
from lora_tool.formats.pickles import MAX_PICKLE_BYTES, load
from lora_tool.formats.safetensors import WeightsFile
from lora_tool.formats.torch_objects import ElementType, LazyTensor, TorchStorage

_LEGACY_MAGIC = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The first pickle of the format before 1.6 (`torch/serialization.py`, MAGIC_NUMBER)."""

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_ENCRYPTED = 1
_SMALL = 1 << 16
"""Bytes that are read at once."""
ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, struct.error, OSError, ValueError, OverflowError)
"""Exceptions of `zipfile` for broken archives: ValueError for names not in UTF-8, RuntimeError for odd versions."""


class Record(NamedTuple):
    """One stored member of the archive: where its first byte is in the file, its size and CRC32 by the directory."""

    path: Path
    name: str
    offset: int
    nbytes: int
    crc: int


class TorchFile(Struct, frozen=True, kw_only=True):
    """What one file holds: the object, with `LazyTensor`s and `Stub`s in it, and the archive's own facts."""

    stamp: FileStamp
    root: str
    """Name of the archive's only folder: the stem of the file's name when it was written, or ``archive``."""
    value: Any
    records: Mapping[str, Record]
    """Key of each storage → its record."""
    unknown: Mapping[Global, bool] = {}
    """The names in its pickle that have no meaning here, and whether it calls them."""
    serialization_id: str | None = None
    """What torch derives from the records' names and CRCs: two files have the same only if they are copies."""

    @property
    def path(self) -> Path:
        return self.stamp.path

    def record(self, tensor: LazyTensor) -> Record:
        """Return the record that holds a tensor of this file."""
        return self.records[tensor.key]

    def stored(self, tensor: LazyTensor, name: str) -> StoredTensor:
        """Return a tensor of this file, called `name`. Raises `CorruptFile`, also where it is not one span."""
        spec = TensorSpec(name=name, dtype=tensor.dtype, shape=tensor.shape)
        offset = self.record(tensor).offset + tensor.start * tensor.dtype.bits // 8
        if tensor.is_contiguous:
            span = Span(path=self.path, offset=offset, nbytes=spec.nbytes)
        elif tensor.is_transposed:
            rows, columns = tensor.shape
            itemsize = tensor.dtype.bits // 8
            span = TransposedSpan(
                path=self.path, offset=offset, nbytes=spec.nbytes, rows=rows, columns=columns, itemsize=itemsize
            )
        else:
            message = (
                f"is stored with strides {list(tensor.stride)} for shape {list(tensor.shape)}: "
                "lora-tool reads only contiguous tensors and transposed matrices"
            )
            raise CorruptFile.of(self.path, Defect.BAD_HEADER, message, name)
        return StoredTensor(spec=spec, spans=(span,))


class PickleMemory:
    """The last pickle, and its value: every rank's file has the same one, except for the rank's device."""

    def __init__(self) -> None:
        self._pickled = b""
        self._loaded: tuple[Any, Mapping[Global, bool]] = (None, {})
        self._storages: Mapping[str, TorchStorage] = {}

    def loaded(self, pickled: bytes, records: Mapping[str, Record]) -> tuple[Any, Mapping[Global, bool]]:
        """Return what `load` does of `pickled`. Raises ValueError as that, and where it does not fit the `records`."""
        same = pickled == self._pickled or _DEVICE.sub(b"", pickled) == _DEVICE.sub(b"", self._pickled)
        if same and self._pickled:
            for storage in self._storages.values():
                _require_record(storage, records)
            return self._loaded
        storages: dict[str, TorchStorage] = {}

        def found(pid: Any) -> TorchStorage:  # noqa: ANN401 - any value of the pickle
            kind, of, key, _, numel = pid
            if kind != "storage" or not isinstance(of, ElementType) or type(key) is not str or type(numel) is not int:
                raise ValueError(f"a persistent id is not that of a storage, but of {name_of(of) or 'something else'}")
            storages[key] = TorchStorage(key, of.dtype, numel)
            _require_record(storages[key], records)
            return storages[key]

        self._loaded = load(pickled, known=KNOWN, persistent=found)
        self._pickled, self._storages = pickled, storages
        return self._loaded


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
        part = _Part(path, fd, offset, length)
        _require_zip(path, read_at(path, fd, offset, max(16, len(_LEGACY_MAGIC))), length)
        try:
            with zipfile.ZipFile(part.window()) as archive:
                return _read_archive(archive, part, stamp, memory or PickleMemory())
        except ZIP_ERRORS as error:
            raise CorruptFile.of(path, Defect.TRUNCATED, f"is not a whole torch file ({error}): truncated?") from error


class _Part(NamedTuple):
    """`nbytes` bytes of an open file from `offset`, in which an archive lies."""

    path: Path
    fd: int
    offset: int
    nbytes: int

    def window(self) -> IO[bytes]:
        """Return the part as a file of its own."""
        if self.nbytes <= _SMALL:  # one of the thousands in a distributed checkpoint of LoRA
            return io.BytesIO(read_at(self.path, self.fd, self.offset, self.nbytes))
        return io.BufferedReader(_Window(self), _SMALL)

    def place(self, info: zipfile.ZipInfo) -> int:
        """Return the offset in the file of a member's first byte. Raises `CorruptFile` where its header disagrees."""
        # only the local header knows: torch pads each one so that the data is aligned to 64 bytes
        header, name = self.offset + info.header_offset, info.filename.encode()
        raw = read_at(self.path, self.fd, header, _LOCAL_HEADER.size + len(name))
        if len(raw) < _LOCAL_HEADER.size or raw[:4] != b"PK\x03\x04":
            message = "has no local header where the directory says"
            raise CorruptFile.of(self.path, Defect.BAD_HEADER, message, info.filename)
        fields = _LOCAL_HEADER.unpack_from(raw)
        if raw[_LOCAL_HEADER.size :] != name or fields[9] != len(name):
            raise CorruptFile.of(self.path, Defect.BAD_HEADER, "has another name in its local header", info.filename)
        start: int = header + _LOCAL_HEADER.size + fields[9] + fields[10]
        if start + info.file_size > self.offset + self.nbytes:
            message = f"ends at byte {start + info.file_size:,}, the archive at {self.offset + self.nbytes:,}"
            raise CorruptFile.of(self.path, Defect.TRUNCATED, message, info.filename)
        return start

    def content(self, info: zipfile.ZipInfo) -> bytes:
        """Return the bytes of a member. Raises `CorruptFile`, and BadZipFile where the CRC32 is not theirs."""
        data = read_at(self.path, self.fd, self.place(info), info.file_size)
        if zlib.crc32(data) != info.CRC:
            raise zipfile.BadZipFile(f"bad CRC32 of {info.filename}")
        return data


class _Window(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, part: _Part) -> None:
        self._part, self._at = part, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._part.nbytes}[whence]
        if base + offset < 0:
            raise OSError("seek before the start")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - typeshed's WriteableBuffer
        path, fd, offset, nbytes = self._part
        data = read_at(path, fd, offset + self._at, max(0, min(len(buffer), nbytes - self._at)))
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


def _read_archive(archive: zipfile.ZipFile, part: _Part, stamp: FileStamp, memory: PickleMemory) -> TorchFile:
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
    if _text(part, members, f"{root}/byteorder") not in (None, "little"):
        raise CorruptFile.of(path, Defect.BAD_HEADER, "was written on a big-endian machine")
    data = f"{root}/data/"
    records = {
        name[len(data) :]: Record(path, name, part.place(info) if info.file_size else 0, info.file_size, info.CRC)
        for name, info in members.items()
        if name.startswith(data)
    }
    value, unknown = _unpickled(part, members[f"{root}/data.pkl"], records, memory)
    return TorchFile(
        stamp=stamp,
        root=root,
        value=value,
        records=records,
        unknown=unknown,
        serialization_id=_text(part, members, f"{root}/.data/serialization_id"),
    )


def _text(part: _Part, members: Mapping[str, zipfile.ZipInfo], name: str) -> str | None:
    """Return the content of a small member, None where it is not there or not small."""
    info = members.get(name)
    return None if info is None or info.file_size > 200 else part.content(info).decode("latin-1").strip()  # noqa: PLR2004


def _unpickled(
    part: _Part, info: zipfile.ZipInfo, records: Mapping[str, Record], memory: PickleMemory
) -> tuple[Any, Mapping[Global, bool]]:
    if info.file_size > MAX_PICKLE_BYTES:
        message = f"has a pickle of {info.file_size:,} bytes, more than the {MAX_PICKLE_BYTES:,} that lora-tool reads"
        raise CorruptFile.of(part.path, Defect.PICKLE, message)
    try:
        return memory.loaded(part.content(info), records)
    except ValueError as error:
        raise CorruptFile.of(part.path, Defect.PICKLE, str(error)) from error


_DEVICE = re.compile(rb"X[\x05\x06]\0\0\0[a-z]{3,4}:\d")
"""The text in a pickle that says where a tensor was: `cuda:3`."""


def _require_record(storage: TorchStorage, records: Mapping[str, Record]) -> None:
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


# Weights in a torch zip file (`pytorch_model.bin`, `adapter_model.bin`): a flat dict of tensors, as a tensor table.
#
# Nothing of the file is run: `torch_zip` reads its pickle with an interpreter that knows tensors and nothing else.


def scan_torch_weights(path: Path) -> WeightsFile:
    """Return the tensors of `path` with all that is wrong; a file that cannot be read safely has none.

    A good file has one problem that is not fatal: that it is a pickle, which other tools run, or what they would run.
    Tensors that share a storage, as tied weights do, share their spans. Raises `CorruptFile` only where `path` is not a readable, regular
    file.
    """
    with open_regular(path):
        stamp = FileStamp.of(path)
    try:
        file = read_torch_file(path)
        if not isinstance(file.value, dict):
            message = f"holds a {type(file.value).__name__}, expected a dict of tensors"
            raise CorruptFile.of(path, Defect.BAD_HEADER, message)
    except CorruptFile as error:
        return WeightsFile(stamp=stamp, problems=(error.problem,))
    message = "is a pickle, which can run code when other tools load it; lora-tool read it without running it"
    plain = Problem(defect=Defect.PICKLE, path=str(path), message=message, fatal=False)
    problems = list(problems_of(path, file.unknown, weights=True)) or [plain]
    tensors: dict[str, StoredTensor] = {}
    for name, item in file.value.items():
        try:
            tensors[name] = _stored(file, name, item)
        except CorruptFile as error:
            problems.append(error.problem)
    return WeightsFile(stamp=stamp, tensors=tensors, problems=tuple(problems))


def _stored(file: TorchFile, name: object, item: object) -> StoredTensor:
    if not isinstance(name, str) or not is_tensor_name(name):
        raise CorruptFile.of(file.path, Defect.BAD_HEADER, f"has the key {name!r:.80}, expected a tensor's name")
    if not isinstance(item, LazyTensor):
        if isinstance(item, DistributedTensor):
            way = f"lora-tool consolidate {shlex.quote(str(file.path.parent))}"
            message = f"is one rank's part of a tensor {list(item.shape)}: put the rank files together first: {way}"
            raise CorruptFile.of(file.path, Defect.BAD_HEADER, message, name)
        kind = "a nested dict" if isinstance(item, dict) else f"a {type(item).__name__}"
        message = f"is {kind}, expected a tensor: this is not the state dict of a model or an adapter"
        raise CorruptFile.of(file.path, Defect.BAD_HEADER, message, name)
    return file.stored(item, name)


# The pickles in an archive whose contents nothing reads.


LARGEST = 16 << 20
"""Bytes of a pickle that are read: the structure of a checkpoint, whose tensors lie behind it or beside it."""
_MOST_MEMBERS = 64
"""Pickles of one archive that are read; torch's have one."""


def pickles_in(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the pickles of an archive of torch; none of what is not one."""
    try:
        with zipfile.ZipFile(file) as archive:
            names = [name for name in archive.namelist() if name.endswith(".pkl")]
            for name in names[:_MOST_MEMBERS]:
                with archive.open(name) as member:
                    yield member.read(LARGEST)
    except ZIP_ERRORS:
        return  # another rule's
