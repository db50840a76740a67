"""A report as JUnit XML, the form that GitLab, Jenkins, Azure and CircleCI show: one test per rule and folder.

The format has no standard; the attributes are those of the Jenkins schema (testsuites, testsuite, testcase with
failure, error or skipped).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree import ElementTree as ET

from lora_tool.core.display import printable
from lora_tool.core.report.findings import Finding, Severity
from lora_tool.core.report.model import Checked, Page, Report, by_subject
from lora_tool.core.report.text import grouped

_SHOWN = 100
"""Findings of one rule that are spelled out in one test."""


def report_junit(report: Report, *, pages: Mapping[str, Page], fail_on: Severity = Severity.ERROR) -> str:
    """Return the XML document. A rule with findings of `fail_on` or worse is a failed test, a rule that could not run
    a skipped one, and a path that could not be read an error.
    """
    suites = ET.Element("testsuites", name="lora-tool validate")
    skipped: dict[str, dict[str, str]] = {}
    for item in report.skipped:
        skipped.setdefault(item.path, {})[item.code] = item.reason
    for checked, findings in by_subject(report):
        _suite(suites, checked, findings, skipped.get(checked.path, {}), pages, fail_on)
    for unread in report.unread:
        suite = ET.SubElement(suites, "testsuite", name=printable(unread.path))
        case = ET.SubElement(suite, "testcase", classname=printable(unread.path), name=unread.during or "can be read")
        ET.SubElement(case, "error", message=printable(unread.message)).text = printable(unread.hint or "")
        _count(suite)
    _count(suites)
    ET.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suites, encoding="unicode")


def _suite(
    suites: ET.Element,
    checked: Checked,
    findings: Sequence[Finding],
    skipped: Mapping[str, str],
    pages: Mapping[str, Page],
    fail_on: Severity,
) -> None:
    suite = ET.SubElement(suites, "testsuite", name=printable(checked.path))
    found = grouped(findings, lambda finding: finding.code)
    for code in sorted({*checked.rules, *found, *skipped}):
        page = pages.get(code)
        name = f"{code} {page.title}" if page else code
        case = ET.SubElement(suite, "testcase", classname=printable(checked.path), name=printable(name))
        if code in found:
            _result(case, found[code], fail_on)
        elif code in skipped:
            ET.SubElement(case, "skipped", message=printable(skipped[code]))
    _count(suite)


def _result(case: ET.Element, findings: Sequence[Finding], fail_on: Severity) -> None:
    worst = max(findings, key=lambda finding: finding.severity.weight)
    lines = [f"{finding.severity}: {printable(str(finding))}" for finding in findings[:_SHOWN]]
    if len(findings) > _SHOWN:
        lines.append(f"and {len(findings) - _SHOWN} more like it")
    if worst.hint:
        lines.append(f"hint: {printable(worst.hint)}")
    if worst.severity >= fail_on:
        failure = ET.SubElement(case, "failure", type=worst.severity.value, message=printable(str(worst)))
        failure.text = "\n".join(lines)
    else:
        ET.SubElement(case, "system-out").text = "\n".join(lines)


def _count(element: ET.Element) -> None:
    element.set("tests", str(len(element.findall(".//testcase"))))
    element.set("failures", str(len(element.findall(".//failure"))))
    element.set("errors", str(len(element.findall(".//error"))))
    element.set("skipped", str(len(element.findall(".//skipped"))))
