"""LT605 to LT612, LT614, LT618 to LT620, LT625 to LT627: what a merged model's values and answers are, by the evidence of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lora_tool.actions import TensorAction, Verdict
from lora_tool.report import Severity
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.merged.subject import MergedSubject

if TYPE_CHECKING:
    from lora_tool.rules.merged.evidence import TensorEvidence

_COMPARED = frozenset({Need.WEIGHTS, Need.COMPARED})
_RECOMPUTED = frozenset({Need.WEIGHTS, Need.RECOMPUTED})
_SAME = 0.02
"""Relative distance within which a factor is one that has a name."""
_TWICE = 2.0
_MOSTLY_LOST = 0.5


def _fault(subject: MergedSubject, found: TensorEvidence, message: str, severity: Severity | None = None) -> Fault:
    tensor = subject.tensors[found.name]
    return Fault(subject=found.name, message=message, path=str(tensor.path), severity=severity)


def _amount(found: TensorEvidence) -> str:
    """Return how many values are wrong and how far they are off, in words."""
    of = "" if found.whole else f" of a sample from {found.numel:,}"
    at = "" if found.first is None else f", the first at {found.first:,}"
    distance = "" if found.distance is None else f"; {found.distance:.3g} of ΔW away from W + ΔW"
    return f"{found.wrong:,} of {found.compared:,} values{of} are others{at}{distance}"


@rule("LT605", Severity.ERROR, on=MergedSubject, needs=_COMPARED)
def untouched_tensor_changed(subject: MergedSubject) -> Iterator[Fault]:
    """A tensor that the adapter leaves alone is not the base's.

    What it does: Compares the bytes of every tensor that the adapter does not change with the base's.

    Why it matters: The merge broke it, the file was damaged, or something else was mixed in.

    Example: A norm of layer 3 differs in one value after a copy over a bad network.

    What to do: Merge again; if it happens again, check the disk and the memory.
    """
    if subject.another_base:
        return
    for found in subject.kept():
        if found.verdict is Verdict.DIFFERENT:
            weight = subject.quantised_parts.get(found.name)
            part = (
                f"; it is a part of `{weight}`, which the adapter leaves alone: it was quantised again"
                if weight
                else ""
            )
            yield _fault(subject, found, f"is not its source's: {_amount(found)}{part}")


@rule("LT606", Severity.ERROR, on=MergedSubject, needs=_COMPARED)
def targeted_tensor_unchanged(subject: MergedSubject) -> Iterator[Fault]:
    """A tensor that the adapter changes is as in the base.

    What it does: Looks for tensors that have LoRA, or trained rows, and are still the base's.

    Why it matters: Part of the adapter was dropped without a word: the model behaves like neither.

    Example: The `gate_proj` of every expert, because the merge knew only their fused names.

    What to do: Merge again with `lora-tool merge`, which refuses what it cannot place.
    """
    if subject.carries_nothing:
        return
    for found in subject.merged():
        if found.verdict is Verdict.UNCHANGED:
            sure = subject.recomputed
            message = "is the base's: the adapter is not in it"
            if not sure:
                message = "is the base's, as far as it was read; lora-tool verify computes what it should be"
            yield _fault(subject, found, message, severity=None if sure else Severity.WARNING)


@rule("LT607", Severity.ERROR, on=MergedSubject, needs=_COMPARED)
def no_tensor_carries_the_adapter(subject: MergedSubject) -> Iterator[Fault]:
    """The merged model is its base: no tensor carries the adapter.

    What it does: Looks whether every tensor that the adapter changes is still the base's.

    Why it matters: It is the base under another name. Everything that is measured on it is measured on the base.

    Example: A wrong prefix made PEFT ignore every tensor of the adapter; `merge_and_unload` then merged nothing.

    What to do: Check the adapter's names with `lora-tool validate ADAPTER --base BASE`, and merge again.
    """
    if subject.carries_nothing:
        count = sum(1 for _ in subject.merged())
        yield Fault(message=f"none of the {count} tensors that the adapter changes differs from the base's")


@rule("LT608", Severity.ERROR, on=MergedSubject, needs=_RECOMPUTED)
def not_the_sum(subject: MergedSubject) -> Iterator[Fault]:
    """A merged tensor is not W + ΔW.

    What it does: Computes W + scaling·(B·A) again, in float64 and by other code than the merge's, and compares every
    value with a bound that is derived from the arithmetic: half a unit in the last place, and what float32 sums may be
    off by. Where it is not known who merged, all that 16-bit arithmetic explains is right, too.

    Why it matters: The weights are not those that were trained.

    Example: A worker died and left a block of rows as zeros.

    What to do: Merge again; if it happens again, check the disk and the memory.
    """
    broken = {Verdict.DIFFERENT} if subject.another_adapter else {Verdict.DIFFERENT, Verdict.UNRELATED}
    for found in subject.merged():
        if found.verdict in broken:
            yield _fault(subject, found, f"is not W + ΔW: {_amount(found)}")


@rule("LT609", Severity.ERROR, on=MergedSubject, needs=_RECOMPUTED)
def merged_twice(subject: MergedSubject) -> Iterator[Fault]:
    """The adapter was merged twice.

    What it does: Projects W' - W on ΔW: the factor is 1 for a merge, and 2 for one done again on its own result.

    Why it matters: The model went as far again in the direction that was trained. It still talks, so nobody notices.

    Example: A merge script that ran again on the folder it had written; LoRA on both ends of tied embeddings.

    What to do: Merge once, into the base that was trained on. `lora-tool merge` refuses the same adapter twice.
    """
    for found in subject.merged():
        if found.verdict is Verdict.SCALED and _near(found.factor, _TWICE):
            yield _fault(subject, found, f"is W + {found.factor:.3f}·ΔW: the adapter is in it twice")


@rule("LT610", Severity.ERROR, on=MergedSubject, needs=_RECOMPUTED)
def other_scaling(subject: MergedSubject) -> Iterator[Fault]:
    """The adapter was merged with another scaling.

    What it does: Projects W' - W on ΔW, and names the factor where it is neither 1 nor 2 and explains the values.

    Why it matters: The adapter has too much or too little weight: `lora_alpha / r` forgotten, rsLoRA's √r forgotten or
    applied twice, or the delta subtracted.

    Example: W' - W is ΔW / 2: `lora_alpha` is 16, `r` is 8, and the merge left the scaling of 2 out.

    What to do: Merge again; the scaling is `lora_alpha / r`, with `use_rslora` `lora_alpha / √r`.
    """
    for found in subject.merged():
        if found.verdict is Verdict.SCALED and not _near(found.factor, _TWICE):
            yield _fault(subject, found, f"is W + {found.factor:.3f}·ΔW{_cause(found)}")


def _near(factor: float | None, target: float) -> bool:
    return factor is not None and abs(factor - target) <= _SAME * abs(target)


def _cause(found: TensorEvidence) -> str:
    causes = [(-1.0, "the delta was subtracted")]
    if found.scaling:
        causes.append((1 / found.scaling, f"the scaling of {found.scaling:g} was left out"))
        causes.append((found.scaling, f"the scaling of {found.scaling:g} was applied twice"))
    if found.rank:
        root = math.sqrt(found.rank)
        causes += [(root, f"rsLoRA's √{found.rank}, which this adapter does not use")]
        causes += [(1 / root, f"rsLoRA's √{found.rank} was left out")]
    named = next((cause for factor, cause in causes if _near(found.factor, factor)), None)
    return f": {named}" if named else ""


@rule("LT611", Severity.ERROR, on=MergedSubject, needs=_RECOMPUTED)
def merged_transposed(subject: MergedSubject) -> Iterator[Fault]:
    """The adapter was merged transposed.

    What it does: Compares W' - W with ΔWᵀ where W is square, so that the shape does not show it.

    Why it matters: The change acts on the wrong sides of the layer: noise of the right size.

    Example: GPT-2's square `c_proj`, stored [in, out], merged as if it were [out, in].

    What to do: Merge again; `fan_in_fan_out` in `adapter_config.json` says how PEFT trained it.
    """
    for found in subject.merged():
        if found.verdict is Verdict.TRANSPOSED:
            yield _fault(subject, found, "is W + ΔWᵀ")


@rule("LT612", Severity.ERROR, on=MergedSubject, needs=_RECOMPUTED)
def carries_another_adapter(subject: MergedSubject) -> Iterator[Fault]:
    """The weights carry another adapter.

    What it does: Looks whether every tensor that this adapter changes was changed, each in another direction.

    Why it matters: The model is not the one that was trained in this run.

    Example: `checkpoint-500` was merged, and the folder is kept beside the adapter of `checkpoint-1000`.

    What to do: Find the adapter it was merged with, `lora-tool verify MERGED --adapter ADAPTER`, or merge again.
    """
    if subject.another_adapter:
        merged = tuple(subject.merged())
        largest = max(abs(found.cosine or 0.0) for found in merged)
        message = f"all {len(merged)} tensors changed, none in this adapter's direction: largest cosine {largest:.2f}"
        yield Fault(message=message)


@rule("LT614", Severity.ERROR, on=MergedSubject, needs=_COMPARED)
def saved_tensor_is_not_the_adapters(subject: MergedSubject) -> Iterator[Fault]:
    """A tensor that the adapter brings whole is not the adapter's.

    What it does: Compares heads and other tensors that were trained whole (`modules_to_save`, biases) with the
    adapter's, rounded to the model's type.

    Why it matters: A score head that is not the trained one gives rewards that mean nothing.

    Example: `score.weight` was initialised anew when the base was loaded, and the adapter's was never put there.

    What to do: Merge again: `lora-tool merge --rm ADAPTER` for a reward model.
    """
    for found in subject.evidence.values():
        if found.action in (TensorAction.REPLACED, TensorAction.ADDED) and found.verdict in (
            Verdict.DIFFERENT,
            Verdict.UNCHANGED,
        ):
            yield _fault(subject, found, f"should be the trained one: {_amount(found)}")


@rule("LT626", Severity.ERROR, on=MergedSubject, needs=_RECOMPUTED)
def not_what_its_inputs_give(subject: MergedSubject) -> Iterator[Fault]:
    """A computed adapter is not what its inputs give.

    What it does: Compares ΔW of every module of an adapter that `combine`, `resize` or `prepare` wrote with the weighted
    sum of its inputs, by QR in float64, where it was written by Gram matrices: no farther than the best approximation of
    its rank, and what rounding explains. Of one that `extract` wrote, ΔW is compared with the difference of the two
    models. Right after writing, samples of both factors are computed again, too.

    Why it matters: The adapter does something else than the adapters that it claims to be made of.

    Example: The file was cut and padded by a bad copy, or edited after it was written.

    What to do: Write it again, into a new folder.
    """
    for found in subject.evidence.values():
        if found.action is TensorAction.COMPUTED and found.verdict in (Verdict.DIFFERENT, Verdict.UNCHANGED):
            yield _fault(subject, found, found.reason or f"is not what its inputs give: {_amount(found)}")


@rule("LT627", Severity.ERROR, on=MergedSubject, needs=_RECOMPUTED)
def quantised_base_misread(subject: MergedSubject) -> Iterator[Fault]:
    """A quantised weight of the base was read wrongly.

    What it does: Computes what a tensor that is not W + ΔW would be, had the base's quantised weight been read in one of
    the ways that are known to go wrong: scales left out, or divided by; the two halves of each byte swapped; codes with
    an offset taken for two's complement; tiles inferred from the shapes; zero points left out; gate and up not
    interleaved. It names the one that gives the values.

    Why it matters: The shapes are right and the model loads. It runs on other weights than were trained.

    Example: `merge_and_unload` on codes of FP8 adds ΔW to the codes: without their scales the weights are thousands of
    times too large.

    What to do: Merge again: `lora-tool merge ADAPTER --base QUANTISED` decodes every format as its library does.
    """
    for found in subject.evidence.values():
        if found.verdict is Verdict.MISREAD:
            yield _fault(subject, found, found.reason)


@rule("LT618", Severity.ERROR, on=MergedSubject, needs=_COMPARED)
def merged_into_another_base(subject: MergedSubject) -> Iterator[Fault]:
    """Most of the tensors that the adapter leaves alone are not this base's.

    What it does: Counts the tensors outside the adapter that differ from the base's.

    Why it matters: The model was merged into another base: another version of it, or its instruct model.

    Example: An adapter trained on `Qwen2.5-7B` was merged into `Qwen2.5-7B-Instruct`: all shapes are equal.

    What to do: Give the base that it was merged into, `--base`; if that is not the one it was trained on, merge again.
    """
    if subject.another_base:
        kept = tuple(subject.kept())
        other = [found for found in kept if found.verdict is not Verdict.RIGHT]
        base = f" {subject.base_name}" if subject.base_name else ""
        message = f"{len(other)} of {len(kept)} tensors that the adapter leaves alone differ from the base's{base}"
        yield Fault(message=f"{message}, the first is `{other[0].name}`")


@rule("LT619", Severity.WARNING, on=MergedSubject, needs=_RECOMPUTED)
def lost_in_rounding(subject: MergedSubject) -> Iterator[Fault]:
    """Most of the adapter is lost in rounding.

    What it does: Measures how much of ΔW is in the stored W' - W: the cosine between the two, over all merged tensors.

    Why it matters: A change smaller than half a unit in the last place of a 16-bit weight rounds away. The merge is
    right, and yet has less of the training than the adapter. Small learning rates in RL and DPO end there.

    Example: ΔW is a thousandth of W in bfloat16: 16% of the values move at all.

    What to do: Merge with `--dtype float32`, or serve the adapter unmerged.
    """
    merged = [found for found in subject.merged() if found.verdict is Verdict.RIGHT and found.distance is not None]
    poor = [found for found in merged if (found.cosine or 0.0) < _MOSTLY_LOST]
    if poor and 2 * len(poor) >= len(merged):
        still = sum(found.unmoved for found in poor)
        typical = sorted(found.cosine or 0.0 for found in poor)[len(poor) // 2]
        unmoved = f", {still} did not change at all" if still else ""
        message = (
            f"{len(poor)} of {len(merged)} merged tensors hold little of ΔW (typical cosine {typical:.2f}){unmoved}"
        )
        yield Fault(message=message)


@rule("LT620", Severity.ERROR, on=MergedSubject, needs=frozenset({Need.OUTPUTS}))
def other_answers(subject: MergedSubject) -> Iterator[Fault]:
    """The merged model answers otherwise than its base with the adapter.

    What it does: Asks both the same, in float32, and compares logits or rewards. What rounding the weights explains is
    measured: a third run moves each changed weight at random by up to half an ulp. `lora-tool verify --logits`.

    Why it matters: The tensors may each be what the plan says, and the model another all the same: another config, a
    tensor under a name that nothing loads, ends that are tied again on loading.

    Example: LoRA on `lm_head` merged into embeddings that `config.json` ties.

    What to do: Look at the other findings first; serve the adapter unmerged until it is clear.
    """
    found = subject.outputs
    if found is None or found.explained:
        return
    message = (
        f"{found.what} differ by {found.largest:.3g} at most and {found.mean:.3g} on average; rounding the weights "
        f"explains {found.allowed_largest:.3g} and {found.allowed_mean:.3g}"
    )
    yield Fault(message=message)


@rule("LT625", Severity.ERROR, on=MergedSubject, needs=frozenset({Need.PAIRS}))
def ranks_too_few_right(subject: MergedSubject) -> Iterator[Fault]:
    """The merged model ranks fewer pairs right than was asked.

    What it does: Counts the pairs whose chosen text gets the higher reward, a tie as half, and compares their share
    with `--min-accuracy`. `lora-tool verify --pairs FILE --min-accuracy 0.7`, and so in `ci`.

    Why it matters: Every tensor may be right, and the model not worth its training.

    Example: A reward model that was trained on swapped columns ranks 0.3 of 200 held-out pairs right.

    What to do: Where base + adapter rank better than the merged model, look at the other findings; else train longer,
    or look at the data: `chosen`, `rejected`, and the chat template.
    """
    found = subject.pairs
    if found is None or found.enough:
        return
    low, high = found.merged.interval
    before = "" if found.unmerged is None else f"; base + adapter {found.unmerged.accuracy:.3f}"
    message = (
        f"ranks {found.merged.accuracy:.3f} of the {len(found.lines):,} pairs in {found.source} right (95% interval "
        f"{low:.3f} to {high:.3f}), expected at least {found.least:g}{before}"
    )
    yield Fault(message=message)
