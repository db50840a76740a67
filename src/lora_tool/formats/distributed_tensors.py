"""DTensors and ShardedTensors in the pickle of one rank: the place of each in its tensor, computed without torch.

Sources: torch 2.13 `distributed/tensor/placement_types.py` (`Shard.local_shard_size_and_offset`, which is
`torch.chunk`; `_StridedShard`), `distributed/fsdp/_fully_shard/_fsdp_param.py` (rows of what tensor parallelism left),
`distributed/device_mesh.py`, and for ShardedTensors `distributed/_shard/sharded_tensor/api.py`. Older ones have the
same fields in other modules, and the mesh as a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

from lora_tool.formats.pickle_machine import Refused
from lora_tool.formats.pickle_objects import MOST_DIMENSIONS, Global, Known, Stub, name_of
from lora_tool.formats.torch_objects import PLAIN, LazyTensor, is_sizes

_Shape = tuple[int, ...]
_OF_TORCH = "torch.distributed."
_OF_TORCHAO = "torchao."


class ShardPart(NamedTuple):
    """Elements of a tensor from `offsets` on, which one rank holds: as many as `local` has."""

    offsets: _Shape
    local: LazyTensor


class DistributedTensor(NamedTuple):
    """What one rank saved of a tensor: a tuple, as everything is that a pickle may hold."""

    shape: _Shape
    """Of the whole tensor."""
    parts: tuple[ShardPart, ...]
    ranks: int
    """How many processes have it together."""
    rank: int | None
    """The global rank that saved it, where it is recorded."""
    not_understood: str | None = None
    """Why it is not known which elements these are, as the end of a sentence; then there are no `parts`."""


class _Wrapper(NamedTuple):
    """What `_rebuild_wrapper_subclass` says: the class and the shape; the rest follows as the object's state."""

    kind: str
    shape: _Shape


def _wrapper(kind: Any, _dtype: Any, shape: Any, *_: Any) -> _Wrapper:  # noqa: ANN401
    """`torch._utils._rebuild_wrapper_subclass`."""
    if not _is_shape(shape):
        raise ValueError("a tensor subclass has no shape")
    return _Wrapper(name_of(kind), shape)


def _of_type(build: Any, _type: Any, args: Any, state: Any) -> LazyTensor | DistributedTensor:  # noqa: ANN401
    """`torch._tensor._rebuild_from_type_v2`: calls its function. Everything callable here is harmless."""
    if not isinstance(build, Known) or type(args) is not tuple:
        raise ValueError(f"a tensor subclass is built by {name_of(build) or 'no function'}, which no checkpoint needs")
    built = build.build(*args[: 2 * MOST_DIMENSIONS])
    if isinstance(built, LazyTensor):
        return built
    if isinstance(built, _Wrapper):
        module, _, name = built.kind.rpartition(".")
        if module.startswith(_OF_TORCH) and name == "DTensor":
            return _dtensor(built.shape, state)
        if module.startswith(_OF_TORCH) and name == "ShardedTensor":
            return _sharded_tensor(built.shape, state)
        if built.kind.startswith(_OF_TORCHAO):
            raise Refused(
                f"of weights that torchao quantised ({built.kind:.80}), which only torchao can build: load the model with "
                "torchao and save it again, which writes safetensors: model.save_pretrained(NEW)"
            )
        raise ValueError(
            f"holds a tensor of the class {built.kind:.80}, which is neither a DTensor nor a ShardedTensor"
        )
    raise ValueError("a tensor subclass is built of something that is not a tensor")


def _of_torch(value: object, name: str, lacking: str) -> Stub:
    """Return the object, of torch.distributed's class of this name, wherever that was. Raises ValueError: `lacking`."""
    of = name_of(type(value))
    if not isinstance(value, Stub) or not of.startswith(_OF_TORCH) or of.rpartition(".")[2] != name:
        raise ValueError(f"{lacking}{_instead(value)}")
    return value


def _instead(value: object) -> str:
    """Return which class a pickle names where torch's is needed, as the end of a sentence."""
    of = name_of(type(value))
    return f", but an object of {of[:80]}" if of else ""


def _is_shape(values: object) -> TypeGuard[_Shape]:
    return type(values) is tuple and len(values) <= MOST_DIMENSIONS and is_sizes(values)


# DTensors


class _Placement(NamedTuple):
    """How one dimension of the mesh cuts a tensor: along `dim`, None where it does not."""

    dim: int | None
    split_factor: int | None = None
    """Of a `_StridedShard`: into how many parts the dimensions of the mesh after it have cut the tensor before."""


class _Mesh(NamedTuple):
    sizes: _Shape
    coordinate: _Shape
    """Where in it the rank is that saved this."""
    rank: int | None


def _dtensor(shape: _Shape, state: Any) -> DistributedTensor:  # noqa: ANN401
    # the attributes, and those in slots
    tables = [table for table in (state if isinstance(state, tuple) else (state,))[:2] if isinstance(table, dict)]
    local, spec = (next((t[name] for t in tables if name in t), None) for name in ("_local_tensor", "_spec"))
    if not isinstance(local, LazyTensor):
        raise ValueError(f"a DTensor has no local tensor{_instead(local)}")  # noqa: TRY004 - of the file, not of Python
    spec = _of_torch(spec, "DTensorSpec", "a DTensor has no spec")
    mesh = _mesh(_of_torch(spec.get("mesh"), "DeviceMesh", "a DTensor has no mesh"))
    found = spec.get("placements", (tuple, list)) or ()
    try:
        placements = [_placement(placement) for placement in found[:MOST_DIMENSIONS]]
        if len(placements) != len(mesh.sizes) or len(local.shape) != len(shape):
            raise ValueError("its placements are not those of its mesh")  # noqa: TRY301 - one way out for all of them
        offsets = _offsets(shape, local.shape, mesh, placements, _shard_order(spec))
    except ValueError as error:
        return DistributedTensor(shape, (), math.prod(mesh.sizes), mesh.rank, str(error))
    return DistributedTensor(shape, (ShardPart(offsets, local),), math.prod(mesh.sizes), mesh.rank)


def _mesh(mesh: Stub) -> _Mesh:
    coordinate, sizes = mesh.get("_coordinate_on_dim", (tuple, list)), _mesh_sizes(mesh)
    coordinate = tuple(coordinate) if coordinate is not None else None
    if not _is_shape(coordinate) or not _is_shape(sizes) or len(sizes) != len(coordinate):
        raise ValueError("a DTensor's mesh has no sizes, or its rank no place in it")
    if any(at >= size for at, size in zip(coordinate, sizes, strict=True)):
        raise ValueError("a DTensor's rank lies outside of its mesh")
    rank = mesh.get("_rank", int)
    return _Mesh(sizes, coordinate, rank if type(rank) is int and rank >= 0 else None)


def _mesh_sizes(mesh: Stub) -> _Shape | None:
    tensor = mesh.get("mesh", LazyTensor)
    if isinstance(tensor, LazyTensor):  # before torch 2.9
        return tensor.shape
    layout = _of_torch(mesh.get("_layout"), "_MeshLayout", "a DTensor's mesh has no layout")
    axes = layout.get("axes", (tuple, list))
    if axes is not None:
        flat = (_of_torch(axis, "_FlatLayout", "a DTensor's mesh has no axes") for axis in axes[:MOST_DIMENSIONS])
        return tuple(_total(axis.get("shape")) for axis in flat)
    shape = layout.get("shape")
    if shape is None and layout.args:  # a named tuple
        shape = layout.args[0]
    if type(shape) is int:
        return (shape,)
    return tuple(_total(size) for size in shape[:MOST_DIMENSIONS]) if isinstance(shape, tuple) else None


def _total(sizes: object) -> int:
    """Return of how many ranks a dimension of a mesh is: one that others were flattened into says theirs."""
    if type(sizes) is int:
        return sizes
    if not _is_shape(sizes):
        raise ValueError("a DTensor's mesh has no sizes")
    return math.prod(sizes)


def _placement(placement: object) -> _Placement:
    module, _, name = name_of(type(placement)).rpartition(".")
    if not isinstance(placement, Stub) or not module.startswith(_OF_TORCH):
        raise ValueError(f"it has a placement that does not come from torch{_instead(placement)}")
    dim, factor = placement.get("dim", int), placement.get("split_factor", int)
    match name:
        case "Replicate":
            return _Placement(None)
        case "Shard" if dim is not None:
            return _Placement(dim)
        case "_StridedShard" if dim is not None and factor is not None:
            return _Placement(dim, factor)
        case _:
            raise ValueError(f"it is placed as {name[:40]}")


def _shard_order(spec: Stub) -> dict[int, list[int]]:
    """Return the order in which mesh dimensions cut each dimension of the tensor, where the spec has one."""
    shard_order = {}
    for entry in (spec.get("shard_order", (tuple, list)) or ())[:MOST_DIMENSIONS]:
        args = _of_torch(entry, "ShardOrderEntry", "its order of placements is not torch's").args
        dim, order = args if len(args) == 2 else (None, None)  # noqa: PLR2004
        if type(dim) is not int or not _is_shape(order):
            raise ValueError("its order of placements is not torch's")
        shard_order[dim] = list(order)
    return shard_order


def _offsets(
    shape: _Shape, local: _Shape, mesh: _Mesh, placements: Sequence[_Placement], shard_order: dict[int, list[int]]
) -> _Shape:
    """Return where the local tensor begins in the whole one. Raises ValueError for a placement that is not known."""
    offsets, sizes = [0] * len(shape), list(shape)
    by_dim: dict[int, list[int]] = {}
    for at, placement in enumerate(placements):
        if placement.dim is not None:
            dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
            if not 0 <= dim < len(shape):
                raise ValueError(f"it is cut along dimension {placement.dim}, which it does not have")
            by_dim.setdefault(dim, []).append(at)
    for dim, axes in by_dim.items():
        for axis in _order(axes, mesh.sizes, placements, shard_order.get(dim)):
            # torch.chunk: as many to each, fewer to the last ones
            most = -(-sizes[dim] // mesh.sizes[axis])
            start = min(sizes[dim], most * mesh.coordinate[axis])
            offsets[dim] += start
            sizes[dim] = min(most, sizes[dim] - start)
    if tuple(sizes) != local:
        raise ValueError(f"its placement gives this rank {sizes}, but the file holds {list(local)}")
    return tuple(offsets)


def _order(
    axes: Sequence[int], sizes: _Shape, placements: Sequence[_Placement], shard_order: list[int] | None
) -> list[int]:
    """Return in which order these dimensions of the mesh cut one dimension of a tensor.

    A `_StridedShard` cuts the parts that the later mesh dimensions left, as FSDP2 does over tensor parallelism.
    """
    if shard_order is not None and all(placements[axis].split_factor is None for axis in axes):
        if sorted(shard_order) != list(axes):
            raise ValueError("its order of placements is not that of its mesh")
        return shard_order
    order: list[int] = []
    for axis in reversed(axes):
        factor = placements[axis].split_factor
        if factor in (None, 1):
            order.insert(0, axis)
        elif factor == math.prod(sizes[later] for later in order):
            order.append(axis)
        else:
            raise ValueError(f"it is cut in strides of {factor}, which its mesh {list(sizes)} does not explain")
    return order


# ShardedTensors


def _sharded_tensor(shape: _Shape, state: Any) -> DistributedTensor:  # noqa: ANN401
    """`ShardedTensor.__getstate__`: its shards here, its metadata, its process group, how it was cut, and a flag."""
    shards, metadata, group = state[:3] if isinstance(state, tuple) and len(state) >= 3 else (None, None, None)  # noqa: PLR2004
    metadata = _of_torch(metadata, "ShardedTensorMetadata", "a ShardedTensor has no metadata")
    placed = metadata.get("shards_metadata", list)
    if not isinstance(shards, list) or placed is None:
        raise ValueError("a ShardedTensor has no shards")
    parts = []
    for each in shards:
        shard = _of_torch(each, "Shard", "a ShardedTensor has no shards")
        local = shard.get("tensor")
        place = _of_torch(shard.get("metadata"), "ShardMetadata", "a ShardedTensor has a shard without offsets")
        offsets = tuple(place.get("shard_offsets", list) or ())
        if not isinstance(local, LazyTensor) or not _is_shape(offsets) or len(offsets) != len(shape):
            raise ValueError(f"a ShardedTensor has a shard without a tensor or without offsets{_instead(local)}")
        if len(local.shape) != len(shape):
            raise ValueError("a ShardedTensor has a shard with another number of dimensions")
        parts.append(ShardPart(offsets, local))
    processes = _of_torch(group, "ProcessGroupState", "a ShardedTensor has no process group") if group else None
    ranks = processes.get("global_world_size", int) if processes else None
    rank = processes.get("global_rank", int) if processes else None
    return DistributedTensor(shape, tuple(parts), ranks or len(placed), rank)


KNOWN: dict[Global, Any] = {
    **PLAIN,
    ("torch._tensor", "_rebuild_from_type_v2"): Known(_of_type),
    ("torch._utils", "_rebuild_wrapper_subclass"): Known(_wrapper),
}
"""The names of torch's own that say how a tensor is built; everything else in a pickle becomes a `Stub`."""
