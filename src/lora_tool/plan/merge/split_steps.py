"""Cutting steps on parameters in memory into steps on tensors on disk, where the two are not one to one.

A rule of transformers that fuses, splits or reorders weights moves whole rows. So what is done to a parameter is, for
a tensor on disk, the same done to some of its rows: a smaller step that needs no fused layer in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lora_tool.actions import TensorAction
from lora_tool.adapter.support import WITH_PEFT
from lora_tool.errors import UnsupportedAdapter
from lora_tool.names.model import RowMapping, row_count
from lora_tool.plan.core.ops import Assemble, BiasDelta, Cast, Copy, DoraDelta, LoraDelta, Op, Part, ReplaceRows
from lora_tool.plan.core.steps import Step
from lora_tool.tensors import Span, StoredTensor, TensorSpec, TensorTable

_STACK = 3
"""Dimensions of a parameter that holds one matrix per expert."""


def rows_of(tensor: StoredTensor, start: int, rows: int) -> StoredTensor:
    """Return these rows of the tensor, [rows, last dimension], or elements of a vector, as a tensor of their own."""
    if start == 0 and rows == row_count(tensor.shape) and len(tensor.shape) < _STACK:
        return tensor
    shape = (rows,) if len(tensor.shape) <= 1 else (rows, tensor.shape[-1])
    spec = TensorSpec(name=tensor.name, dtype=tensor.dtype, shape=shape)
    each = spec.nbytes // rows if rows else 0
    return StoredTensor(spec=spec, spans=tuple(tensor.part(start * each, spec.nbytes)))


def joined(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the spans with those that lie one after the other in a file made one."""
    if len(spans) == 1:
        return tuple(spans)
    made: list[Span] = []
    for span in spans:
        last = made[-1] if made else None
        if (
            last is not None
            and type(last) is type(span) is Span
            and last.path == span.path
            and last.offset + last.nbytes == span.offset
        ):
            made[-1] = replace(last, nbytes=last.nbytes + span.nbytes)
        else:
            made.append(span)
    return tuple(made)


def cut(step: Step, start: int, rows: int) -> Iterator[Part]:
    """Yield what makes rows `start` to `start + rows` of the step's output: one operation, or one per expert.

    Raises `UnsupportedAdapter` for what needs all rows at once.
    """
    ops = step.op.parts if isinstance(step.op, Assemble) else (step.op,)
    if len(ops) > 1:
        raise AssertionError("a step on a parameter is whole before it is cut")
    yield from _cut(step, ops[0], start, rows)


def _cut(step: Step, op: Part, start: int, rows: int) -> Iterator[Part]:
    source = rows_of(op.source, start, rows)
    match op:
        case Copy() | Cast():
            yield type(op)(source=source)
        case LoraDelta() if len(op.source.shape) == _STACK:
            yield from _cut_stack(op, start, rows)
        case LoraDelta():
            terms = tuple(replace(term, first=term.first + start) for term in op.terms)
            yield replace(op, source=source, terms=terms)
        case BiasDelta():
            terms_of_bias = tuple(replace(term, bias=rows_of(term.bias, start, rows)) for term in op.terms)
            yield BiasDelta(source=source, terms=terms_of_bias)
        case ReplaceRows():
            yield from _cut_rows(op, source, start, rows)
        case DoraDelta() if op.transposed and rows != op.source.shape[0]:
            raise UnsupportedAdapter(
                f"{op.term.b.path}: `{op.term.b.name}` is DoRA on a layer that is stored in parts and transposed: "
                f"`{step.out.name}` cannot be merged part by part",
                hint=WITH_PEFT,
            )
        case DoraDelta():
            magnitude = op.magnitude if op.transposed else rows_of(op.magnitude, start, rows)
            yield replace(op, source=source, magnitude=magnitude, term=replace(op.term, first=op.term.first + start))


def _cut_stack(op: LoraDelta, start: int, rows: int) -> Iterator[Part]:
    height = op.source.shape[1]
    while rows:
        expert, first = divmod(start, height)
        taken = min(rows, height - first)
        terms = tuple(replace(term, expert=expert, first=first) for term in op.terms)
        yield replace(op, source=rows_of(op.source, start, taken), terms=terms)
        start, rows = start + taken, rows - taken


def _cut_rows(op: ReplaceRows, source: StoredTensor, start: int, rows: int) -> Iterator[Part]:
    inside = [at for at, row in enumerate(op.indices) if start <= row < start + rows]
    if not inside:
        yield Copy(source=source)
        return
    picked = [rows_of(op.rows, at, 1) for at in inside]
    spec = replace(op.rows.spec, shape=(len(inside), *op.rows.shape[1:]))
    held = StoredTensor(spec=spec, spans=tuple(span for row in picked for span in row.spans))
    yield ReplaceRows(source=source, rows=held, indices=tuple(op.indices[at] - start for at in inside))


def disk_steps(steps: Mapping[str, Step], written: Mapping[str, RowMapping], disk: TensorTable) -> Iterator[Step]:
    """Yield the step of every tensor in `written`, made of the steps on the parameters that it is rows of."""
    at_place = {
        (tensor.spans[0].path, tensor.spans[0].offset, tensor.nbytes): tensor
        for tensor in disk.values()
        if len(tensor.spans) == 1 and tensor.nbytes
    }
    for name, made in written.items():
        yield _disk_step(name, made, steps, at_place)


_Places = Mapping[tuple[Path, int, int], StoredTensor]


def _disk_step(name: str, made: RowMapping, steps: Mapping[str, Step], at_place: _Places) -> Step:
    if made.pieces is None:
        raise AssertionError("what is not made of rows is copied as it is")
    makers = [steps[piece.name] for piece in made.pieces] or [steps[name] for name in made.sources]  # an empty one
    if len(makers) == 1 and makers[0].out.shape == made.shape and not _is_stack(makers[0].op):
        op = makers[0].op
        named = op if isinstance(op, Assemble) else _named(op, at_place)
        return replace(makers[0], out=replace(makers[0].out, name=name), op=named)
    parts = [
        part for piece, maker in zip(made.pieces, makers, strict=True) for part in cut(maker, piece.start, piece.rows)
    ]
    parts = [_named(part, at_place) for part in _merged_copies(parts)]
    worth_telling = next((maker for maker in makers if maker.action is not TensorAction.COPIED), makers[0])
    dtypes = {maker.out.dtype for maker in makers}
    if len(dtypes) > 1:
        raise UnsupportedAdapter(f"`{name}` would be made of tensors of different types: {sorted(map(str, dtypes))}")
    out = TensorSpec(name=name, dtype=worth_telling.out.dtype, shape=made.shape)
    whole: Op = parts[0] if len(parts) == 1 else Assemble(parts=tuple(parts))
    return Step(out=out, op=whole, action=worth_telling.action, reason=worth_telling.reason)


def _is_stack(op: Op) -> bool:
    return isinstance(op, LoraDelta) and len(op.source.shape) == _STACK


def _merged_copies(parts: Sequence[Part]) -> list[Part]:
    """Return the parts with neighbouring copies made one."""
    if len(parts) == 1:
        return list(parts)
    made: list[Part] = []
    for part in parts:
        last = made[-1] if made else None
        if isinstance(part, Copy | Cast) and type(last) is type(part) and last is not None:
            made[-1] = replace(part, source=_stacked(last.source, part.source))
        else:
            made.append(part)
    return made


def _stacked(upper: StoredTensor, lower: StoredTensor) -> StoredTensor:
    spec = replace(upper.spec, shape=(upper.shape[0] + lower.shape[0], *upper.shape[1:]))
    return StoredTensor(spec=spec, spans=joined((*upper.spans, *lower.spans)))


def _named(part: Part, at_place: _Places) -> Part:
    """Return the part with its source under the name that it has on disk, where it is a whole tensor there."""
    spans = joined(part.source.spans)
    whole = len(spans) == 1 and not part.source.is_transposed
    known = at_place.get((spans[0].path, spans[0].offset, spans[0].nbytes)) if whole else None
    if known is None:
        return part
    source = known
    if known.shape != part.source.shape:
        source = StoredTensor(spec=replace(part.source.spec, name=known.name), spans=spans)
    return Copy(source=source) if isinstance(part, Copy) else replace(part, source=source)
