"""What a stored tensor is compared with, part by part: an assembled tensor's rows come from several operations."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lora_tool.plan.core.ops import Cast, Copy, RowOp, row_ops
from lora_tool.plan.core.steps import Step
from lora_tool.tensors import StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Elements of the tensor `name` from `begin`, as stored in the merged model, and the operation that makes them."""

    name: str
    op: RowOp
    stored: StoredTensor
    begin: int = 0

    @property
    def copied(self) -> bool:
        """Whether it must be its source's bytes."""
        return self.op.is_copy


def parts_of(step: Step, stored: StoredTensor) -> tuple[Compared, ...]:
    """Return the parts of a step's output, in the type and place where it is stored."""
    parts = []
    begin = 0
    for op in row_ops(step.op):
        rows = _elements(stored, begin, op.source)
        parts.append(Compared(name=step.out.name, op=_as_stored(op, stored), stored=rows, begin=begin))
        begin += op.source.spec.numel
    return tuple(parts)


def _as_stored(op: RowOp, stored: StoredTensor) -> RowOp:
    """Return the operation for the type that the tensor was stored in: a tool may have been asked for another one."""
    if not op.keeps_values:
        return op
    return Copy(source=op.source) if op.source.dtype is stored.dtype else Cast(source=op.source)


def _elements(stored: StoredTensor, begin: int, source: StoredTensor) -> StoredTensor:
    """Return as many elements as `source` has, in its shape: a stack of experts may be worked on row by row."""
    if source.shape == stored.shape:
        return stored
    spec = replace(stored.spec, shape=source.shape)
    spans = stored.spans if spec.numel == stored.spec.numel else stored.part(begin * spec.dtype.bits // 8, spec.nbytes)
    return StoredTensor(spec=spec, spans=tuple(spans))
