"""Steps that quantise merged numbers afresh as bitsandbytes quantised the base, from its 16-bit original where one is given.

ΔW is added to the original, which lies between the numbers that codes stand for: it is then kept in the mean, with the
rounding error that every quantised model has. Added to the numbers of the base, which are those of codes, a ΔW of less
than half a step is rounded away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.actions import TensorAction
from lora_tool.checkpoint import ModelDir
from lora_tool.checkpoint.quantised import quantisation_table
from lora_tool.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.formats.quantised.bitsandbytes import state_bytes
from lora_tool.formats.quantised.encodings import (
    Bnb4,
    BnbInt8,
    Encoding,
    NestedScales,
    QuantisedSpan,
    dequantised,
    encoding_of,
)
from lora_tool.formats.quantised.grids import Blockwise, block_of, blocks_of, rows_around
from lora_tool.plan.core.delta_retention import DeltaRetention
from lora_tool.plan.core.operation import rows_of
from lora_tool.plan.core.ops import Assemble, Computed, Dequantise, DoraDelta, LoraDelta, RowOp, copied_as, row_ops
from lora_tool.plan.core.quantise import FreshPart, Quantise, rounded_to
from lora_tool.plan.core.requantise import Requantise
from lora_tool.plan.core.steps import Step
from lora_tool.plan.merge.samples import MOST_SAMPLED, PLACES, SAMPLED_ROWS, made_rows, numbers, raw
from lora_tool.tensors import DType, StoredTensor, TensorSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from lora_tool.plan.core.operation import Values

_APART = 1 / 4
"""How far the original, quantised, may be from the base, as a share of the base's rounding error. The right one is next
to nothing away; in four bits, weights that are 1% off are about half the error away.
"""


class Original(Struct, frozen=True, kw_only=True):
    """The 16-bit model that a quantised base was made from."""

    model: ModelDir

    def weight(self, encoding: Encoding) -> StoredTensor:
        """Return the weight of which `encoding` is the quantised one. Raises `IncompatibleBase` where it is not there."""
        name, root = encoding.spec.name, self.model.root
        found = self.model.tensors.get(name)
        if found is None or found.shape != encoding.spec.shape or not found.dtype.is_float:
            what = "is not there" if found is None else f"is {found.dtype} {list(found.shape)}"
            raise IncompatibleBase(
                f"{root}: `{name}` {what}, but the quantised base {encoding.codes.path.parent} has one of "
                f"{list(encoding.spec.shape)} by that name",
                hint="`original` is the 16-bit model that the base was quantised from, saved by the same transformers",
            )
        return found


def original_of(model: ModelDir, encodings: Mapping[str, Encoding]) -> Original:
    """Return the original of a base with these quantised weights.

    A sample of each weight, quantised again, is compared with the base's. Raises `UnsupportedAdapter` for a base that
    is not of bitsandbytes, `IncompatibleBase` where the model is not what the base was made from.
    """
    if quantisation_table(model.whole_config):
        raise IncompatibleBase(
            f"{model.root}: the original is quantised, too", hint="`original` is the 16-bit model that it was made from"
        )
    found = Original(model=model)
    known = [each for name, each in encodings.items() if name in model.tensors]
    every = -(-len(known) // MOST_SAMPLED) or 1
    for encoding in known[::every]:
        if isinstance(encoding, Bnb4 | BnbInt8):
            _require_same(encoding, found.weight(encoding), model)
    return found


def fresh_steps(step: Step, encoding: Blockwise, original: Original | None) -> Iterator[Step]:
    """Yield the steps of what is stored of the weight that `step` changes: its codes, and what is not as in the base.

    Raises `UnsupportedAdapter` for changes that are not made row by row, `IncompatibleBase` as `Original.weight`.
    """
    op = step.op
    if isinstance(op, Quantise | Requantise):
        raise AssertionError(f"`{step.out.name}` is quantised twice")  # noqa: TRY004 - ours
    if any(each.needs_all_rows or each.taken_out for each in row_ops(op)):
        raise UnsupportedAdapter(
            f"`{step.out.name}` cannot be quantised again as {encoding}: {step.reason}",
            hint='`store="touched-16bit"` writes such weights in 16 bits',
        )
    weight = dequantised(encoding) if original is None else original.weight(encoding)
    made = (
        replace(op, parts=tuple(_on(each, weight) for each in op.parts))
        if isinstance(op, Assemble)
        else _on(op, weight)
    )
    specs = {FreshPart.CODES: encoding.codes.spec, **dict(_specs_of_scales(encoding))}
    for part, spec in specs.items():
        each: Quantise[Computed] = Quantise(made=made, weight=weight, encoding=encoding, part=part)
        action = TensorAction.MERGED if part is FreshPart.CODES else TensorAction.RESCALED
        yield Step(out=spec, op=each, action=action, reason=str(each))


def _specs_of_scales(encoding: Blockwise) -> Iterator[tuple[FreshPart, TensorSpec]]:
    if isinstance(encoding, BnbInt8):
        yield FreshPart.SCALES, encoding.largest.spec
    elif isinstance(encoding.scales, NestedScales):
        yield FreshPart.SCALES, encoding.scales.codes.spec
        yield FreshPart.OUTER, encoding.scales.scales.spec
        if encoding.record is not None:
            size = state_bytes(encoding.record)
            yield FreshPart.STATE, replace(encoding.record.spec, shape=(size,))
    else:
        yield FreshPart.SCALES, encoding.scales.spec


def _on(op: RowOp, weight: StoredTensor) -> RowOp:
    """Return the operation on the same rows of another weight than the quantised one."""
    source = op.source
    span = source.spans[0]
    if encoding_of(weight) is not None or not isinstance(span, QuantisedSpan):
        return op
    size, width = source.dtype.bits // 8, source.shape[-1]
    rows = rows_of(weight, span.start // (size * width), source.spec.numel // width)
    match op:
        case Dequantise():
            return copied_as(weight.dtype, rows)
        case LoraDelta() | DoraDelta():
            return replace(op, source=rows)
        case _:
            raise AssertionError(f"{type(op).__name__} on a quantised weight")


def kept_afresh(op: Quantise[Computed]) -> DeltaRetention:
    """Return how much of ΔW is left once W + ΔW is quantised, in a sample of the weight's blocks; nothing for NaN and Inf.

    Raises `CorruptFile` or `SourceChanged` for a file that cannot be read.
    """
    import numpy as np  # for few plans

    total = DeltaRetention()
    for first, last in _sampled(op.encoding):
        meant = _flat(op.encoding, first, last, lambda row, rows: made_rows(op.made, row, rows))
        before = _stored(op.encoding, first, last, op.weight)
        base = _stored(op.encoding, first, last, dequantised(op.encoding))
        if not np.isfinite(meant).all():
            return DeltaRetention()  # refused by name when it is written
        delta, effect = meant - before, _quantised(op.encoding, meant, op.dtype) - base
        total += DeltaRetention(
            meant=float(np.vdot(delta, delta)),
            written=float(np.vdot(effect, effect)),
            shared=float(np.vdot(delta, effect)),
        )
    return total


def _require_same(encoding: Blockwise, weight: StoredTensor, model: ModelDir) -> None:
    import numpy as np  # for few plans

    rounding = apart = size = 0.0
    dtype = rounded_to(encoding, weight)
    for first, last in _sampled(encoding):
        base = _stored(encoding, first, last, dequantised(encoding))
        values = _stored(encoding, first, last, weight)
        again = _quantised(encoding, values, dtype, first)
        rounding += float(np.vdot(base - values, base - values))
        apart += float(np.vdot(base - again, base - again))
        size += float(np.vdot(base, base))
    if not apart <= _APART**2 * rounding:
        share = (apart / size) ** 0.5 if size else float("inf")
        raise IncompatibleBase(
            f"{model.root}: `{encoding.spec.name}`, quantised as {encoding}, is {share:.1%} away from that of "
            f"{encoding.codes.path.parent}, which was made from another model",
            hint="`original` is the 16-bit model that the base was quantised from; leave it out to round W + ΔW of the base",
        )


def _sampled(encoding: Blockwise) -> Iterator[tuple[int, int]]:
    """Yield some blocks from everywhere, first and last."""
    blocks, some = blocks_of(encoding), max(1, SAMPLED_ROWS * encoding.spec.shape[-1] // block_of(encoding))
    for place in range(PLACES):
        first = min(blocks * (2 * place + 1) // (2 * PLACES), blocks - 1)
        yield first, min(first + some, blocks)


def _stored(encoding: Blockwise, first: int, last: int, tensor: StoredTensor) -> Values:
    return _flat(encoding, first, last, lambda row, rows: numbers(rows_of(tensor, row, rows)))


def _flat(encoding: Blockwise, first: int, last: int, rows_at: Callable[[int, int], Values]) -> Values:
    """Return the values in these blocks, flat, of what gives rows, so many from one."""
    top, bottom, part = rows_around(encoding, first, last)
    return rows_at(top, bottom - top).reshape(-1)[part]


def _quantised(encoding: Blockwise, values: Values, dtype: DType, first: int | None = None) -> NDArray[np.float32]:
    """Return what values stand for once they are quantised.

    Scales that are quantised themselves take the base's mean and scales where `values` are those of the blocks from
    `first`, else they stay as they are: an outlier moves the mean so far that the scales of small blocks are much off.
    """
    from lora_tool.formats.quantised.arrays import STORED
    from lora_tool.formats.quantised.fresh import as_nested, numbers_of, scales_of_blocks  # for few plans

    narrow = values.astype("<f4").astype(STORED[dtype]).astype("<f4")
    scales = scales_of_blocks(encoding, narrow)
    stored = None
    if first is not None and isinstance(encoding, Bnb4) and isinstance(encoding.scales, NestedScales):
        stored = as_nested(encoding.scales, scales, first, raw)
    return numbers_of(encoding, narrow, scales, raw, stored)
