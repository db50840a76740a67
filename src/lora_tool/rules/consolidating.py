"""The judge of a consolidation: the rules about rank files, and about the adapter written from them."""

from __future__ import annotations

from lora_tool.checkpoints.states.state import TrainingState
from lora_tool.core.report.findings import Finding
from lora_tool.core.tensors import TensorTable
from lora_tool.rules.adapter import lt2_layers  # noqa: F401 - importing a family registers its rules
from lora_tool.rules.engine.registry import RULES
from lora_tool.rules.files.lt1_containers import foreign_call
from lora_tool.rules.training import lt4_contents, lt4_rank_files, lt4_values  # noqa: F401
from lora_tool.rules.training.sharded_subject import ShardedSubject
from lora_tool.rules.training.value_check import ValueCheck, value_check

_OF_ADAPTERS = ("LT201", "LT415")


def judge_files(subject: ShardedSubject) -> tuple[Finding, ...]:
    """Return the faults of the rank files, without reading values."""
    found: list[Finding] = []
    for code, rule in sorted(RULES.items()):
        about_them = rule.on is ShardedSubject and not rule.deep and code not in _OF_ADAPTERS
        if about_them or rule.check is foreign_call:
            found += rule.findings(subject)
    return tuple(found)


def judge_adapter(subject: ShardedSubject) -> tuple[Finding, ...]:
    """Return the faults of the adapter whose tensors and heads were chosen."""
    return tuple(finding for code in _OF_ADAPTERS for finding in RULES[code].findings(subject))


def check_of_values(state: TrainingState, tensors: TensorTable, ignored: tuple[str, ...]) -> ValueCheck | None:
    """Return the check of the values of `tensors`; None where `ignored`, beginnings of codes, are all of its rules."""
    codes = (rule.code for rule in RULES.values() if rule.on is ShardedSubject and rule.deep)
    unchecked = bool(ignored) and all(code.startswith(ignored) for code in codes)
    return None if unchecked else value_check(state, tensors, ignored=ignored)


def is_about_rank_files(finding: Finding) -> bool:
    """Return whether the finding is a fault of rank files themselves."""
    return finding.code.startswith("LT4")
