"""Reading a folder back that was just written: it needs no manifest, and nothing that only `verify` has to find."""

from __future__ import annotations

from pathlib import Path

from lora_tool.checkpoint import MERGED_MODEL, ModelDir, open_model
from lora_tool.checkpoint.folders import read_folder
from lora_tool.formats import model_config
from lora_tool.formats.weights import Weights, read_single
from lora_tool.plan.core.plan import Plan
from lora_tool.rules.engine.registry import chosen
from lora_tool.rules.merged.subject import MergedSubject
from lora_tool.verification.checking import Level, check_tensors
from lora_tool.verification.verified import OWN_RULES, Verification, by_rules


def check_written(plan: Plan, folder: Path, *, level: Level = Level.SAMPLE, jobs: int | None = None) -> Verification:
    """Return what is in the `folder` that `plan` was just carried out in, read back from the disk."""
    written = _written(plan, folder)
    evidence = check_tensors(plan, written.tensors, level=level, precision=plan.precision, jobs=jobs)
    subject = MergedSubject(checkpoint=written, planned=plan.expected, evidence=evidence, recomputed=True)
    return by_rules(subject, chosen(OWN_RULES), level, plan.precision)


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
