"""Reading a folder back that was just written: it needs no manifest, and nothing that only `verify` has to find."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from lora_tool.checkpoints import MERGED_MODEL, ModelDir, open_model
from lora_tool.checkpoints.folders import read_folder
from lora_tool.formats import model_config
from lora_tool.formats.weights import Weights, read_single
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import Shard
from lora_tool.rules.engine.registry import chosen
from lora_tool.rules.merged.evidence import TensorEvidence
from lora_tool.rules.merged.subject import MergedSubject
from lora_tool.verification.checking import check_steps
from lora_tool.verification.verified import OWN_RULES, Level, Verification, by_rules


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
