"""Verifying a merged folder: every tensor against the plan of its merge, and the rules on what was seen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lora_tool.checkpoints import MERGED_MODEL, ModelDir
from lora_tool.core.engines import HERE, Spread
from lora_tool.core.errors import UnsupportedAdapter, require_packages
from lora_tool.core.progress import Progress, StageWatch, unwatched
from lora_tool.core.report import Skipped
from lora_tool.models.mapping.class_tensors import class_tensors
from lora_tool.plans.computed import ComputedInputs
from lora_tool.plans.core.ops import Precision
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.merge.provenance import Provenance
from lora_tool.rules.engine.registry import Need
from lora_tool.rules.engine.registry import chosen as chosen_rules
from lora_tool.rules.merged.evidence import Expected, TensorEvidence
from lora_tool.rules.merged.subject import ComputedAdapter, MergedSubject
from lora_tool.verification.checking import check_steps
from lora_tool.verification.computed import evidence_of_computed
from lora_tool.verification.levels import Level
from lora_tool.verification.pairs import Pairs
from lora_tool.verification.verified import OF_USE, OWN_RULES, Verification, by_rules


def verify_inputs(
    inputs: Provenance,
    *,
    level: Level | str = Level.FULL,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    logits: bool = False,
    prompts: Sequence[str] | None = None,
    pairs: Pairs | None = None,
    jobs: int | None = None,
    spread: Spread = HERE,
    watch: StageWatch = unwatched,
) -> Verification:
    """Return the result of comparing a merged model with the inputs that were found for it.

    `logits` runs both models on `prompts`, by default eight built-in ones; both reward models rank the `pairs`.
    """
    level = Level(level)
    rules = chosen_rules(select, ignore)
    if logits or pairs is not None:
        require_packages(("torch", "transformers", "peft"), extra="merge")  # before minutes of comparing
    plan, why_no_plan = inputs.plan_or_why_not()
    ranking = None
    if pairs is not None:
        from lora_tool.verification.rewards import prepare  # torch and transformers, only when requested

        ranking = prepare(inputs, plan, pairs)  # before the long work
    evidence: Mapping[str, TensorEvidence] = {}
    if plan is not None:
        seen = unwatched if level is Level.SAMPLE else watch
        with seen("comparing", inputs.merged.weights.nbytes) as bar:
            evidence = _compared(inputs, plan, level, spread, jobs=jobs, progress=bar)
    outputs, why_no_outputs = None, ""
    if logits:
        from lora_tool.verification.answers import ask  # torch and transformers, only when requested

        try:
            outputs = ask(inputs, plan, prompts=prompts)
        except UnsupportedAdapter as error:
            why_no_outputs = str(error)
    subject = MergedSubject(
        checkpoint=inputs.merged,
        ask=class_tensors,
        planned=None if plan is None else plan.expected,
        why_no_plan=why_no_plan,
        evidence=evidence,
        outputs=outputs,
        pairs=None if ranking is None else ranking(watch),
        recomputed=True,
        base_name=str(inputs.base.root),
        adapter_names=tuple(str(adapter.root) for adapter in inputs.adapters),
        inputs=inputs.fingerprints(),
    )
    skipped = (Skipped(code="LT620", path=str(inputs.merged.root), reason=why_no_outputs),) if why_no_outputs else ()
    return by_rules(subject, rules, level, inputs.precision, adapters=subject.adapter_names, skipped=skipped)


def _compared(
    inputs: Provenance, plan: Plan, level: Level, spread: Spread, *, jobs: int | None, progress: Progress
) -> Mapping[str, TensorEvidence]:
    """Return the evidence of every tensor of the plan, found by this machine or by the cluster that was asked for."""
    weights, precision = inputs.merged.weights, inputs.precision
    if spread.cluster is None:
        return check_steps(plan.steps, weights.tensors, level=level, precision=precision, jobs=jobs, progress=progress)
    from lora_tool.verification.on_cluster import check_on_cluster  # only where asked for

    return check_on_cluster(plan, weights, spread.cluster, level=level, precision=precision, progress=progress)


def verify_computed(
    inputs: ComputedInputs,
    *,
    level: Level | str = Level.FULL,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    jobs: int | None = None,
    watch: StageWatch = unwatched,
) -> Verification:
    """Return what a computed adapter, or a classifier, is, compared with what the inputs give that its manifest names.

    ΔW of every module is compared whole at either `level`; what was copied is compared byte by byte. Arguments are
    those of `verify`. Raises as `evidence_of_computed`.
    """
    level = Level(level)
    with watch("comparing", inputs.made.weights.nbytes) as bar:
        evidence = evidence_of_computed(inputs, level=level, jobs=jobs, progress=bar)
    made = inputs.made
    is_model = isinstance(made, ModelDir)
    subject = (MergedSubject if is_model else ComputedAdapter)(
        checkpoint=ModelDir(
            kind=MERGED_MODEL,
            folder=made.folder,
            config=made.config if isinstance(made, ModelDir) else None,
            weights=inputs.stored,
            problems=made.problems,
            manifest=inputs.manifest,
        ),
        planned=Expected(tensors=inputs.manifest.tensors or {}, files=()),
        evidence=evidence,
        recomputed=True,
        inputs=inputs.fingerprints(),
    )
    rules = (rule for rule in chosen_rules(select, ignore) if rule.code.startswith(OWN_RULES))
    rules = (rule for rule in rules if is_model or Need.CONFIG not in rule.needs)  # an adapter has no model's
    return by_rules(
        subject, tuple(rules), level, Precision.FLOAT64, adapters=tuple(str(each.root) for each in inputs.sources)
    )


def judged_alone(model: ModelDir, pairs: Pairs, *, ignore: Iterable[str], watch: StageWatch) -> Verification:
    """Return how a model that was not merged from anything ranks the `pairs`, by the rules that `ignore` leaves.

    `watch` is asked for the progress. Raises as `verification.rewards.rank_alone`.
    """
    from lora_tool.verification.rewards import rank_alone  # torch and transformers, only when requested

    subject = MergedSubject(checkpoint=model, planned=None, pairs=rank_alone(model, pairs, watch))
    return by_rules(subject, tuple(rule for rule in chosen_rules((), ignore) if rule.code in OF_USE), Level.FULL, None)
