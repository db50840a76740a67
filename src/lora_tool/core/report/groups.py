"""Findings put together for people: those of one rule and severity are one thing to mend, however many tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from lora_tool.core.report.findings import Finding
from lora_tool.core.report.words import Skipped

T = TypeVar("T")
K = TypeVar("K")


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items that have the same `key` together, in the order in which they come."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def by_rule(findings: Iterable[Finding]) -> Iterator[tuple[Finding, ...]]:
    """Yield the findings of one rule and severity together, worst first, then by code."""
    groups = grouped(findings, lambda finding: (-finding.severity.weight, finding.code))
    yield from (tuple(group) for _, group in sorted(groups.items(), key=lambda group: group[0]))


def relative_to(path: str, root: Path) -> str | None:
    """Return `path` relative to the folder `root`, with forward slashes; None where it lies outside of it."""
    absolute = os.path.normpath(root / path)
    inside = os.path.relpath(absolute, root)
    outside = inside == os.pardir or inside.startswith(os.pardir + os.sep)
    return None if outside else inside.replace(os.sep, "/")


def by_reason(skipped: Iterable[Skipped]) -> Iterator[tuple[tuple[str, ...], tuple[str, ...], str]]:
    """Yield codes, folders and reason: what was skipped for one reason on many checkpoints of a run is one line."""
    on_a_folder = grouped(skipped, lambda item: (item.path, item.reason)).values()
    alike = grouped(on_a_folder, lambda items: (tuple(item.code for item in items), items[0].reason))
    for (codes, reason), folders in alike.items():
        yield codes, tuple(items[0].path for items in folders), reason
