"""The interface of an arithmetic backend, and the errors for values that must not be written."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import ClassVar, NoReturn, Protocol

from lora_tool.core.errors import ExecutionError
from lora_tool.core.tensors import DType
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import ComputeUnit
from lora_tool.plans.core.delta_retention import DeltaRetention
from lora_tool.plans.core.ops import Dequantise, Precision


class Backend(Protocol):
    """One worker's arithmetic, with buffers that it reuses: do not share it between threads."""

    whole_tensors: ClassVar[bool]
    """Whether its bits depend on the shapes that it is given; then every unit is a whole tensor."""

    def __init__(self, sources: Sources, precision: Precision, stopped: Callable[[], bool]) -> None:
        """Compute with `precision` from the files of `sources`, until `stopped` says that the run has failed."""

    def run(self, unit: ComputeUnit, out: int) -> DeltaRetention | None:
        """Compute the unit and write it to the descriptor `out`, at byte `unit.begin`.

        Return, from a sample, how much of the change survives rounding; None for a unit without a change. Raises
        `ExecutionError` on NaN, infinity and overflow, `SourceChanged` where an input ends early.
        """

    @staticmethod
    def one_thread() -> AbstractContextManager[object]:
        """Return what keeps the library's own threads away while several workers compute."""


def refuse_nonfinite(unit: ComputeUnit) -> NoReturn:
    """Raise `ExecutionError`: the unit's output would hold NaN or infinity."""
    if isinstance(unit.op, Dequantise):
        raise ExecutionError(
            f"`{unit.out.name}` would hold NaN or infinity: codes or scales of it in {unit.op.source.path} are no finite numbers",
            hint='download or copy the base again; `store="touched-16bit"` keeps the bytes of what the adapter leaves alone',
        )
    names = ", ".join(tensor.name for tensor in unit.op.inputs)
    folders = shlex.join(dict.fromkeys(str(tensor.path.parent) for tensor in unit.op.inputs))
    raise ExecutionError(
        f"`{unit.out.name}` would hold NaN or infinity; it is computed from {names}",
        hint=f"lora-tool validate --deep {folders} names the tensor that is not finite",
    )


def refuse_overflow(unit: ComputeUnit) -> NoReturn:
    """Raise `ExecutionError`: a finite value does not fit into the unit's output type."""
    raise ExecutionError(
        f"`{unit.out.name}`: a value is too large for {unit.out.dtype}",
        hint='choose a wider type: `dtype="bfloat16"` or `dtype="float32"`'
        if unit.out.dtype is DType.F16
        else "no wider type is offered: is a weight or `lora_alpha` too large?",
    )
