"""Findings, and the forms in which they are shown: one module per form."""

from lora_tool.report.model import Checked, Finding, Report, Run, RunCheckpoint, Severity, Skipped

__all__ = ["Checked", "Finding", "Report", "Run", "RunCheckpoint", "Severity", "Skipped"]
