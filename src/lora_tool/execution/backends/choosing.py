"""Which backend computes an operation. Each is imported only when it is chosen: a plan of copies needs no numpy."""

from __future__ import annotations

from collections.abc import Callable

from lora_tool.core.choices import assert_never
from lora_tool.core.tensors import DType
from lora_tool.execution.backends.backend import Backend
from lora_tool.native.library import TYPES, kernel
from lora_tool.plans.core.factor_ops import FactorOp
from lora_tool.plans.core.ops import Cast, Precision, RowOp, row_ops
from lora_tool.plans.core.plan import Plan

ChooseBackend = Callable[[Precision, RowOp], type[Backend]]


def backend_for(precision: Precision, op: RowOp) -> type[Backend]:
    """Return the arithmetic of `op` in a plan of this precision. Raises `MissingDependency` where it is not installed."""
    if op.is_copy:
        precision = Precision.FLOAT32  # its values are only checked for NaN and infinity
    elif op.taken_out:
        precision = Precision.PEFT  # at any requested precision: the init's decomposition is PEFT's
    elif isinstance(op, FactorOp | Cast) and precision is Precision.FLOAT64:
        precision = Precision.FLOAT32  # factors are computed in float64 in both, and a cast is rounded once
    match precision:
        case Precision.FLOAT32 if kernel() is not None and _fits_kernel(op):
            from lora_tool.execution.backends.native_backend import NativeBackend

            return NativeBackend
        case Precision.FLOAT32 | Precision.FLOAT64:
            from lora_tool.execution.backends.numpy_backend import NumpyBackend

            return NumpyBackend
        case Precision.PEFT:
            from lora_tool.execution.backends.torch_backend import TorchBackend

            return TorchBackend
        case _:
            return assert_never(precision)


def _fits_kernel(op: RowOp) -> bool:
    """Return whether the kernel reads the inputs: weights that float32 holds, and factors in float64, too."""
    if isinstance(op, FactorOp):  # numpy computes them, in float64
        return False
    return op.source.dtype in TYPES and all(tensor.dtype in (*TYPES, DType.F64) for tensor in op.inputs)


def arithmetic_of(plan: Plan) -> str | None:
    """Return the names of the backends that compute the plan, for its record; None if every tensor is copied."""
    return None if plan.only_copies else _arithmetic(plan.precision, factors=makes_factors(plan))


def formula_of(plan: Plan) -> str | None:
    """Return the part of `arithmetic_of` that determines the bytes: all levels of the kernel give the same."""
    found = arithmetic_of(plan)
    return found and found.partition(" (")[0]


def makes_factors(plan: Plan) -> bool:
    """Return whether factors of LoRA are computed, which is in float64 at every precision."""
    return any(isinstance(op, FactorOp) for step in plan.steps for op in row_ops(step.op))


def formula(precision: Precision, *, factors: bool = False) -> str:
    """Return what decides about the bytes that are computed with this precision on this machine; `factors`, too."""
    return _arithmetic(precision, factors=factors).partition(" (")[0]


def _arithmetic(precision: Precision, *, factors: bool) -> str:
    match precision:
        case Precision.FLOAT32:
            return "numpy" if factors else str(kernel() or "numpy")
        case Precision.FLOAT64:
            return "numpy"
        case Precision.PEFT:
            return "torch"
        case _:
            return assert_never(precision)
