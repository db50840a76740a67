"""Findings, and the forms in which they are shown: one module per form.

What a whole report is made of is loaded when it is first used: a plan has findings alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lora_tool.core.report.findings import Finding, Severity

if TYPE_CHECKING:
    from lora_tool.core.report.model import Checked, Report, Skipped

__all__ = ["Checked", "Finding", "Report", "Severity", "Skipped"]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - PEP 562: whatever the name is
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lora_tool.core.report import model

    return getattr(model, name)
