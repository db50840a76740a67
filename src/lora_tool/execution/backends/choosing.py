"""Which backend computes an operation. Each is imported only when it is chosen: a plan of copies needs no numpy."""

from __future__ import annotations

from collections.abc import Callable

from lora_tool.execution.backends.backend import Backend
from lora_tool.exhaustive import assert_never
from lora_tool.plan.core.ops import Precision, RowOp

ChooseBackend = Callable[[Precision, RowOp], type[Backend]]


def backend_for(precision: Precision, op: RowOp) -> type[Backend]:
    """Return the arithmetic of `op` in a plan of this precision. Raises `MissingDependency` where it is not installed."""
    if op.is_copy:
        precision = Precision.FLOAT32  # its values are only looked at
    elif op.taken_out:
        precision = Precision.PEFT  # whatever was asked for: a decomposition is PEFT's own
    match precision:
        case Precision.FLOAT32 | Precision.FLOAT64:
            from lora_tool.execution.backends.numpy_backend import NumpyBackend  # noqa: PLC0415 - see above

            return NumpyBackend
        case Precision.PEFT:
            from lora_tool.execution.backends.torch_backend import TorchBackend  # noqa: PLC0415 - see above

            return TorchBackend
        case _:
            return assert_never(precision)
