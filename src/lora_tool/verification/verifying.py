"""Verifying a merged folder: every tensor against the plan of its merge, and the rules on what was seen."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lora_tool.checkpoint import MERGED_MODEL, ModelDir
from lora_tool.cluster.spread import HERE, EngineName, Spread, spread_over
from lora_tool.errors import UnsupportedAdapter, require_packages
from lora_tool.plan.computed import ComputedInputs, find_computed
from lora_tool.plan.core.ops import Precision
from lora_tool.plan.core.plan import Plan
from lora_tool.plan.merge.provenance import Provenance, find_inputs
from lora_tool.progress import Progress, StageWatch, unwatched
from lora_tool.report import Finding, Skipped
from lora_tool.rules.engine.registry import Need
from lora_tool.rules.engine.registry import chosen as chosen_rules
from lora_tool.rules.merged.evidence import TensorEvidence
from lora_tool.rules.merged.expected import Expected
from lora_tool.rules.merged.subject import ComputedAdapter, MergedSubject
from lora_tool.sources import Reference
from lora_tool.verification.checking import Level, check_steps
from lora_tool.verification.computed import evidence_of_computed
from lora_tool.verification.pairs import Pairs, read_pairs
from lora_tool.verification.verified import OWN_RULES, Verification, by_rules

_OF_USE = frozenset({"LT625"})
"""What says how much a model is worth, whoever wrote it, and nothing of how it was written."""


def verify(
    merged: Reference,
    *,
    base: Reference | None = None,
    adapters: Sequence[Reference] = (),
    level: Level | str = Level.FULL,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    logits: bool = False,
    prompts: Sequence[str] | None = None,
    pairs: str | os.PathLike[str] | None = None,
    min_accuracy: float | None = None,
    jobs: int | None = None,
    engine: EngineName | str = EngineName.LOCAL,
    address: str | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    watch: StageWatch = unwatched,
) -> Verification:
    """Return what comparing the folder `merged` with `base` and `adapters`, by default those in its manifest, shows.

    An adapter that was
    computed from others is compared with their sum, by QR; options that run models do not apply to it.

    Copied tensors are compared byte by byte, merged ones with W + ΔW computed again in float64. Reads everything once
    (`level` "sample": a small part), writes nothing, runs no code of a checkpoint, and holds a few blocks per worker.
    `engine` "ray" has the tensors of a merged model compared by a running cluster: `address` is HOST:PORT, `workers` how
    many tasks it does at a time. `select` are the only rules to run, `ignore` the rules not to run; `jobs` are the
    workers, by default one per core, `progress` is called with the bytes that were read, and `watch` is asked for the
    progress of what takes long.

    With the extra `merge`: `logits` runs both models on `prompts`, by default eight built-in ones, and compares their
    answers. `pairs` is a file of JSON lines with `chosen` and `rejected`, and a `prompt` where they do not begin with
    it: both reward models rank them, `min_accuracy` is the share that the merged one must rank right.

    Raises `CheckpointError` for inputs that cannot be found or read, `IncompatibleBase` where they do not fit together,
    `MissingDependency` before anything is compared.
    """
    spread = spread_over(engine, address, workers)
    if (computed := find_computed(merged, adapters, base=base)) is not None:
        return verify_computed(
            computed, level=level, select=select, ignore=ignore, jobs=jobs, progress=progress, watch=watch
        )
    asked = None if pairs is None else read_pairs(Path(pairs), least=min_accuracy)
    inputs = find_inputs(merged, base=base, adapters=adapters)
    return verify_inputs(
        inputs,
        level=level,
        select=select,
        ignore=ignore,
        logits=logits,
        prompts=prompts,
        pairs=asked,
        jobs=jobs,
        spread=spread,
        progress=progress,
        watch=watch,
    )


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
    progress: Progress | None = None,
    watch: StageWatch = unwatched,
) -> Verification:
    """Return what `verify` returns, for inputs that were found."""
    level = Level(level)
    rules = chosen_rules(select, ignore)
    if logits or pairs is not None:
        require_packages(("torch", "transformers", "peft"), extra="merge")  # before minutes of comparing
    plan, why_no_plan = inputs.plan_or_why_not()
    ranking = None
    if pairs is not None:
        from lora_tool.verification.rewards import prepare  # torch and transformers, only where asked for

        ranking = prepare(inputs, plan, pairs)  # before the long work
    evidence: Mapping[str, TensorEvidence] = {}
    if plan is not None:
        seen = unwatched if level is Level.SAMPLE else watch
        with seen("comparing", inputs.merged.weights.nbytes) as bar:
            evidence = _compared(inputs, plan, level, spread, jobs=jobs, progress=progress or bar)
    outputs, why_no_outputs = None, ""
    if logits:
        from lora_tool.verification.answers import ask  # torch and transformers, only where asked for

        try:
            outputs = ask(inputs, plan, prompts=prompts)
        except UnsupportedAdapter as error:
            why_no_outputs = str(error)
    subject = MergedSubject(
        checkpoint=inputs.merged,
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
    from lora_tool.verification.elsewhere import check_on_cluster  # only where asked for

    return check_on_cluster(plan, weights, spread.cluster, level=level, precision=precision, progress=progress)


def verify_computed(
    inputs: ComputedInputs,
    *,
    level: Level | str = Level.FULL,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    jobs: int | None = None,
    progress: Progress | None = None,
    watch: StageWatch = unwatched,
) -> Verification:
    """Return what a computed adapter is, compared with what the inputs give that its manifest names.

    ΔW of every module is compared whole at either `level`; what was copied is compared byte by byte. Arguments are
    those of `verify`. Raises as `evidence_of_computed`.
    """
    level = Level(level)
    with watch("comparing", inputs.made.weights.nbytes) as bar:
        evidence = evidence_of_computed(inputs, level=level, jobs=jobs, progress=progress or bar)
    subject = ComputedAdapter(
        checkpoint=ModelDir(
            kind=MERGED_MODEL,
            folder=inputs.made.folder,
            config=None,
            weights=inputs.stored,
            problems=inputs.made.problems,
            manifest=inputs.manifest,
        ),
        planned=Expected(tensors=inputs.manifest.tensors or {}, files=()),
        evidence=evidence,
        recomputed=True,
        inputs=inputs.fingerprints(),
    )
    rules = (rule for rule in chosen_rules(select, ignore) if rule.code.startswith(OWN_RULES))
    rules = (rule for rule in rules if Need.CONFIG not in rule.needs)  # it has no model's
    return by_rules(
        subject, tuple(rules), level, Precision.FLOAT64, adapters=tuple(str(each.root) for each in inputs.sources)
    )


def judged_alone(model: ModelDir, pairs: Pairs, *, ignore: Iterable[str], watch: StageWatch) -> Verification:
    """Return how a model that was not merged from anything ranks the `pairs`, by the rules that `ignore` leaves.

    `watch` is asked for the progress. Raises as `verification.rewards.rank_alone`.
    """
    from lora_tool.verification.rewards import rank_alone  # torch and transformers, only where asked for

    subject = MergedSubject(checkpoint=model, planned=None, pairs=rank_alone(model, pairs, watch))
    return by_rules(subject, tuple(rule for rule in chosen_rules((), ignore) if rule.code in _OF_USE), Level.FULL, None)


def written_wrong(failing: Iterable[Finding]) -> bool:
    """Return whether the findings say that what was written is not what it should be, and not its worth alone."""
    return any(finding.code not in _OF_USE for finding in failing)
