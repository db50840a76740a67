"""The rules judge the inputs of a merge before it is planned, and again once the names of its parameters are known."""

from __future__ import annotations

from lora_tool.core.report.findings import Severity
from lora_tool.core.report.model import Report, joined
from lora_tool.models.mapping.class_tensors import class_tensors
from lora_tool.plans.base.task import Task
from lora_tool.plans.merge.draft import Model
from lora_tool.plans.merge.options import PlanOptions
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
    )


def judged_in_memory(judge: MergeJudge, model: Model, report: Report) -> Report:
    """Return the report, with the rules' findings under the names in memory too where those on disk differ.

    Raises `FindingsFound`.
    """
    if model.conversion is None:
        return report
    from lora_tool.plans.merge.model.converted import complete

    return joined([report, judge.in_memory(model.adapters, complete(model, model.conversion))])
