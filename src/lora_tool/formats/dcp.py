"""Torch's distributed checkpoints, as FSDP1, FSDP2 and tensor parallelism write them: `.metadata`, `.distcp` files.

No tensor is read, and torch is not needed.

Sources: torch 2.13 `distributed/checkpoint/metadata.py` (Metadata, TensorStorageMetadata, ChunkStorageMetadata,
MetadataIndex) and `filesystem.py` (`_StorageInfo`; a `.distcp` file is one `torch.save` archive after the other).
`.metadata` is a bare pickle of those classes, which torch loads with `pickle.load`; here they are inert stubs.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from msgspec import Struct, field
from msgspec.structs import replace

from lora_tool.core.display import some
from lora_tool.core.errors import CorruptFile, Defect, IncompleteCheckpoint, Problem, UnsupportedCheckpoint
from lora_tool.core.tensors import DType, FileStamp, Span, StoredTensor, TensorSpec, is_tensor_name
from lora_tool.formats import pieces
from lora_tool.formats.dcp_objects import foreign_objects, is_tensor
from lora_tool.formats.distributed_tensors import KNOWN
from lora_tool.formats.files import open_regular, read_all, read_at, require_inside
from lora_tool.formats.pickle_names import problems_of
from lora_tool.formats.pickle_objects import MOST_DIMENSIONS, Global, Stub
from lora_tool.formats.pickles import MAX_PICKLE_BYTES, load, no_storage
from lora_tool.formats.pieces import Piece, assembled
from lora_tool.formats.state_dicts import TO_ONE_FILE, module_names, of_optimizer
from lora_tool.formats.torch_objects import ElementType, LazyTensor
from lora_tool.formats.torch_zip import PickleMemory, Record, read_torch_file
from lora_tool.formats.weights import is_bare

METADATA = ".metadata"
_OF_RANK = re.compile(r"__(?P<rank>\d{1,6})\.metadata\Z")
"""Of one rank, where each saved without the others (`use_collectives=False`)."""
_PIECES_OF_RANK = re.compile(r"__(?P<rank>\d{1,6})_\d+\.distcp\Z")


class Chunk(Struct, frozen=True, kw_only=True):
    """A rectangle of a tensor: the archive of `nbytes` bytes at `at` in the file `filename`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    filename: str
    at: int
    nbytes: int


class DcpTensor(Struct, frozen=True, kw_only=True):
    """One tensor, and the chunks that it was cut into, by their offsets."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


class StoredChunk(NamedTuple):
    """The bytes of one chunk, and the zip record that they are in."""

    stored: StoredTensor
    record: Record


Pieces = Mapping[str, tuple[StoredChunk, ...]]
"""Tensor name → its chunks' bytes, in order. Tensors with an unreadable chunk are left out."""


class DcpFolder(Struct, frozen=True, kw_only=True):
    """The module's tensors as `.metadata` lists them, by the module's own names, and the chunks that were found."""

    folder: Path
    metadata: tuple[str, ...] = (METADATA,)
    """The files that say it."""
    tensors: Mapping[str, DcpTensor]
    pieces: Pieces = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    """The first of each broken file."""
    beside: tuple[str, ...] = ()
    """Keys of the other states in the checkpoint: the optimizer's, or averaged weights."""
    optimised: frozenset[str] = frozenset()
    """Names of the parameters that the optimizer's states in it are of."""
    save_id: str | None = None

    @property
    def filenames(self) -> tuple[str, ...]:
        """The `.distcp` files that hold the tensors."""
        return tuple(dict.fromkeys(chunk.filename for tensor in self.tensors.values() for chunk in tensor.chunks))

    @property
    def missing(self) -> tuple[str, ...]:
        """Those of them that are not there."""
        return tuple(name for name in self.filenames if not (self.folder / name).exists())


def read_dcp(folder: Path, module: str | None = None) -> DcpFolder:
    """Return the structure of the checkpoint in `folder`; chunks that `.metadata` places nowhere are left out.

    Of several modules `module` is the wanted one.

    Raises `CorruptFile` for a broken `.metadata`, and `UnsupportedCheckpoint` for flat parameters (FSDP1), and
    for chunks that are compressed or in safetensors.
    """
    found = _merged(folder, [_read_metadata(folder, name, module) for name in _metadata_names(folder)])
    held, problems = _read_pieces(found)
    return replace(found, pieces=held, problems=(*found.problems, *problems))


def _metadata_names(folder: Path) -> Sequence[str]:
    """Return the names of the metadata files: `.metadata`, or one for each rank."""
    if (folder / METADATA).exists():
        return (METADATA,)
    return [f"__{rank}{METADATA}" for rank in sorted(_ranks(folder, _OF_RANK))] or (METADATA,)


def _ranks(folder: Path, pattern: re.Pattern[str]) -> set[int]:
    """Return the ranks that have a file of this sort in the folder."""
    return {int(match["rank"]) for match in (pattern.match(path.name) for path in folder.iterdir()) if match}


def lost_metadata(found: DcpFolder) -> tuple[str, ...]:
    """Return the names of missing metadata files, where each rank has its own."""
    if METADATA in found.metadata:
        return ()
    held = _ranks(found.folder, _OF_RANK)
    last = max(held | _ranks(found.folder, _PIECES_OF_RANK))
    return tuple(f"__{rank}{METADATA}" for rank in range(last + 1) if rank not in held)


def _read_metadata(folder: Path, name: str, module: str | None) -> DcpFolder:
    path = folder / name
    data = read_all(path, limit=MAX_PICKLE_BYTES, too_large=Defect.PICKLE)
    try:
        found, unknown = load(data, known=KNOWN, persistent=no_storage)
        objects = foreign_objects(path, found) if isinstance(found, Stub) else ()
        problems = (*problems_of(path, unknown, weights=True), *objects)
        return replace(_interpret(folder, found, module), metadata=(name,), problems=problems)
    except ValueError as error:
        raise CorruptFile.of(path, Defect.PICKLE, str(error)) from error


def _merged(folder: Path, ranks: Sequence[DcpFolder]) -> DcpFolder:
    """Return the metadata of all ranks, each of which lists only its own chunks, as one.

    Of a chunk that several ranks list, the first is taken.
    """
    if len(ranks) == 1:
        return ranks[0]
    firsts: dict[str, DcpTensor] = {}
    chunks: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...]], Chunk]] = defaultdict(dict)
    for of_rank in ranks:
        for name, tensor in of_rank.tensors.items():
            first = firsts.setdefault(name, tensor)
            if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
                message = (
                    f"lists `{name}` with another dtype or shape than {ranks[0].metadata[0]}: it is from another run"
                )
                raise CorruptFile.of(folder / of_rank.metadata[0], Defect.BAD_HEADER, message)
            for chunk in tensor.chunks:
                chunks[name].setdefault((chunk.offsets, chunk.sizes), chunk)
    return DcpFolder(
        folder=folder,
        metadata=tuple(name for of_rank in ranks for name in of_rank.metadata),
        tensors={
            name: replace(first, chunks=tuple(sorted(chunks[name].values(), key=lambda chunk: chunk.offsets)))
            for name, first in firsts.items()
        },
        beside=tuple(sorted({key for of_rank in ranks for key in of_rank.beside})),
        optimised=frozenset(name for of_rank in ranks for name in of_rank.optimised),
        problems=tuple(problem for of_rank in ranks for problem in of_rank.problems),
    )


def _interpret(folder: Path, found: object, module: str | None) -> DcpFolder:
    if not isinstance(found, Stub):
        raise ValueError("does not hold a Metadata object")  # noqa: TRY004 - of the file, not of Python
    stored, storage = found.get("state_dict_metadata", dict), found.get("storage_data", dict)
    if stored is None or storage is None:
        raise ValueError("has no tables of tensors and of their storage")
    # counters and random states have no size
    entries = {
        name: entry
        for name, entry in stored.items()
        if isinstance(name, str) and isinstance(entry, Stub) and entry.get("size") is not None
    }
    unsized = [name for name in stored.keys() - entries.keys() if is_tensor(stored[name])]
    if unsized:
        raise ValueError(f"lists `{unsized[0]}` without a size")
    # the keys that were joined to a name: ("model", "lm_head.weight")
    joined = found.get("planner_data", dict) or {}
    unjoined, unknown = entries.keys() - joined.keys(), joined.keys() - stored.keys()
    if unjoined and unknown:
        raise ValueError(f"names `{min(unjoined)}` in one table and `{min(map(str, unknown))}` in another")
    known = {fqn: path for fqn, path in joined.items() if fqn in entries and _is_path(path)}
    # torch joins the keys with dots; where it did so for others, one that differs is damaged
    odd = [fqn for fqn, path in known.items() if ".".join(map(str, path)) != fqn]
    if odd and len(odd) < len(known):
        raise ValueError(f"gives `{odd[0]}` other keys than its name: {known[odd[0]]}")
    paths = {fqn: (fqn,) for fqn in entries} | known
    if stored and not entries:
        hint = f"write them into one file, and consolidate that: {TO_ONE_FILE}"
        raise UnsupportedCheckpoint(f"{folder} holds only pickled objects: {some(list(map(str, stored)))}", hint=hint)
    names = module_names(folder, paths, module)
    if len(set(names.values())) != len(names) or not all(map(is_tensor_name, names.values())):
        raise ValueError("gives two tensors the same name, or one tensor an invalid name")
    places = {
        (key.get("fqn"), key.get("offset")): info
        for key, info in storage.items()
        if isinstance(key, Stub) and type(key.get("fqn")) is str and _is_sizes(key.get("offset"))
    }
    tensors = {name: _described(folder, fqn, entries[fqn], places) for fqn, name in names.items()}
    meta = found.get("storage_meta", Stub)
    others = [path for fqn, path in paths.items() if fqn not in names]
    save_id = meta.get("save_id", str) if meta else None
    return DcpFolder(
        folder=folder,
        tensors=tensors,
        beside=tuple(sorted(set(map(_state_of, others)))),
        optimised=frozenset(filter(None, map(_parameter_of, others))),
        save_id=save_id,
    )


def _state_of(path: tuple[Any, ...]) -> str:
    """Return the state that a tensor other than a weight belongs to: its first keys, or the flattened optimizer's."""
    first = str(path[0])
    if len(path) == 1:
        return of_optimizer(first) or (first.partition(".")[0] if first.startswith("state.") else first)
    return ".".join(map(str, path[: min(2, len(path) - 1)]))


def _parameter_of(path: tuple[Any, ...]) -> str:
    """Return the parameter whose optimizer state the tensor is, "" where the path names none.

    The keys are `optimizer`, `state`, the parameter's name and a moment like `exp_avg`; some may be joined with dots.
    """
    if len(path) == 1 and of_optimizer(str(path[0])):
        return ""
    _, marked, rest = ("." + ".".join(map(str, path))).partition(".state.")
    return rest.rpartition(".")[0] if marked else ""


def _is_path(path: object) -> TypeGuard[tuple[Any, ...]]:
    """Whether it is the keys that lead to a tensor; a name is as long as a file's may be."""
    parts = path if isinstance(path, tuple) and {*map(type, path)} <= {str, int} else ()
    return bool(parts) and sum(len(part) if type(part) is str else 20 for part in parts[:4096]) <= 4096 >= len(parts)  # noqa: PLR2004


def _described(folder: Path, fqn: str, entry: Stub, places: Mapping[Any, Any]) -> DcpTensor:
    if fqn.rpartition(".")[2] in ("_flat_param", "flat_param"):
        what = f"`{fqn}` is a flat parameter of FSDP1, whose names and shapes exist only in the running model"
        hint = "save it again with StateDictType.FULL_STATE_DICT, or train with FSDP2 (fsdp_version: 2)"
        raise UnsupportedCheckpoint(f"{folder}: {what}", hint=hint)
    dtype, shape = _dtype(entry.get("properties")), entry.get("size")
    if dtype is None or not _is_sizes(shape):
        raise ValueError(f"lists `{fqn}` without a known dtype or shape")
    TensorSpec(name=fqn, dtype=dtype, shape=shape)  # raises ValueError for impossible sizes
    chunks = []
    for piece in entry.get("chunks", (list, tuple)) or ():
        offsets, sizes = (piece.get("offsets"), piece.get("sizes")) if isinstance(piece, Stub) else (None, None)
        if not _is_sizes(offsets) or not _is_sizes(sizes) or not len(offsets) == len(sizes) == len(shape):
            raise ValueError(f"lists a chunk of `{fqn}` without offsets or sizes")
        info = places.get((fqn, offsets))
        # a rank that has no row of a small tensor may write an empty chunk
        if isinstance(info, Stub) and 0 not in sizes:
            chunks.append(_chunk(folder, fqn, offsets, sizes, info))
    chunks.sort(key=lambda chunk: chunk.offsets)
    return DcpTensor(dtype=dtype, shape=shape, chunks=tuple(chunks))


def _dtype(properties: object) -> DType | None:
    """`TensorProperties` is saved as a tuple that begins with the type."""
    state = properties.state if isinstance(properties, Stub) else None
    values = state if isinstance(state, tuple) else tuple(state.values()) if isinstance(state, dict) else ()
    return next((value.dtype for value in values if isinstance(value, ElementType)), None)


def _is_sizes(values: object) -> TypeGuard[tuple[int, ...]]:
    sizes = values if isinstance(values, tuple) and len(values) <= MOST_DIMENSIONS else (None,)
    return all(type(size) is int and size >= 0 for size in sizes)


def _chunk(folder: Path, fqn: str, offsets: tuple[int, ...], sizes: tuple[int, ...], info: Stub) -> Chunk:
    transforms = info.get("transform_descriptors")
    if transforms:
        descriptors = transforms if isinstance(transforms, list) else []
        names = [each[:40] for each in descriptors[:4] if type(each) is str] or ["by an unknown extension"]
        hint = f"write it into one file, where the package zstandard is installed, and consolidate that: {TO_ONE_FILE}"
        if not all(name.startswith("stream.zstd") for name in names):
            hint = "save it again without that extension, with the program that trained it"
        message = f"`{fqn}` is stored compressed ({', '.join(names)}), which lora-tool does not read"
        raise UnsupportedCheckpoint(f"{folder}: {message}", hint=hint)
    name, at, nbytes = info.get("relative_path"), info.get("offset"), info.get("length")
    if not isinstance(name, str) or not is_bare(name) or not _is_sizes((at, nbytes)):
        raise ValueError(f"places `{fqn}` in {name!r:.60}, which is not a file beside it")
    return Chunk(offsets=offsets, sizes=sizes, filename=name, at=at, nbytes=nbytes)


def uncovered(tensor: DcpTensor) -> str | None:
    """Return which part of the tensor is in no chunk, or in two; None where all is there once."""
    archives = (Span(path=Path(chunk.filename), offset=chunk.at, nbytes=chunk.nbytes) for chunk in tensor.chunks)
    return pieces.uncovered(tensor.shape, list(map(_placed, tensor.chunks, archives)))


def _placed(chunk: Chunk, span: Span) -> Piece:
    return Piece(chunk.offsets, chunk.sizes, span)


def _read_pieces(found: DcpFolder) -> tuple[Pieces, tuple[Problem, ...]]:
    held: dict[str, tuple[StoredChunk, ...]] = {}
    problems, called = dict[str, Problem](), dict[str, Problem]()
    missing, memory = set(found.missing), PickleMemory()
    for name, tensor in found.tensors.items():
        read: list[StoredChunk] = []
        for chunk in tensor.chunks:
            if chunk.filename in problems or chunk.filename in missing:
                break
            try:
                piece, unknown = _read_piece(found.folder, name, tensor, chunk, memory)
                read.append(piece)
                called |= {each.path: each for each in problems_of(found.folder / chunk.filename, unknown)}
            except CorruptFile as error:
                problems[chunk.filename] = error.problem
                break
        else:
            held[name] = tuple(read)
    return held, (*problems.values(), *called.values())


def _read_piece(
    folder: Path, name: str, tensor: DcpTensor, chunk: Chunk, memory: PickleMemory
) -> tuple[StoredChunk, Mapping[Global, bool]]:
    """Return the bytes of a chunk of the tensor `name`, and the names without a meaning in its pickle.

    Raises `CorruptFile`, `UnsupportedCheckpoint`.
    """
    path = folder / chunk.filename
    require_inside(folder, path)
    try:
        file = read_torch_file(path, offset=chunk.at, nbytes=chunk.nbytes, memory=memory)
    except CorruptFile:
        _require_torch_save(path, chunk)
        raise
    lazy = file.value
    if not isinstance(lazy, LazyTensor) or lazy.shape != chunk.sizes or lazy.dtype is not tensor.dtype:
        message = f"does not hold {tensor.dtype} {list(chunk.sizes)} at byte {chunk.at:,}"
        raise CorruptFile.of(path, Defect.WRONG_SIZE, message, name)
    return StoredChunk(file.stored(lazy, name), file.record(lazy)), file.unknown


def _require_torch_save(path: Path, chunk: Chunk) -> None:
    """Raise `UnsupportedCheckpoint` for torch's other format of `.distcp` files, which torch itself cannot load."""
    with open_regular(path) as fd:
        beginning = read_at(path, fd, chunk.at, 10)
    if beginning[8:] == b'{"':  # behind the length of a safetensors header
        message = "its tensors are in safetensors (SerializationFormat.SAFETENSORS), which torch cannot load either"
        hint = "save it again with SerializationFormat.TORCH_SAVE, FileSystemWriter's default, with the program that trained it"
        raise UnsupportedCheckpoint(f"{path}: {message}", hint=hint)


def assemble_dcp(found: DcpFolder, wanted: Container[str]) -> dict[str, StoredTensor]:
    """Return the tensors whose names are in `wanted`, as spans.

    Raises `IncompleteCheckpoint` for a tensor with a missing or unreadable part.
    """
    tensors = {}
    for name, tensor in found.tensors.items():
        if name not in wanted:
            continue
        if name not in found.pieces:
            raise _not_whole(found, name, "a part of it cannot be read")
        spec = TensorSpec(name=name, dtype=tensor.dtype, shape=tensor.shape)
        spans = (piece.stored.spans[0] for piece in found.pieces[name])
        held = list(map(_placed, tensor.chunks, spans))
        nothing = Span(path=found.folder / found.metadata[0], offset=0, nbytes=0)
        try:
            tensors[name] = assembled(spec, held or [Piece((0,) * len(tensor.shape), tensor.shape, nothing)])
        except ValueError as error:
            raise _not_whole(found, name, str(error)) from error
    return tensors


def _not_whole(found: DcpFolder, name: str, why: str) -> IncompleteCheckpoint:
    hint = "copy the .distcp files from the machines that wrote them: every node writes its own ranks"
    shape = list(found.tensors[name].shape)
    return IncompleteCheckpoint(f"{found.folder}: `{name}` {shape} is incomplete: {why}", hint=hint)


def stamps(found: DcpFolder) -> dict[Path, FileStamp]:
    """Return the present stamps of the files that exist."""
    paths = [found.folder / name for name in (*found.metadata, *found.filenames)]
    return {path: FileStamp.of(path) for path in paths if path.exists()}
