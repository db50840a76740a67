"""Comparing the tensors of a folder with the plan that should have made them, in parallel and in bounded memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from msgspec import Struct, field

from lora_tool.core.machine import available_cores, batches_of_bytes, ieee_arithmetic
from lora_tool.core.progress import Progress
from lora_tool.core.tensors import TensorTable
from lora_tool.plans.core.ops import Precision
from lora_tool.plans.core.requantise import Requantise
from lora_tool.plans.core.steps import Step
from lora_tool.rules.merged.evidence import TensorEvidence
from lora_tool.verification.copied import Copies
from lora_tool.verification.pieces import (
    Compared,
    Rows,
    Stretch,
    batched,
    parts_of,
    row_blocks,
    sampled_columns,
    sampled_rows,
    sampled_stretches,
    stretches,
    why_not,
)
from lora_tool.verification.tally import CannotTellError, Tally
from lora_tool.verification.verified import Level, evidence_of

if TYPE_CHECKING:
    from lora_tool.verification.recomputing import Recomputing

_PIECES = 16
"""Blocks or stretches of one look: enough that handing it out costs nothing."""
_TOGETHER_BYTES = 1 << 20
"""Copies that one call compares: samples of a hundred tensors."""


class _Look(Struct, frozen=True, kw_only=True):
    """Some of the comparison of a part: ranges of rows or columns to recompute, or stretches of bytes."""

    part: Compared
    seen: Tally
    """What all looks at the part have seen."""
    rows: Sequence[Rows] = ()
    columns: Sequence[int] = ()
    stretches: Sequence[Stretch] = ()

    @property
    def nbytes(self) -> int:
        """Bytes to compare; what is recomputed is worth a thread by itself."""
        return sum(nbytes for _, nbytes in self.stretches) if self.stretches else _TOGETHER_BYTES


def check_steps(
    steps: Iterable[Step],
    tensors: TensorTable,
    *,
    level: Level,
    precision: Precision | None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> dict[str, TensorEvidence]:
    """Return the evidence of every planned tensor that `tensors` has with the planned shape.

    `precision` is the arithmetic that made them, None where that is not known: then what 16-bit arithmetic explains is
    right, too. Raises `SourceChanged` or OSError where a file cannot be read to its end.
    """
    seen = [
        (step, [(part, Tally()) for part in parts]) for step in steps if (parts := _parts(step, tensors)) is not None
    ]
    looks = [look for _, parts in seen for part, tally in parts for look in _looks(part, tally, level)]
    with contextlib.ExitStack() as opened, ieee_arithmetic():
        recomputing = None
        if not all(look.stretches for look in looks):
            from lora_tool.verification.recomputing import Recomputing  # numpy, not for copies

            recomputing = opened.enter_context(Recomputing(precision))
        checking = _Checking(
            copies=opened.enter_context(Copies()), recomputing=recomputing, progress=progress or (lambda _: None)
        )
        checking.all(looks, jobs or available_cores())
        return {step.out.name: evidence_of(step, parts) for step, parts in seen}


def _parts(step: Step, tensors: TensorTable) -> tuple[Compared, ...] | None:
    """Return what is compared of a step's output; None where it is not there as it was planned, which rules say."""
    stored = tensors.get(step.out.name)
    if stored is None or stored.shape != step.out.shape or stored.dtype.is_float != step.out.dtype.is_float:
        return None
    if isinstance(step.op, Requantise):
        from lora_tool.verification.requantised import coded_parts  # only for quantised weights

        return coded_parts(step.op, stored, tensors)
    return parts_of(step, stored)


def _looks(part: Compared, seen: Tally, level: Level) -> Iterator[_Look]:
    if isinstance(part.op, Requantise):
        from lora_tool.verification.requantised import scale_rows  # only for quantised weights

        for tiles in batched(scale_rows(part, all_of_them=level is Level.FULL), _PIECES):
            yield _Look(part=part, seen=seen, rows=tiles)
    elif part.copied or (why_not(part.op) is not None and part.of_one_size):
        found = stretches(part.stored) if level is Level.FULL else sampled_stretches(part.stored)
        for some in batched(list(found), _PIECES):
            yield _Look(part=part, seen=seen, stretches=some)
    elif level is Level.SAMPLE and (columns := sampled_columns(part.stored, part.op)):
        yield _Look(part=part, seen=seen, columns=columns)
    elif why_not(part.op) is None and part.stored.spec.numel:
        rows = list(row_blocks(part.stored) if level is Level.FULL else sampled_rows(part.stored, part.op))
        # once, not once per look: the norms of DoRA on a weight stored [in, out] take a pass over all of it, and an
        # init is a decomposition of all of it
        for blocks in [rows] if part.op.needs_all_rows else batched(rows, _PIECES):
            yield _Look(part=part, seen=seen, rows=blocks)


class _Checking(Struct, frozen=True, kw_only=True):
    """What the threads that compare one folder share."""

    copies: Copies
    recomputing: Recomputing | None
    """None where all are copies."""
    progress: Progress
    stop: threading.Event = field(default_factory=threading.Event)

    def all(self, looks: Sequence[_Look], jobs: int) -> None:
        """Carry out every look and add what it saw to the tally of its part. Raises the first error."""
        batches = batches_of_bytes(looks, _TOGETHER_BYTES)
        with ThreadPoolExecutor(jobs) as workers:
            try:
                for done, batch in [(workers.submit(self._look_at_each, batch), batch) for batch in batches]:
                    for look, tally in zip(batch, done.result(), strict=True):
                        look.seen.add(tally)
            except BaseException:
                self.stop.set()
                workers.shutdown(wait=False, cancel_futures=True)
                raise

    @ieee_arithmetic()  # a subnormal weight taken for zero would be found wrong
    def _look_at_each(self, looks: Sequence[_Look]) -> list[Tally]:
        copied = [(look.part, look.stretches) for look in looks if look.stretches]
        compared = [self.copies.look(part, some) for part, some in copied]
        self.progress(sum(_nbytes(tally, part) for tally, (part, _) in zip(compared, copied, strict=True)))
        found = iter(compared)
        return [next(found) if look.stretches else self._recomputed(look) for look in looks]

    def _recomputed(self, look: _Look) -> Tally:
        if self.recomputing is None:
            raise AssertionError("nothing but copies was expected")
        tally = Tally()
        try:
            for block in self.recomputing.tallies(look.part, look.rows, look.columns):
                tally.add(block)
                if self.stop.is_set():
                    break
                self.progress(_nbytes(block, look.part))
        except CannotTellError as why:
            # nothing is known but whether it is still its source
            tally = self.copies.look(look.part, stretches(look.part.stored) if look.part.of_one_size else ())
            tally.unknown = str(why)
        return tally


def _nbytes(tally: Tally, part: Compared) -> int:
    """Return the bytes that were compared."""
    return tally.compared * part.stored.dtype.bits // 8
