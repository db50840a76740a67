"""LT605 to LT612, LT614, LT618 to LT620, LT625 to LT627: faults in a merged model's values and answers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lora_tool.core.report import Severity
from lora_tool.core.tensors import TensorAction
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import Matter
from lora_tool.rules.merged.evidence import MOSTLY_LOST, Verdict
from lora_tool.rules.merged.subject import MergedSubject

if TYPE_CHECKING:
    from lora_tool.rules.merged.evidence import TensorEvidence

_COMPARED = frozenset({Need.WEIGHTS, Need.COMPARED})
_RECOMPUTED = frozenset({Need.WEIGHTS, Need.RECOMPUTED})
_SAME = 0.02
"""Relative distance within which a factor is one that has a name."""
_TWICE = 2.0


def _fault(subject: MergedSubject, found: TensorEvidence, message: str, severity: Severity | None = None) -> Fault:
    tensor = subject.tensors.get(found.name)  # None of a config
    path = subject.checkpoint.root / found.name if tensor is None else tensor.path
    return Fault(subject=found.name, message=message, path=path, severity=severity)


def _amount(found: TensorEvidence) -> str:
    """Return how many values are wrong and how far they are off, in words."""
    of = "" if found.whole else f" of a sample from {found.numel:,}"
    at = "" if found.first is None else f", the first at {found.first:,}"
    distance = "" if found.distance is None else f"; {found.distance:.3g} of ΔW away from W + ΔW"
    return f"{found.wrong:,} of {found.compared:,} values{of} differ{at}{distance}"


@rule("LT605", Severity.ERROR, on=MergedSubject, needs=_COMPARED, about=Matter.DEVIATION)
def untouched_tensor_changed(subject: MergedSubject) -> Iterator[Fault]:
    """A tensor that the adapter does not change differs from the base's.

    What it does: Compares the bytes of every tensor that the adapter does not change with the base's.
    Why it matters: The merge broke it, the file was damaged, or it comes from another model.
    Example: A norm of layer 3 differs in one value after a copy over a bad network.
    What to do: Merge again; if it happens again, check the disk and the memory.
    """
    if subject.another_base:
        return
    for found in subject.kept():
        if found.verdict is Verdict.DIFFERENT:
            yield _fault(subject, found, f"differs from its source: {_amount(found)}{_as_part(subject, found)}")


def _as_part(subject: MergedSubject, found: TensorEvidence) -> str:
    weight = subject.quantised_parts.get(found.name)
    if weight is None:
        return ""
    if found.action is TensorAction.RESCALED and found.reason:
        return f"; {found.reason}"
    if found.action is TensorAction.RESCALED:
        return f"; scales of `{weight}` may only change with the largest value: no code is the largest there is"
    return f"; it is a part of `{weight}`, which the adapter leaves alone: it was quantised again"


@rule("LT606", Severity.ERROR, on=MergedSubject, needs=_COMPARED, about=Matter.DEVIATION)
def targeted_tensor_unchanged(subject: MergedSubject) -> Iterator[Fault]:
    """A tensor that the adapter should change equals the base's.

    What it does: Looks for tensors with LoRA or trained rows that still equal the base's.
    Why it matters: The merge silently dropped part of the adapter, so the model is neither the base nor the trained
    model.
    Example: The `gate_proj` of every expert is unchanged, because the merge knew only their fused names.
    What to do: Merge again with `lora-tool merge`, which refuses what it cannot place.
    """
    if subject.carries_nothing:
        return
    for found in subject.merged():
        if found.verdict is Verdict.UNCHANGED:
            sure = subject.recomputed
            message = "equals the base's: the adapter is not in it"
            if not sure:
                message = "equals the base's in the bytes that were read; lora-tool verify compares every value"
            yield _fault(subject, found, message, severity=None if sure else Severity.WARNING)


@rule("LT607", Severity.ERROR, on=MergedSubject, needs=_COMPARED, about=Matter.DEVIATION)
def no_tensor_carries_the_adapter(subject: MergedSubject) -> Iterator[Fault]:
    """The merged model equals its base: no tensor contains the adapter.

    What it does: Checks whether every tensor that the adapter should change still equals the base's.
    Why it matters: It is the base under another name: every measurement of it measures the base.
    Example: A wrong prefix made PEFT ignore every tensor of the adapter; `merge_and_unload` then merged nothing.
    What to do: Check the adapter's names with `lora-tool validate ADAPTER --base BASE`, and merge again.
    """
    if subject.carries_nothing:
        count = sum(1 for _ in subject.merged())
        yield Fault(message=f"none of the {count} tensors that the adapter should change differs from the base's")


@rule("LT608", Severity.ERROR, on=MergedSubject, needs=_RECOMPUTED, about=Matter.DEVIATION)
def not_the_sum(subject: MergedSubject) -> Iterator[Fault]:
    """A merged tensor is not W + ΔW.

    What it does: Computes W + scaling·(B·A) again, in float64 and with other code than the merge's, and compares every
    value within a bound derived from the arithmetic: half an ulp plus the error of float32 sums. If the program that
    merged is unknown, any error that 16-bit arithmetic explains is also accepted.
    Why it matters: The weights are not the trained ones.
    Example: A worker died and left a block of rows at zero.
    What to do: Merge again; if it happens again, check the disk and the memory.
    """
    broken = {Verdict.DIFFERENT} if subject.another_adapter else {Verdict.DIFFERENT, Verdict.UNRELATED}
    for found in subject.merged():
        if found.verdict in broken:
            yield _fault(subject, found, f"is not W + ΔW: {_amount(found)}")


@rule("LT609", Severity.ERROR, on=MergedSubject, needs=_RECOMPUTED, about=Matter.DEVIATION)
def merged_twice(subject: MergedSubject) -> Iterator[Fault]:
    """The adapter was merged twice.

    What it does: Projects W' - W on ΔW: the factor is 1 after one merge, and 2 after a second merge into the result.
    Why it matters: The trained change was applied twice. The model still produces fluent text, so the fault goes
    unnoticed.
    Example: A merge script ran again on the folder it had written; or both tied embeddings and output layer had LoRA.
    What to do: Merge once, into the base that the adapter was trained on. `lora-tool merge` refuses to merge an adapter
    twice.
    """
    for found in subject.merged():
        if found.verdict is Verdict.SCALED and _near(found.factor, _TWICE):
            yield _fault(subject, found, f"is W + {found.factor:.3f}·ΔW: the adapter was merged twice")


@rule("LT610", Severity.ERROR, on=MergedSubject, needs=_RECOMPUTED, about=Matter.DEVIATION)
def other_scaling(subject: MergedSubject) -> Iterator[Fault]:
    """The adapter was merged with the wrong scaling.

    What it does: Projects W' - W on ΔW, and reports the factor if it explains the values and is neither 1 nor 2.
    Why it matters: The adapter is too strong or too weak: the merge left out `lora_alpha / r`, left out rsLoRA's √r or
    applied it twice, or subtracted the delta.
    Example: W' - W is ΔW / 2: `lora_alpha` is 16, `r` is 8, and the merge left the scaling of 2 out.
    What to do: Merge again; the scaling is `lora_alpha / r`, or `lora_alpha / √r` with `use_rslora`.
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


@rule("LT611", Severity.ERROR, on=MergedSubject, needs=_RECOMPUTED, about=Matter.DEVIATION)
def merged_transposed(subject: MergedSubject) -> Iterator[Fault]:
    """The adapter was merged transposed.

    What it does: Compares W' - W with ΔWᵀ if W is square, because then the shape does not reveal the mistake.
    Why it matters: The change acts on the wrong sides of the layer, so it is noise of the right size.
    Example: GPT-2's square `c_proj`, stored as [in, out], was merged as if it were [out, in].
    What to do: Merge again; `fan_in_fan_out` in `adapter_config.json` says how PEFT trained it.
    """
    for found in subject.merged():
        if found.verdict is Verdict.TRANSPOSED:
            yield _fault(subject, found, "is W + ΔWᵀ")


@rule("LT612", Severity.ERROR, on=MergedSubject, needs=_RECOMPUTED, about=Matter.DEVIATION)
def carries_another_adapter(subject: MergedSubject) -> Iterator[Fault]:
    """The weights contain another adapter.

    What it does: Checks whether every tensor that this adapter changes was changed, but in another direction.
    Why it matters: The model is not the one that this run trained.
    Example: `checkpoint-500` was merged, but the folder is kept beside the adapter of `checkpoint-1000`.
    What to do: Compare it with the adapter that was merged, `lora-tool verify MERGED --adapter A`, or merge
    again.
    """
    if subject.another_adapter:
        merged = tuple(subject.merged())
        largest = max(abs(found.cosine or 0.0) for found in merged)
        message = (
            f"all {len(merged)} tensors changed, but none in this adapter's direction: the largest cosine is "
            f"{largest:.2f}"
        )
        yield Fault(message=message)


@rule("LT614", Severity.ERROR, on=MergedSubject, needs=_COMPARED, about=Matter.DEVIATION)
def saved_tensor_is_not_the_adapters(subject: MergedSubject) -> Iterator[Fault]:
    """A tensor that the adapter saved whole differs in the merged model.

    What it does: Compares heads and other tensors that were trained whole (`modules_to_save`, biases) with the
    adapter's, rounded to the model's dtype.
    Why it matters: A score head other than the trained one gives meaningless rewards.
    Example: Loading the base re-initialised `score.weight`, and the merge never copied the adapter's head.
    What to do: Merge again: `lora-tool merge --rm ADAPTER` for a reward model.
    """
    for found in subject.evidence.values():
        if found.action in (TensorAction.REPLACED, TensorAction.ADDED) and found.verdict in (
            Verdict.DIFFERENT,
            Verdict.UNCHANGED,
        ):
            yield _fault(subject, found, f"differs from the trained one: {_amount(found)}")


@rule("LT626", Severity.ERROR, on=MergedSubject, needs=_RECOMPUTED, about=Matter.DEVIATION)
def not_what_its_inputs_give(subject: MergedSubject) -> Iterator[Fault]:
    """A computed adapter does not match its inputs.

    What it does: Compares ΔW of every module of an adapter that `combine`, `resize` or `prepare` wrote with the
    weighted sum of its inputs. The writer uses Gram matrices, this check QR in float64; the distance may be that of the
    best approximation of its rank plus rounding. For `extract`, ΔW is compared with the difference of the two models.
    For `convert`, every module must have the scaled ΔW that it had before, expert by expert where experts were fused.
    Factors that only stand beside one another are compared value by value, and `adapter_config.json` with what was
    written, but for the name of the base.
    Right after writing, samples of both factors are computed again as well.
    Why it matters: The adapter does something else than the inputs that it was computed from.
    Example: The file was cut and padded by a bad copy, or edited after it was written.
    What to do: Run the command that computed it again, into a new folder.
    """
    for found in subject.evidence.values():
        if found.action is TensorAction.COMPUTED and found.verdict in (Verdict.DIFFERENT, Verdict.UNCHANGED):
            yield _fault(subject, found, found.reason or f"does not match its inputs: {_amount(found)}")


@rule("LT627", Severity.ERROR, on=MergedSubject, needs=_RECOMPUTED, about=Matter.DEVIATION)
def quantised_base_misread(subject: MergedSubject) -> Iterator[Fault]:
    """A quantised weight was read or stored without its scales.

    What it does: For a tensor that is not W + ΔW, computes what the base's quantised weight is without its scales, with
    and without its zero points, and compares that, and that plus ΔW, with the stored values. For weights that are
    stored quantised again, it checks whether ΔW was added to the codes, or W + ΔW was not divided by the scales.
    Why it matters: The shapes are right and the model loads, but its weights are not the trained ones.
    Example: `merge_and_unload` on codes of FP8 adds ΔW to the codes: without their scales the weights are thousands of
    times too large.
    What to do: Merge again: `lora-tool merge ADAPTER --base QUANTISED` decodes every format as its library does.
    """
    for found in subject.evidence.values():
        if found.verdict is Verdict.MISREAD:
            yield _fault(subject, found, found.reason)


@rule("LT618", Severity.ERROR, on=MergedSubject, needs=_COMPARED, about=Matter.DEVIATION)
def merged_into_another_base(subject: MergedSubject) -> Iterator[Fault]:
    """Most tensors that the adapter does not change differ from the base's.

    What it does: Counts the tensors that the adapter does not change but that differ from the base's.
    Why it matters: The adapter was merged into another base: another version of it, or its instruct model.
    Example: An adapter trained on `Qwen2.5-7B` was merged into `Qwen2.5-7B-Instruct`: all shapes are equal.
    What to do: Give the base that it was merged into: `--base MODEL`. If the adapter was not trained on that base,
    merge again.
    """
    if subject.another_base:
        kept = tuple(subject.kept())
        other = [found for found in kept if found.verdict is not Verdict.RIGHT]
        base = f" {subject.base_name}" if subject.base_name else ""
        message = f"{len(other)} of {len(kept)} tensors that the adapter does not change differ from the base's{base}"
        yield Fault(message=f"{message}; the first is `{other[0].name}`")


@rule("LT619", Severity.WARNING, on=MergedSubject, needs=_RECOMPUTED, about=Matter.DEVIATION)
def lost_in_rounding(subject: MergedSubject) -> Iterator[Fault]:
    """Rounding loses most of the adapter.

    What it does: Measures how much of ΔW remains in the stored W' - W: the cosine between the two, over all merged
    tensors.
    Why it matters: A change smaller than half an ulp of a 16-bit weight rounds to nothing. The merge is correct, but it
    contains less of the training than the adapter. Small learning rates in RL and DPO cause this.
    Example: ΔW is a thousandth of W in bfloat16, and only 16% of the values change.
    What to do: Merge with `--dtype float32`, or serve the adapter unmerged.
    """
    merged = [found for found in subject.merged() if found.verdict is Verdict.RIGHT and found.distance is not None]
    poor = [found for found in merged if (found.cosine or 0.0) < MOSTLY_LOST]
    if poor and 2 * len(poor) >= len(merged):
        still = sum(found.unmoved for found in poor)
        typical = sorted(found.cosine or 0.0 for found in poor)[len(poor) // 2]
        unmoved = f", and {still} did not change at all" if still else ""
        message = (
            f"{len(poor)} of {len(merged)} merged tensors contain little of ΔW (median cosine {typical:.2f}){unmoved}"
        )
        yield Fault(message=message)


@rule("LT620", Severity.ERROR, on=MergedSubject, needs=frozenset({Need.OUTPUTS}))
def other_answers(subject: MergedSubject) -> Iterator[Fault]:
    """The merged model's answers differ from those of base and adapter.

    What it does: `lora-tool verify --logits` runs both on the same inputs in float32 and compares logits or rewards. A
    third run, which moves each changed weight at random by up to half an ulp, measures how much rounding explains.
    Why it matters: Every tensor may be right and the model still wrong: through another config, a tensor under a name
    that is never loaded, or embeddings that are tied again on loading.
    Example: LoRA on `lm_head` was merged into embeddings that `config.json` ties.
    What to do: Look at the other findings first, and serve the adapter unmerged until the cause is found.
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
    """The merged model ranks fewer pairs correctly than required.

    What it does: `lora-tool verify --pairs FILE --min-accuracy 0.7` (or `ci` with the same options) counts the pairs
    whose chosen text gets the higher reward, a tie as half, and compares their share with the minimum.
    Why it matters: Every tensor may be right and the reward model still a poor judge.
    Example: A reward model trained on swapped columns ranks only 30% of 200 held-out pairs correctly.
    What to do: If base + adapter rank better than the merged model, look at the other findings. Otherwise train longer,
    or check the data: `chosen`, `rejected` and the chat template.
    """
    found = subject.pairs
    if found is None or found.enough:
        return
    low, high = found.merged.interval
    before = "" if found.unmerged is None else f"; base + adapter {found.unmerged.accuracy:.3f}"
    message = (
        f"ranks {found.merged.accuracy:.3f} of the {len(found.lines):,} pairs in {found.source} correctly (95% interval "
        f"{low:.3f} to {high:.3f}), expected at least {found.least:g}{before}"
    )
    yield Fault(message=message)
