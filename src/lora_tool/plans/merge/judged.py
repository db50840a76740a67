"""The rules judge the inputs of a merge before it is planned, and again once the names of its parameters are known."""

from __future__ import annotations

from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.checkpoints.quantised import in_full_precision
from lora_tool.core.errors import LoraToolError
from lora_tool.core.report.findings import Severity
from lora_tool.core.report.model import Report, joined
from lora_tool.models.mapping.class_tensors import class_tensors
from lora_tool.plans.base.task import Task
from lora_tool.plans.merge.draft import Model
from lora_tool.plans.merge.model.reading import known_mixture, read_model
from lora_tool.plans.merge.options import PlanOptions
from lora_tool.rules.engine.base_match import BaseMatch
from lora_tool.rules.judging import MergeJudge


def judge_of(options: PlanOptions) -> MergeJudge:
    """Return the judge of a merge with these options."""
    return MergeJudge(
        task=Task(options.task).expected,
        num_labels=options.num_labels,
        untie=options.untie,
        select=tuple(options.select),
        ignore=tuple(options.ignore),
        fail_on=Severity(options.fail_on),
        ask=class_tensors,
        average=options.average,
    )


def judged_in_memory(judge: MergeJudge, model: Model, report: Report) -> Report:
    """Return the report, with the rules' findings under the names in memory too where those on disk differ.

    Raises `FindingsFound`.
    """
    if model.conversion is None:
        return report
    from lora_tool.plans.merge.model.converted import complete

    return joined([report, judge.in_memory(model.adapters, complete(model, model.conversion))])


def in_memory(
    adapter: AdapterDir, base: ModelDir, task: str | None, *, sure: bool
) -> tuple[AdapterDir, BaseMatch] | str:
    """Return adapter and base in the names that a merge for `task` would give them; a sentence where it cannot.

    Only to be `sure` transformers is asked where no table knows the class.
    """
    wanted = Task.AUTO if task is None else Task(task)
    try:
        plain = in_full_precision(base)
        model = read_model(plain, (adapter,), wanted) if sure else known_mixture(plain, (adapter,), wanted)
    except LoraToolError as error:
        return f"{error}: {error.hint}" if error.hint else str(error)
    if model is None:
        return "transformers, which knows them, is asked only with --deep"
    if model.conversion is None:
        return "a merge takes the names on disk for those in memory"
    from lora_tool.plans.merge.model.converted import complete

    return model.adapters[0], complete(model, model.conversion)
