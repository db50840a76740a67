"""Shared by the readers of layouts: finding the parts of a weight, and naming their faults."""

from __future__ import annotations

from array import array

from lora_tool.core.tensors import DType, StoredTensor, TensorTable
from lora_tool.formats.stored import read_part

SCALES = (DType.F32, DType.BF16, DType.F16)
"""The types of scales that are floats."""
POWERS = (DType.F8_E8M0, DType.U8)
"""The types of scales that are powers of two."""
MATRIX, STACK = 2, 3
"""How many dimensions a weight has, and one for each of several experts."""


class LayoutError(Exception):
    """A quantised weight breaks its format, or is stored in a way that lora-tool does not read: its tensor, and why.

    `is_fault` where the format has no such weight.
    """

    def __init__(self, tensor: StoredTensor, why: str, *, is_fault: bool = True) -> None:
        super().__init__(f"{tensor.path}: `{tensor.name}` {why}")
        self.tensor, self.path, self.why = tensor.name, tensor.path, why
        self.is_fault = is_fault


class Parts:
    """The tensors of a checkpoint, among which the parts of quantised weights are."""

    def __init__(self, tensors: TensorTable) -> None:
        self.tensors = tensors

    def needed(self, name: str, of: StoredTensor, dtypes: tuple[DType, ...], size: int | None = None) -> StoredTensor:
        """Return the tensor `name`, a part of the weight that `of` is another part of."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise LayoutError(of, f"is a part of a quantised weight, but its other part `{name}` is missing")
        if tensor.dtype not in dtypes:
            wanted = " or ".join(map(str, dtypes))
            raise LayoutError(tensor, f"is {tensor.dtype}; expected {wanted}")
        if size is not None and tensor.spec.numel != size:
            raise LayoutError(tensor, f"is {list(tensor.shape)}; expected {size} elements")
        return tensor


def groups_of_inputs(
    parts: Parts, name: str, codes: StoredTensor, inside: int, count: int, *, least: int = 0
) -> StoredTensor | None:
    """Return the tensor that says in which of `count` groups each of a weight's inputs is; None where they are in order.

    `least` is the least number that it may hold. Raises `LayoutError`, OSError.
    """
    groups = parts.tensors.get(name)
    if groups is None:
        return None
    parts.needed(name, codes, (DType.I32,), inside)
    numbers = array("i", read_part(groups, 0, groups.nbytes))
    if not least <= min(numbers) <= max(numbers) < count:
        raise LayoutError(groups, f"names groups {min(numbers)} to {max(numbers)}; there are {count}")
    return groups


def in_tiles(tile: tuple[int, int], shape: tuple[int, ...]) -> str:
    """Return how scales for each `tile`, [rows, columns], of a weight of that shape are called."""
    height, width = shape[-2:]
    return {(height, width): "per tensor", (1, width): "per row"}.get(tile, f"in tiles of {tile[0]}x{tile[1]}")
