"""What comparing a few KB of each tensor with its source tells of a merged model, without numpy and in milliseconds."""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.core.tensors import StoredTensor, TensorAction, TensorTable
from lora_tool.formats.stored import read_part
from lora_tool.models.mapping.class_tensors import class_tensors
from lora_tool.plans.core.ops import Assemble
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import Step
from lora_tool.plans.merge.provenance import Provenance
from lora_tool.rules.merged.evidence import TensorEvidence, Verdict
from lora_tool.rules.merged.subject import MergedSubject

_PIECE = 4096
_PIECES = 5
"""Pieces of `_PIECE` bytes that are compared, both ends among them."""
_NOT_RECOMPUTED = "only samples of its bytes were compared with the base's"


def merged_subject(provenance: Provenance, *, num_labels: int | None, task: str | None, read: bool) -> MergedSubject:
    """Return a merged model beside what it should be, with the evidence of its bytes unless `read` is False.

    Raises `IncompatibleBase` where base and adapter do not fit, `SourceChanged` where a file ends early.
    """
    plan, why_no_plan = provenance.plan_or_why_not()
    merged = provenance.merged
    return MergedSubject(
        checkpoint=merged,
        ask=class_tensors,
        num_labels=num_labels,
        task=task,
        planned=None if plan is None else plan.expected,
        why_no_plan=why_no_plan,
        evidence=_evidence(plan, merged.tensors) if plan is not None and read else {},
        base_name=str(provenance.base.root),
        adapter_names=tuple(str(adapter.root) for adapter in provenance.adapters),
        inputs=provenance.fingerprints(),
    )


def _evidence(plan: Plan, tensors: TensorTable) -> dict[str, TensorEvidence]:
    found = {}
    for step in plan.steps:
        stored = tensors.get(step.out.name)
        if stored is not None and stored.shape == step.out.shape:
            found[step.out.name] = _compared(step, stored)
    return found


def _compared(step: Step, stored: StoredTensor) -> TensorEvidence:
    source = step.op.source
    alike = not isinstance(step.op, Assemble) and source.dtype is stored.dtype and source.nbytes == stored.nbytes
    verdict, compared, wrong, first, reason = Verdict.UNKNOWN, 0, 0, None, _NOT_RECOMPUTED
    if alike:
        width = max(1, stored.dtype.bits // 8)
        for start, nbytes in _pieces(stored.nbytes):
            mine, theirs = read_part(stored, start, nbytes), read_part(source, start, nbytes)
            compared += nbytes // width
            if mine != theirs:
                others = {at // width for at in range(nbytes) if mine[at] != theirs[at]}
                wrong += len(others)
                first = start // width + min(others) if first is None else first
    if alike and step.op.is_copy:
        verdict, reason = (Verdict.DIFFERENT if wrong else Verdict.RIGHT), ""
    elif alike and not wrong and step.action is TensorAction.MERGED:
        verdict, reason = Verdict.UNCHANGED, ""
    return TensorEvidence(
        name=step.out.name,
        action=step.action,
        verdict=verdict,
        compared=compared,
        numel=stored.spec.numel,
        wrong=wrong if verdict is Verdict.DIFFERENT else 0,
        first=first if verdict is Verdict.DIFFERENT else None,
        unmoved=verdict is Verdict.UNCHANGED,
        reason=reason,
    )


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    if nbytes <= _PIECE * _PIECES:
        yield 0, nbytes
        return
    for at in range(_PIECES):
        yield (nbytes - _PIECE) * at // (_PIECES - 1) // _PIECE * _PIECE, _PIECE
