"""Comparing the tensors of a folder with the plan that should have made them, in parallel and in bounded memory.

A folder that was just written needs no manifest for it, and nothing that only `verify` has to find.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter, itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from msgspec import Struct, field

from lora_tool.checkpoints import MERGED_MODEL, ModelDir, open_model
from lora_tool.checkpoints.folders import read_folder
from lora_tool.core.machine import available_cores, batches_of_bytes, ieee_arithmetic
from lora_tool.core.progress import Progress
from lora_tool.core.tensors import TensorTable
from lora_tool.formats import model_config
from lora_tool.formats.weights import Weights, read_single
from lora_tool.plans.core.ops import Precision
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.requantise import Requantise
from lora_tool.plans.core.steps import Shard, Step
from lora_tool.rules.engine.registry import chosen
from lora_tool.rules.merged.evidence import TensorEvidence
from lora_tool.rules.merged.subject import MergedSubject
from lora_tool.verification.copied import Copies
from lora_tool.verification.levels import Level, evidence_of
from lora_tool.verification.pieces import (
    CannotTellError,
    Compared,
    Rows,
    Stretch,
    Tally,
    batched,
    parts_of,
    row_blocks,
    sampled_columns,
    sampled_rows,
    sampled_stretches,
    stretches,
    why_not,
)
from lora_tool.verification.verified import OWN_RULES, Verification, by_rules

if TYPE_CHECKING:
    from lora_tool.verification.counting import Recomputing

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
        return sum(map(itemgetter(1), self.stretches)) if self.stretches else _TOGETHER_BYTES


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
    seen: list[tuple[Step, list[tuple[Compared, Tally]]]] = []
    looks: list[_Look] = []
    for step in steps:
        parts = [(part, Tally()) for part in _parts(step, tensors)]
        for part, tally in parts:
            looks += _looks(part, tally, level)
        if parts:
            seen.append((step, parts))
    with contextlib.ExitStack() as opened, ieee_arithmetic():
        second = None
        if not all(map(attrgetter("stretches"), looks)):
            from lora_tool.verification.counting import recomputing  # numpy, not for copies

            second = opened.enter_context(recomputing(precision))
        copies = opened.enter_context(Copies())
        checking = _Checking(copies=copies, recomputing=second, progress=progress or (lambda _: None))
        checking.all(looks, jobs or available_cores())
        return {step.out.name: evidence_of(step, parts) for step, parts in seen}


def _parts(step: Step, tensors: TensorTable) -> tuple[Compared, ...]:
    """Return what is compared of a step's output; nothing where it is not there as it was planned, which rules say."""
    stored = tensors.get(step.out.name)
    if stored is None or stored.shape != step.out.shape or stored.dtype.is_float != step.out.dtype.is_float:
        return ()
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
        tallies, copied = [], 0
        for look in looks:
            if look.stretches:
                tallies.append(self.copies.look(look.part, look.stretches))
                copied += _nbytes(tallies[-1], look.part)
            else:
                tallies.append(self._recomputed(look))
        self.progress(copied)
        return tallies

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


# Reading a folder back that was just written.


def check_written(
    plan: Plan,
    folder: Path,
    *,
    jobs: int | None = None,
    seen: Mapping[str, TensorEvidence] = MappingProxyType({}),
) -> Verification:
    """Return what samples of the `folder` that `plan` was just carried out in are, read back from the disk.

    `seen` is what `check_file` has returned for some of its files: their values are not read again.
    """
    written = _written(plan, folder)
    unseen = (step for step in plan.steps if step.out.name not in seen)
    found = {**seen, **check_steps(unseen, written.tensors, level=Level.SAMPLE, precision=plan.precision, jobs=jobs)}
    evidence = {step.out.name: found[step.out.name] for step in plan.steps if step.out.name in found}
    subject = MergedSubject(checkpoint=written, planned=plan.expected, evidence=evidence, recomputed=True)
    return by_rules(subject, chosen(OWN_RULES), Level.SAMPLE, plan.precision)


def check_file(plan: Plan, folder: Path, shard: Shard, *, jobs: int | None = None) -> dict[str, TensorEvidence]:
    """Return the evidence of sampled values of a file of the `folder` that `plan` is being carried out in.

    Codes whose scales are in another file are left to `check_written`, and so is what is not there as it was planned.
    Raises as `check_steps`.
    """
    tensors = read_single(folder / shard.filename).tensors
    return check_steps(shard.steps, tensors, level=Level.SAMPLE, precision=plan.precision, jobs=jobs)


def _written(plan: Plan, folder: Path) -> ModelDir:
    """Return the folder as a model; the weight files alone where the plan writes an adapter or a state dict."""
    if any(file.filename == model_config.FILE_NAME for file in plan.side_files):
        return open_model(folder)
    found = [read_single(folder / shard.filename) for shard in plan.shards]
    weights = Weights(
        files=tuple(file for each in found for file in each.files),
        tensors={name: tensor for each in found for name, tensor in each.tensors.items()},
        problems=tuple(problem for each in found for problem in each.problems),
    )
    return ModelDir(
        kind=MERGED_MODEL, folder=read_folder(folder), config=None, weights=weights, problems=weights.problems
    )
