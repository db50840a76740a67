"""Cutting steps on parameters in memory into steps on tensors on disk, where the two are not one to one.

A rule of transformers that fuses, splits or reorders weights moves whole rows. So a change of a parameter is, for
a tensor on disk, the same change of some of its rows: a smaller step that needs no fused layer in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from lora_tool.adapters.support import ALLOW_IN_MEMORY, WITH_PEFT
from lora_tool.core.errors import OnlyInMemory, UnsupportedAdapter
from lora_tool.core.tensors import StoredTensor, TensorAction, TensorSpec, TensorTable, TransposedSpan, contiguous
from lora_tool.models.mapping.model import RowMapping, RowSlice, row_count
from lora_tool.plans.core.factor_ops import FactorOp
from lora_tool.plans.core.ops import Assemble, Cast, Copy, Dequantise, LoraDelta, Op, RowOp, row_ops
from lora_tool.plans.core.requantise import Requantise
from lora_tool.plans.core.steps import Step

_STACK = 3
"""Dimensions of a parameter that holds one matrix per expert."""


def cut(step: Step, start: int, rows: int) -> tuple[RowOp, ...]:
    """Return what makes rows `start` to `start + rows` of the step's output: one operation, or one per expert.

    Raises `UnsupportedAdapter` for what needs all rows at once, `OnlyInMemory` where that is an init's doing.
    """
    (op,) = row_ops(step.op)
    if op.needs_all_rows and (start, rows) != (0, row_count(op.source.shape)):
        tensor = op.inputs[2]
        if op.taken_out:
            raise OnlyInMemory(
                f"{tensor.path}: `{tensor.name}`: `init_lora_weights` {op.taken_out} on `{step.out.name}`, which is "
                "stored in parts, cannot be recomputed",
                hint=ALLOW_IN_MEMORY,
            )
        raise UnsupportedAdapter(
            f"{tensor.path}: `{tensor.name}` is DoRA on a layer that is stored in parts and transposed: "
            f"`{step.out.name}` cannot be merged part by part",
            hint=WITH_PEFT,
        )
    return op.cut(start, rows)


def disk_steps(steps: Mapping[str, Step], written: Mapping[str, RowMapping], disk: TensorTable) -> Iterator[Step]:
    """Yield the step of every tensor in `written`, made of the steps on the parameters that it is rows of."""
    at_place = {
        (tensor.spans[0].path, tensor.spans[0].offset, tensor.nbytes): tensor
        for tensor in disk.values()
        if len(tensor.spans) == 1 and tensor.nbytes
    }
    of_base = frozenset(path for path, _, _ in at_place)
    for name, made in written.items():
        yield _disk_step(name, made, steps, at_place, of_base)


_Places = Mapping[tuple[Path, int, int], StoredTensor]


def _disk_step(
    name: str, made: RowMapping, steps: Mapping[str, Step], at_place: _Places, of_base: frozenset[Path]
) -> Step:
    if made.pieces is None:
        raise AssertionError("what is not made of rows is copied as it is")
    makers = [steps[piece.name] for piece in made.pieces] or [steps[name] for name in made.sources]  # an empty one
    if len(makers) == 1 and makers[0].out.shape == made.shape and not _is_stack(makers[0].op):
        op = makers[0].op
        named = op if isinstance(op, Assemble | Requantise) else _named(op, at_place)
        return replace(makers[0], out=replace(makers[0].out, name=name), op=named)
    if len(made.pieces) == 1 and isinstance(op := makers[0].op, Copy | Cast | Dequantise):
        known = _whole_tensor(made.pieces[0], op.source, at_place)
        if known is not None:
            out = TensorSpec(name=name, dtype=makers[0].out.dtype, shape=made.shape)
            return Step(out=out, op=type(op)(source=known), action=makers[0].action, reason=makers[0].reason)
    dtypes = {maker.out.dtype for maker in makers}
    if len(dtypes) > 1:
        raise UnsupportedAdapter(f"`{name}` would be made of tensors with different dtypes: {sorted(map(str, dtypes))}")
    parts = [
        part for piece, maker in zip(made.pieces, makers, strict=True) for part in cut(maker, piece.start, piece.rows)
    ]
    parts = [_named(part, at_place) for part in _merged_copies(parts, of_base)]
    worth_telling = next((maker for maker in makers if maker.action is not TensorAction.COPIED), makers[0])
    out = TensorSpec(name=name, dtype=worth_telling.out.dtype, shape=made.shape)
    whole: Op = parts[0] if len(parts) == 1 else Assemble(parts=tuple(parts))
    return Step(out=out, op=whole, action=worth_telling.action, reason=worth_telling.reason)


def _whole_tensor(piece: RowSlice, source: StoredTensor, at_place: _Places) -> StoredTensor | None:
    """Return the tensor on disk that these rows of `source` are, as nearly all tensors of a model with experts are one."""
    width = source.shape[-1:] if len(source.shape) > 1 else ()
    row_bytes = source.nbytes // (row_count(source.shape) or 1)
    spans = tuple(source.part(piece.start * row_bytes, piece.rows * row_bytes))
    if len(spans) != 1 or isinstance(spans[0], TransposedSpan):
        return None
    known = at_place.get((spans[0].path, spans[0].offset, spans[0].nbytes))
    return known if known is not None and known.shape == (piece.rows, *width) else None


def _is_stack(op: Op) -> bool:
    return isinstance(op, LoraDelta) and len(op.source.shape) == _STACK


def _merged_copies(parts: Sequence[RowOp], of_base: frozenset[Path]) -> list[RowOp]:
    """Return the parts with neighbouring copies from the base's files made one: an adapter's tensors keep their names."""
    if len(parts) == 1:
        return list(parts)
    made: list[RowOp] = []
    for part in parts:
        last = made[-1] if made else None
        if (
            isinstance(part, Copy | Cast)
            and type(last) is type(part)
            and of_base.issuperset(span.path for span in (*last.source.spans, *part.source.spans))
        ):
            made[-1] = replace(part, source=_stacked(last.source, part.source))
        else:
            made.append(part)
    return made


def _stacked(upper: StoredTensor, lower: StoredTensor) -> StoredTensor:
    spec = replace(upper.spec, shape=(upper.shape[0] + lower.shape[0], *upper.shape[1:]))
    return StoredTensor(spec=spec, spans=contiguous((*upper.spans, *lower.spans)))


def _named(part: RowOp, at_place: _Places) -> RowOp:
    """Return the part with its source under the name that it has on disk, where it is a whole tensor there."""
    spans = contiguous(part.source.spans)
    whole = len(spans) == 1 and not part.source.is_transposed
    known = at_place.get((spans[0].path, spans[0].offset, spans[0].nbytes)) if whole else None
    if known is None or isinstance(part, FactorOp):  # no step of a model makes factors
        return part
    source = known
    if known.shape != part.source.shape:
        source = StoredTensor(spec=replace(part.source.spec, name=known.name), spans=spans)
    return replace(part, source=source)
