"""What `torch.save` writes into a pickle for a tensor, as data: its type, shape and storage, and not a value of it.

Sources: torch 2.13 `_utils.py` (`_rebuild_tensor_v2` and its like) and `storage.py`.
"""

from __future__ import annotations

import math
from operator import mul
from typing import Any, NamedTuple

from lora_tool.core.tensors import MAX_BYTES, DType
from lora_tool.formats.pickle_objects import MOST_DIMENSIONS, Global, Known


class LazyTensor(NamedTuple):
    """A tensor of the archive that was not read: its type, shape and place. `TorchFile` says where that is on disk.

    A tuple, as everything is that a pickle may hold: nothing in the pickle can change its fields.
    """

    key: str
    """Of the storage that holds it."""
    dtype: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int
    """Its first element, counted in the storage."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_contiguous(self) -> bool:
        """Whether its elements lie one after the other in row-major order."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return self.numel == 0
            expected *= size
        return True

    @property
    def is_transposed(self) -> bool:
        """Whether it is a matrix whose elements lie one after the other in column-major order."""
        return len(self.shape) == 2 and self.stride == (1, self.shape[0])  # noqa: PLR2004 - a matrix


class TorchStorage(NamedTuple):
    """The content of a persistent id: the key of the record, its type and its length."""

    key: str
    dtype: DType
    numel: int


class ElementType(NamedTuple):
    """A type: ``torch.FloatStorage``, ``torch.float32``. BUILD could change a bare `DType` for the whole process."""

    dtype: DType


def _rebuilt(storage: Any, start: Any, shape: Any, stride: Any, *rest: Any) -> LazyTensor:  # noqa: ANN401
    """`torch._utils._rebuild_tensor_v2`, and v3, whose seventh argument is the type of an untyped storage's tensor."""
    # a checkpoint has thousands of tensors: this is written for speed
    if type(shape) is not tuple or type(stride) is not tuple or not len(shape) == len(stride) <= MOST_DIMENSIONS:
        raise ValueError("a tensor is not built from a shape and strides")
    if not isinstance(storage, TorchStorage) or not is_sizes((start, *shape, *stride)):
        raise ValueError("a tensor is not built from a storage, an offset, a shape and strides")
    dtype = storage.dtype
    for extra in rest:
        if type(extra) is ElementType:
            dtype = extra.dtype
    held = storage.numel * storage.dtype.bits // dtype.bits
    last = start + sum(map(mul, shape, stride)) - sum(stride)
    if (0 not in shape and last >= held) or start > held:
        raise ValueError(f"a tensor of shape {list(shape)} at element {start:,} lies beyond its storage of {held:,}")
    if math.prod(shape) > MAX_BYTES:
        raise ValueError(f"a tensor of shape {list(shape)} is larger than any file")
    return LazyTensor(storage.key, dtype, shape, stride, start)


def is_sizes(values: tuple[Any, ...]) -> bool:
    """Return whether all of them are sizes: whole numbers from 0 on."""
    # bool is an int, and no size
    return not values or (set(map(type, values)) == {int} and min(values) >= 0)


def _parameter(value: Any, *_: Any) -> LazyTensor:  # noqa: ANN401
    """`_rebuild_parameter`: the tensor, without its other arguments."""
    if not isinstance(value, LazyTensor):
        raise ValueError("a parameter is not a tensor")  # noqa: TRY004 - of the file, not of Python
    return value


def _size(values: Any = ()) -> tuple[int, ...]:  # noqa: ANN401
    if not isinstance(values, list | tuple) or len(values) > MOST_DIMENSIONS or not is_sizes(tuple(values)):
        raise ValueError("a torch.Size is not made of sizes")
    return tuple(values)


_STORAGES = {
    "Float": DType.F32, "Double": DType.F64, "Half": DType.F16, "BFloat16": DType.BF16, "Long": DType.I64,
    "Int": DType.I32, "Short": DType.I16, "Char": DType.I8, "Byte": DType.U8, "Bool": DType.BOOL,
}  # fmt: skip
_DTYPES = {
    "float32": DType.F32, "float64": DType.F64, "float16": DType.F16, "bfloat16": DType.BF16, "int64": DType.I64,
    "int32": DType.I32, "int16": DType.I16, "int8": DType.I8, "uint8": DType.U8, "bool": DType.BOOL,
    "uint16": DType.U16, "uint32": DType.U32, "uint64": DType.U64, "complex64": DType.C64,
    "float8_e4m3fn": DType.F8_E4M3, "float8_e5m2": DType.F8_E5M2, "float8_e8m0fnu": DType.F8_E8M0,
    "float8_e4m3fnuz": DType.F8_E4M3FNUZ, "float8_e5m2fnuz": DType.F8_E5M2FNUZ,
}  # fmt: skip

PLAIN: dict[Global, Any] = {
    **{("torch", f"{name}Storage"): ElementType(dtype) for name, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): ElementType(DType.U8),
    **{("torch", name): ElementType(dtype) for name, dtype in _DTYPES.items()},
    ("torch", "Size"): Known(_size),
    ("torch._utils", "_rebuild_tensor"): Known(_rebuilt),
    ("torch._utils", "_rebuild_tensor_v2"): Known(_rebuilt),
    ("torch._utils", "_rebuild_tensor_v3"): Known(_rebuilt),
    ("torch._utils", "_rebuild_parameter"): Known(_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): Known(_parameter),
}
"""The names of torch's own that say how a tensor of one process is built."""
