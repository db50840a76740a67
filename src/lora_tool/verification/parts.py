"""What a stored tensor is compared with, part by part: an assembled tensor's rows come from several operations."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lora_tool.plan.core.ops import Assemble, Cast, Copy, Op
from lora_tool.plan.core.steps import Step
from lora_tool.tensors import StoredTensor, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Elements of the tensor `name` from `begin`, as stored in the merged model, and the operation that makes them."""

    name: str
    op: Op
    stored: StoredTensor
    begin: int = 0

    @property
    def copied(self) -> bool:
        """Whether it must be its source's bytes."""
        return isinstance(self.op, Copy)


def parts_of(step: Step, stored: StoredTensor) -> tuple[Part, ...]:
    """Return the parts of a step's output, in the type and place where it is stored."""
    if not isinstance(step.op, Assemble):
        return (Part(name=step.out.name, op=_as_stored(step.op, stored), stored=_shaped(step.op, stored)),)
    parts = []
    begin = 0
    for op in step.op.parts:
        numel = op.source.spec.numel
        piece = _elements(stored, begin, numel, op.source.shape)
        parts.append(Part(name=step.out.name, op=_as_stored(op, stored), stored=piece, begin=begin))
        begin += numel
    return tuple(parts)


def _as_stored(op: Op, stored: StoredTensor) -> Op:
    """Return the operation for the type that the tensor was stored in: a tool may have been asked for another one."""
    if isinstance(op, Copy) and op.source.dtype is not stored.dtype:
        return Cast(source=op.source)
    if isinstance(op, Cast) and op.source.dtype is stored.dtype:
        return Copy(source=op.source)
    return op


def _shaped(op: Op, stored: StoredTensor) -> StoredTensor:
    """Return the tensor in its source's shape: a stack of experts may be worked on row by row."""
    if op.source.shape == stored.shape:
        return stored
    return replace(stored, spec=replace(stored.spec, shape=op.source.shape))


def _elements(stored: StoredTensor, begin: int, numel: int, shape: tuple[int, ...]) -> StoredTensor:
    width = stored.dtype.bits // 8
    spec = TensorSpec(name=stored.name, dtype=stored.dtype, shape=shape)
    return StoredTensor(spec=spec, spans=tuple(stored.part(begin * width, numel * width)))
