"""Findings put together for people: those of one rule and severity are one thing to mend, however many tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from lora_tool.report.findings import Finding
from lora_tool.report.words import Skipped


def by_rule(findings: Iterable[Finding]) -> Iterator[tuple[Finding, ...]]:
    """Yield the findings of one rule and severity together, worst first, then by code."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.code), []).append(finding)
    for group in sorted(groups.values(), key=lambda group: (-group[0].severity.weight, group[0].code)):
        yield tuple(group)


def relative_to(path: str, root: Path) -> str | None:
    """Return `path` relative to the folder `root`, with forward slashes; None where it lies outside of it."""
    absolute = os.path.normpath(root / path)
    inside = os.path.relpath(absolute, root)
    outside = inside == os.pardir or inside.startswith(os.pardir + os.sep)
    return None if outside else inside.replace(os.sep, "/")


def by_reason(skipped: Iterable[Skipped]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], str]]:
    """Yield codes, folders and reason: what was skipped for one reason on many checkpoints of a run is one line."""
    codes: dict[tuple[str, str], list[str]] = {}
    for item in skipped:
        codes.setdefault((item.path, item.reason), []).append(item.code)
    paths: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for (path, reason), found in codes.items():
        paths.setdefault((tuple(found), reason), []).append(path)
    for (found_codes, reason), found_paths in paths.items():
        yield found_codes, tuple(found_paths), reason
