"""Where each parameter's bytes are in the rank files: ZeRO's rules of partition, as spans. Padding is never spanned.

Stage 3 (`zero/partition_parameters.py`, `zero/stage3.py`): of a parameter of n elements every rank of W holds
ceil(n/W), the last ones filled up with whatever was in memory. A rank's flat group is the concatenation of its pieces.

Stages 1 and 2 (`zero/stage_1_and_2.py`): the parameters of a group are laid one after the other, filled up to a
multiple of 2·W, and cut into W equal parts; the filling at the end is taken off again when saving, except by
BF16_Optimizer. A parameter may lie on several ranks.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

from msgspec import Struct

from lora_tool.core.choices import TextEnum
from lora_tool.core.display import some
from lora_tool.core.errors import IncompleteCheckpoint
from lora_tool.core.tensors import DType, StoredTensor, TensorSpec
from lora_tool.formats.pieces import Piece, assembled
from lora_tool.formats.zero import ZeroTag
from lora_tool.formats.zero_files import FILE, ModelStates, ZeroStage

_Cut: TypeAlias = Iterator[tuple[str, StoredTensor]]
_ALIGNED = 2
"""`nccl_start_alignment_factor`: groups are filled up to a multiple of so many elements per rank."""


@enum.unique
class Role(TextEnum):
    """Why a tensor is in the checkpoint, and so where it is."""

    TRAINED = "trained"
    FROZEN = "frozen"
    BUFFER = "buffer"
    SAVED = "saved"
    """The checkpoint does not say whether it was trained."""


class StateEntry(Struct, frozen=True, kw_only=True):
    """One tensor of the training module: its role and shape."""

    role: Role
    shape: tuple[int, ...]


def entries(tag: ZeroTag) -> dict[str, StateEntry]:
    """Return every tensor that the tag holds, tied ones once, in the module's order as far as it is known."""
    first = tag.first
    if first is None:
        return {}
    trained = {name: shape for shapes in groups_of(tag) for name, shape in shapes.items()}
    buffers = {name: first.module[name].shape for name in first.buffer_names if name in first.module}
    found: dict[str, StateEntry] = {}
    for role, shapes in (
        (Role.TRAINED, trained),
        (Role.FROZEN if tag.stage else Role.SAVED, _frozen_shapes(tag, first, trained)),
        (Role.BUFFER, buffers),
    ):
        found |= {name: StateEntry(role=role, shape=shape) for name, shape in shapes.items() if name not in found}
    order = {name: number for number, name in enumerate(first.module)}
    return dict(sorted(found.items(), key=lambda item: order.get(item[0], len(order))))


def groups_of(tag: ZeroTag) -> Sequence[Mapping[str, tuple[int, ...]]]:
    """Return the shapes of the trained parameters in the order in which they lie in each flat group of all ranks.

    Empty where ZeRO was off.
    """
    return () if tag.first is None or tag.stage == ZeroStage.DISABLED else tag.first.param_shapes


def _frozen_shapes(tag: ZeroTag, first: ModelStates, trained: Container[str]) -> Mapping[str, tuple[int, ...]]:
    if first.frozen is not None and first.frozen_shapes is not None:
        return first.frozen_shapes
    if tag.stage == ZeroStage.WEIGHTS and first.frozen is None:
        return {}
    # stage 1 never lists them (DeepSpeed #5439), but `module` has them, whole
    return {
        name: tensor.shape
        for name, tensor in first.module.items()
        if name not in trained and name not in first.buffer_names and name not in first.shared
    }


def unaccounted(tag: ZeroTag, known: Mapping[str, StateEntry]) -> tuple[str, ...]:
    """Return the module's names that are not among the `known`: frozen parameters left out."""
    first = tag.first
    return tuple(name for name in first.module if name not in known and name not in first.shared) if first else ()


def assemble(tag: ZeroTag, known: Mapping[str, StateEntry], wanted: Container[str]) -> dict[str, StoredTensor]:
    """Return the tensors of the tag whose names are in `wanted`, each as the spans that hold its elements.

    `known` are its `entries`. Raises `IncompleteCheckpoint` where rank files are missing or do not fit the shapes,
    `CorruptFile` where one is broken.
    """
    ranks = range(tag.world_size)
    lost = {rank for rank in ranks if rank not in tag.optim} if tag.stage and tag.masters is None else set()
    # without frozen parameters all that counts is in the first rank's model file
    has_pieces = tag.stage == ZeroStage.WEIGHTS and tag.first is not None and bool(tag.first.frozen)
    lost |= {rank for rank in (ranks if has_pieces else (0,)) if rank not in tag.model}
    if lost:
        files = f"the files of {'rank' if len(lost) == 1 else 'ranks'} {some(sorted(lost))}"
        message = f"{files} are missing or unreadable ({tag.world_size} ranks: 0-{tag.world_size - 1})"
        hint = "copy them from the machines that trained: every node writes its own ranks"
        raise IncompleteCheckpoint(f"{tag.folder}: {message}", hint=hint)
    return {**_trained(tag, wanted), **_others(tag, known, wanted)}


def _trained(tag: ZeroTag, wanted: Container[str]) -> dict[str, StoredTensor]:
    first = tag.first
    if first is None or tag.stage == ZeroStage.DISABLED:
        return {}
    if tag.masters is not None:
        named = {name: shape for name, shape in first.trained_shapes.items() if name in wanted}
        return {name: _whole(tag, name, shape) for name, shape in named.items()}
    found: dict[str, StoredTensor] = {}
    ranks = [tag.optim[rank] for rank in range(tag.world_size)]
    for number, shapes in enumerate(groups_of(tag)):
        if any(number >= len(states.groups) for states in ranks):
            message = f"not every rank has the {len(first.param_shapes)} groups of masters that rank 0 has"
            raise IncompleteCheckpoint(f"{tag.folder}: {message}")
        if any(name in wanted for name in shapes):
            flats = [states.file.stored(states.groups[number], f"group {number}") for states in ranks]
            cut = _cut_by_parameter if tag.stage == ZeroStage.WEIGHTS else _cut_in_one
            found |= {name: tensor for name, tensor in cut(shapes, flats) if name in wanted}
    return found


def _whole(tag: ZeroTag, name: str, shape: tuple[int, ...]) -> StoredTensor:
    """Return a parameter of a universal checkpoint, whose file may have it flat."""
    master = (tag.masters or {}).get(name)
    if master is None:
        raise IncompleteCheckpoint(f"{tag.folder}: `{name}` is missing: its folder or its {FILE} is missing or broken")
    if master.tensor.numel != math.prod(shape):
        message = f"`{name}` {list(shape)} needs {math.prod(shape):,} elements, found {master.tensor.numel:,}"
        raise IncompleteCheckpoint(f"{master.file.path}: {message}")
    held = master.file.stored(master.tensor, name)
    return StoredTensor(spec=TensorSpec(name=name, dtype=held.dtype, shape=shape), spans=held.spans)


def leftover(shapes: Mapping[str, tuple[int, ...]], sizes: Sequence[int], stage: int) -> int | None:
    """Return by how many elements the flat groups of `sizes` miss the need of `shapes`; None where they fit."""
    if stage == ZeroStage.WEIGHTS:
        need = sum(_piece(shape, len(sizes)) for shape in shapes.values())
        return next((size - need for size in sizes if size != need), None)
    extra = sum(sizes) - sum(math.prod(shape) for shape in shapes.values())
    return None if 0 <= extra < _ALIGNED * len(sizes) else extra


def _piece(shape: tuple[int, ...], world: int) -> int:
    return -(-math.prod(shape) // world)


def _cut_by_parameter(shapes: Mapping[str, tuple[int, ...]], flats: Sequence[StoredTensor]) -> _Cut:
    at = 0
    for name, shape in shapes.items():
        yield name, _by_rank(name, shape, flats, at)
        at += _piece(shape, len(flats))


def _by_rank(name: str, shape: tuple[int, ...], flats: Sequence[StoredTensor], at: int) -> StoredTensor:
    """Return the tensor whose equal pieces begin at element `at` of each rank's flat; the last pieces are padded."""
    numel, piece = math.prod(shape), _piece(shape, len(flats))
    parts = [(flat, at, min(piece, max(0, numel - rank * piece))) for rank, flat in enumerate(flats)]
    return _joined(name, flats[0].dtype, shape, parts)


def _cut_in_one(shapes: Mapping[str, tuple[int, ...]], flats: Sequence[StoredTensor]) -> _Cut:
    ends = list(accumulate(flat.spec.numel for flat in flats))
    at = 0
    for name, shape in shapes.items():
        end = at + math.prod(shape)
        parts = [
            (flat, max(at - start, 0), min(end, start + flat.spec.numel) - max(at, start))
            for flat, start in zip(flats, (0, *ends), strict=False)
            if start < end and start + flat.spec.numel > at
        ]
        yield name, _joined(name, flats[0].dtype, shape, parts)
        at = end


def _joined(
    name: str, dtype: DType, shape: tuple[int, ...], parts: Sequence[tuple[StoredTensor, int, int]]
) -> StoredTensor:
    """Return the tensor made of `count` elements from element `at` of each flat tensor."""
    size = dtype.bits // 8
    spec = TensorSpec(name=name, dtype=dtype, shape=shape)
    pieces, held = [], 0
    for flat, at, count in parts:
        (whole,) = flat.spans
        if flat.dtype is not dtype:
            raise IncompleteCheckpoint(
                f"{whole.path}: `{name}` is {flat.dtype} in this rank's file, but {dtype} in others"
            )
        if count and (at + count) * size > whole.nbytes:
            raise IncompleteCheckpoint(f"{whole.path}: `{name}` ends beyond the flat group of this rank")
        pieces.append(Piece((held,), (count,), whole.part(at * size if count else 0, count * size)))
        held += count
    if held != spec.numel:
        message = f"needs {spec.nbytes:,} bytes, but the ranks hold {held * size:,} of it"
        raise IncompleteCheckpoint(f"`{name}` {list(shape)} {message}")
    return assembled(spec, pieces, flat=True)


def _others(tag: ZeroTag, known: Mapping[str, StateEntry], wanted: Container[str]) -> dict[str, StoredTensor]:
    first = tag.first
    if first is None:
        return {}
    found = {}
    whole = {**first.module, **(first.frozen or {})}
    for name, entry in known.items():
        if entry.role is Role.TRAINED or name not in wanted:
            continue
        if entry.role is Role.FROZEN and tag.stage == ZeroStage.WEIGHTS:
            found[name] = _by_rank(name, entry.shape, list(_frozen_pieces(tag, name)), 0)
        else:
            found[name] = first.file.stored(whole[name], name)
    return found


def _frozen_pieces(tag: ZeroTag, name: str) -> Iterator[StoredTensor]:
    for rank in range(tag.world_size):
        states = tag.model[rank]
        fragment = (states.frozen or {}).get(name)
        if fragment is None:
            raise IncompleteCheckpoint(f"{states.path}: frozen `{name}` is missing, but other ranks have it")
        yield states.file.stored(fragment, name)
