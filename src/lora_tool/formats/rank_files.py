"""One file for each rank, as `torch.save` wrote it: verl's, accelerate's without DCP, and a whole state as one of them.

Every tensor in them says where in the whole it lies (DTensor, ShardedTensor), or is whole. Sources: verl
`utils/checkpoint/fsdp_checkpoint_manager.py`, accelerate 1.15 `utils/fsdp_utils.py`.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from lora_tool.core.errors import CorruptFile, IncompleteCheckpoint, Problem, UnsupportedCheckpoint
from lora_tool.core.tensors import DType, Span, StoredTensor, TensorSpec
from lora_tool.formats.distributed_tensors import DistributedTensor
from lora_tool.formats.files import require_inside
from lora_tool.formats.pickle_names import problems_of
from lora_tool.formats.pieces import Piece, assembled, uncovered
from lora_tool.formats.state_dicts import RankTensor, module_tensors
from lora_tool.formats.torch_objects import LazyTensor
from lora_tool.formats.torch_zip import PickleMemory, TorchFile, read_torch_file

_FLAT_PARAMETER = re.compile(r"(?:\A|\.)_?flat_param(?:_\d+)?\Z")


class RankFile(Struct, frozen=True, kw_only=True):
    """The file of one rank and the module's tensors in it."""

    rank: int
    """By its name."""
    file: TorchFile
    tensors: Mapping[str, RankTensor]

    @property
    def path(self) -> Path:
        return self.file.path

    @property
    def saved_by(self) -> int | None:
        """Which rank its tensors say that they are of."""
        ranks = (tensor.rank for tensor in self.tensors.values() if isinstance(tensor, DistributedTensor))
        return next((rank for rank in ranks if rank is not None), None)


class HeldPart(NamedTuple):
    """Elements of a tensor from `offsets` on, which one file holds."""

    offsets: tuple[int, ...]
    local: LazyTensor
    holder: RankFile

    @property
    def place(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.offsets, self.local.shape

    def crc(self) -> tuple[int, int]:
        """Return a key that differs for other bytes, from the zip directory: no tensor is read."""
        return self.holder.file.record(self.local).crc, self.local.start


class CutTensor(Struct, frozen=True, kw_only=True):
    """A tensor of the module, with its parts from all files."""

    dtype: DType
    shape: tuple[int, ...]
    parts: tuple[HeldPart, ...]
    """Each once, as the lowest rank has it."""
    replicas: tuple[tuple[HeldPart, HeldPart], ...]
    """Parts that several ranks hold, as under HSDP: the one among the `parts`, and another."""
    flat: bool = False
    """Whether the parts are slices of its flattened elements; its shape then has one dimension, or is found later."""


class RankFolder(Struct, frozen=True, kw_only=True):
    """The rank files of one save."""

    folder: Path
    files: Mapping[int, RankFile]
    """Rank → its file, those that could be read."""
    tensors: Mapping[str, CutTensor]
    """Every tensor of the module."""
    problems: tuple[Problem, ...] = ()
    """Of each file that could not."""

    @property
    def ranks(self) -> int:
        """The number of ranks that saved, as its tensors record it; 0 where none does."""
        recorded = (
            tensor.ranks
            for file in self.files.values()
            for tensor in file.tensors.values()
            if isinstance(tensor, DistributedTensor)
        )
        return max(recorded, default=0)


def read_rank_files(folder: Path, paths: Mapping[int, Path], module: str | None = None) -> RankFolder:
    """Return the tensors in the rank files `paths` of `folder`; unreadable files are among its problems.

    No tensor is read, no code runs. Of several modules `module` is the wanted one. Raises `UnsupportedCheckpoint` for
    several modules without it, and for a tensor whose parts have unknown places.
    """
    files: dict[int, RankFile] = {}
    problems: list[Problem] = []
    memory = PickleMemory()
    for rank, path in sorted(paths.items()):
        try:
            require_inside(folder, path)
            file = read_torch_file(path, memory=memory)
            problems += problems_of(path, file.unknown)
            files[rank] = RankFile(rank=rank, file=file, tensors=module_tensors(file, module))
        except CorruptFile as error:
            problems.append(error.problem)
    held: dict[str, list[tuple[RankFile, RankTensor]]] = {}
    for of_rank in files.values():
        for name, tensor in of_rank.tensors.items():
            held.setdefault(name, []).append((of_rank, tensor))
    # in a file with FSDP1's flat parameters the other tensors are slices of the original ones
    flat = [name for name in held if _FLAT_PARAMETER.search(name)]
    cut = _cut_flat if flat else _cut
    if flat and len(flat) == len(held):
        what = f"`{flat[0]}` is a flat parameter of FSDP1, whose names and shapes exist only in the running model"
        hint = "save it again with StateDictType.FULL_STATE_DICT, or train with use_orig_params=True"
        raise UnsupportedCheckpoint(f"{folder}: {what}", hint=hint)
    tensors = {name: cut(name, of_ranks) for name, of_ranks in held.items() if name not in flat}
    return RankFolder(folder=folder, files=files, tensors=tensors, problems=tuple(problems))


def _cut(name: str, held: list[tuple[RankFile, RankTensor]]) -> CutTensor:
    parts: dict[tuple[tuple[int, ...], tuple[int, ...]], HeldPart] = {}
    replicas = []
    for file, tensor in held:
        if isinstance(tensor, DistributedTensor) and tensor.not_understood:
            what = f"`{name}` {list(tensor.shape)} cannot be put together: {tensor.not_understood}"
            hint = "save it again as a full state dict, with the program that trained it"
            raise UnsupportedCheckpoint(f"{file.path}: {what}", hint=hint)
        for part in _parts(file, tensor):
            first = parts.setdefault(part.place, part)
            if first is not part:
                replicas.append((first, part))
    first_tensor = held[0][1]
    dtype = next((part.local.dtype for part in parts.values()), DType.F32)
    return CutTensor(dtype=dtype, shape=first_tensor.shape, parts=tuple(parts.values()), replicas=tuple(replicas))


def _cut_flat(name: str, held: list[tuple[RankFile, RankTensor]]) -> CutTensor:
    """Return a tensor from the vectors that the ranks saved of it, joined in the order of the ranks."""
    parts: list[HeldPart] = []
    numel = 0
    for file, tensor in held:
        if not any(map(_FLAT_PARAMETER.search, file.tensors)):
            continue  # a file of another run, which holds other tensors
        if not isinstance(tensor, LazyTensor) or len(tensor.shape) != 1:
            message = f"`{name}` is not a flat slice like the other tensors of FSDP1's local state"
            raise UnsupportedCheckpoint(f"{file.path}: {message}", hint="save it again with FULL_STATE_DICT")
        if tensor.numel:
            parts.append(HeldPart((numel,), tensor, file))
            numel += tensor.numel
    dtype = parts[0].local.dtype if parts else DType.F32
    return CutTensor(dtype=dtype, shape=(numel,), parts=tuple(parts), replicas=(), flat=True)


def _parts(file: RankFile, tensor: RankTensor) -> Iterator[HeldPart]:
    if isinstance(tensor, LazyTensor):
        yield HeldPart((0,) * len(tensor.shape), tensor, file)
    else:
        for part in tensor.parts:
            if part.local.numel or 0 in tensor.shape:
                yield HeldPart(part.offsets, part.local, file)


def gap_in(tensor: CutTensor) -> str | None:
    """Return which part of the tensor is in no file, or in two; None where all is there once."""
    if _has_odd_dimensions(tensor):
        return "its parts have different numbers of dimensions"
    nowhere = [Span(path=part.holder.path, offset=0, nbytes=0) for part in tensor.parts]
    places = [Piece(*part.place, span) for part, span in zip(tensor.parts, nowhere, strict=True)]
    return uncovered(tensor.shape, places, flat=tensor.flat)


def _has_odd_dimensions(tensor: CutTensor) -> bool:
    return not tensor.flat and any(len(part.offsets) != len(tensor.shape) for part in tensor.parts)


def assemble_ranks(found: RankFolder, wanted: Container[str]) -> dict[str, StoredTensor]:
    """Return the tensors whose names are in `wanted`, as spans.

    Raises `IncompleteCheckpoint` for a tensor with a missing part, `CorruptFile` where a file is broken.
    """
    return {name: _whole(found, name, tensor) for name, tensor in found.tensors.items() if name in wanted}


def _whole(found: RankFolder, name: str, tensor: CutTensor) -> StoredTensor:
    try:
        _require_parts(found, tensor)
        pieces = [Piece(*part.place, part.holder.file.stored(part.local, name).spans[0]) for part in tensor.parts]
        return assembled(TensorSpec(name=name, dtype=tensor.dtype, shape=tensor.shape), pieces, flat=tensor.flat)
    except ValueError as error:
        message = f"{found.folder}: `{name}` {list(tensor.shape)} is incomplete: {error}"
        raise IncompleteCheckpoint(message, hint="copy each rank's file from the machine that wrote it") from error


def _require_parts(found: RankFolder, tensor: CutTensor) -> None:
    """Raise ValueError for parts that cannot be those of one tensor, and for files without which some are missing."""
    if tensor.flat and len(found.files) < found.ranks:  # slices say nothing of those that are missing
        lost = found.ranks - len(found.files)
        raise ValueError(f"the files of {lost} of {found.ranks} ranks are missing or unreadable")
    if not tensor.parts:
        raise ValueError("it is in no file")
    if _has_odd_dimensions(tensor):
        raise ValueError("its parts have different numbers of dimensions")
    types = {part.local.dtype for part in tensor.parts}
    if len(types) > 1:
        raise ValueError(f"its parts are of {len(types)} types")
