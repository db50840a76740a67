"""Every form of a report is read by a parser of its own: JSON Schema, SARIF's schema, XML, GitHub's command grammar."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import jsonschema
import pytest

from lora_tool.core.report import sarif
from lora_tool.core.report.findings import Finding, Run, RunCheckpoint, Severity
from lora_tool.core.report.forms import Form, rendered
from lora_tool.core.report.github import CAP
from lora_tool.core.report.json import schema
from lora_tool.core.report.markdown import MOST_CHARACTERS
from lora_tool.core.report.model import Checked, Ignored, Report, Skipped, Unread, by_subject, joined
from lora_tool.rules.engine.registry import RULES
from lora_tool.verification.validating import validate  # noqa: F401 - registers the rules
from tests.judging import judge
from tests.mutations import CAUSAL, FIXTURES, MUTATIONS, break_, copy_of

PAGES = RULES
SARIF = json.loads((Path(__file__).parents[1] / "schemas" / "sarif-2.1.0.json").read_text(encoding="utf-8"))
EVIL = [
    "\x1b[2Jgone",
    "two\nlines",
    "\r::error file=a::owned",
    "::set-output name=a::b",
    "##[set-env name=A]b",
    "%0A::error::x",
    "a|b`c`<img src=x onerror=alert(1)>",
    "[click](javascript:x) @everyone #1 https://evil.example ![](x)",
    "]]></failure><x>",
    "\ud800\uffff\u202e\x00",
]


def finding(**changes: Any) -> Finding:
    told: dict[str, Any] = {
        "code": "LT206",
        "severity": Severity.ERROR,
        "path": "a/adapter_model.safetensors",
        "subject": "x.lora_A.weight",
        "message": "is wrong",
        "hint": "mend it",
    }
    return Finding(**{**told, **changes})


def report(*findings: Finding, **more: Any) -> Report:
    return Report(subjects=(Checked(path="a", kind="adapter", rules=("LT201", "LT206")),), findings=findings, **more)


def row(**changes: Any) -> RunCheckpoint:
    told: dict[str, Any] = {
        "path": "run/checkpoint-2",
        "name": "checkpoint-2",
        "step": 2,
        "epoch": 0.5,
        "loss": 0.7,
        "metric": None,
        "nbytes": 2048,
        "errors": 0,
        "warnings": 0,
    }
    return RunCheckpoint(**{**told, **changes})


def full() -> Report:
    """A report that has everything a report can have."""
    checkpoints = (row(), row(path="run/checkpoint-4", loss=float("nan"), metric=0.5, errors=1, codes=("LT701",)))
    run = Run(path="run", checkpoints=checkpoints, metric="eval_loss", best="run/checkpoint-2", why_best="the latest")
    return report(
        finding(),
        finding(severity=Severity.WARNING, code="LT205", subject=None),
        finding(severity=Severity.INFO, code="LT215", hint=None),
        skipped=(Skipped(code="LT501", path="a", reason="no base"),),
        runs=(run,),
        unread=(Unread(path="b", message="b: no such folder", hint="look"),),
        ignored=(Ignored(code="LT306", reason="served with PEFT"), Ignored(code="LT111")),
    )


def evil(text: str) -> Report:
    return Report(
        subjects=(Checked(path=text, kind="adapter", rules=("LT206",)),),
        findings=(finding(path=text, subject=text, message=text, hint=text),),
        skipped=(Skipped(code="LT501", path=text, reason=text),),
        runs=(Run(path=text, checkpoints=(row(path=text, name=text),), metric=text, best=text, why_best=text),),
        unread=(Unread(path=text, message=text, hint=text),),
        ignored=(Ignored(code="LT306", reason=text),),
    )


def shown(judged: Report, form: Form) -> str:
    return rendered(judged, form, pages=PAGES, root=Path("/work"))


REPORTS = [pytest.param(full(), id="full"), pytest.param(Report(), id="empty")]
EVIL_REPORTS = [pytest.param(evil(text), id=f"evil {at}") for at, text in enumerate(EVIL)]


@pytest.mark.parametrize("judged", REPORTS + EVIL_REPORTS)
def test_json_keeps_its_schema(judged: Report) -> None:
    jsonschema.Draft202012Validator.check_schema(schema())
    parsed = json.loads(shown(judged, Form.JSON), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    jsonschema.validate(parsed, schema())


def test_schema_notices_what_is_missing() -> None:
    for name in full().to_json():
        table = full().to_json()
        del table[name]
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(table, schema())


@pytest.mark.parametrize("judged", REPORTS + EVIL_REPORTS)
def test_sarif_keeps_the_schema_of_oasis(judged: Report) -> None:
    validator = jsonschema.Draft4Validator(SARIF, format_checker=jsonschema.FormatChecker())
    assert not list(validator.iter_errors(json.loads(shown(judged, Form.SARIF))))


def test_sarif_says_where_and_which_rule() -> None:
    (run,) = json.loads(shown(full(), Form.SARIF))["runs"]
    first = run["results"][0]
    assert first["level"] == "error"
    rule = run["tool"]["driver"]["rules"][first["ruleIndex"]]
    assert (rule["id"], rule["shortDescription"]["text"]) == ("LT206", PAGES["LT206"].title)
    assert rule["help"]["markdown"] == PAGES["LT206"].text
    bare = json.loads(rendered(report(finding()), Form.SARIF, pages={}, root=Path("/work")))["runs"][0]
    assert bare["tool"]["driver"]["rules"] == [{"id": "LT201"}, {"id": "LT206"}]
    (location,) = first["locations"]
    artifact = location["physicalLocation"]["artifactLocation"]
    assert artifact == {"uri": "a/adapter_model.safetensors", "uriBaseId": "SRCROOT"}
    assert location["logicalLocations"][0]["fullyQualifiedName"] == "x.lora_A.weight"
    assert run["invocations"][0]["executionSuccessful"] is False
    assert len(run["invocations"][0]["toolExecutionNotifications"]) == 2


def test_sarif_keeps_the_worst_where_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sarif, "MOST_RESULTS", 2)
    notes = [finding(subject=str(at), severity=Severity.INFO) for at in range(3)]
    (run,) = json.loads(shown(report(*notes, finding()), Form.SARIF))["runs"]
    assert [result["level"] for result in run["results"]] == ["error", "note"]
    (cut,) = run["invocations"][0]["toolExecutionNotifications"]
    assert "2 more findings omitted" in cut["message"]["text"]


def test_sarif_of_a_path_outside_is_absolute() -> None:
    parsed = json.loads(shown(report(finding(path="/elsewhere/ä b%.safetensors")), Form.SARIF))
    (result,) = parsed["runs"][0]["results"]
    uri = result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert uri == "file:///elsewhere/%C3%A4%20b%25.safetensors"


@pytest.mark.parametrize("judged", REPORTS + EVIL_REPORTS)
def test_junit_counts_what_it_holds(judged: Report) -> None:
    suites = ET.fromstring(shown(judged, Form.JUNIT).encode())
    for suite in [suites, *suites]:
        for attribute, tag in (
            ("tests", "testcase"),
            ("failures", "failure"),
            ("errors", "error"),
            ("skipped", "skipped"),
        ):
            assert suite.get(attribute) == str(len(suite.findall(f".//{tag}")))


def test_junit_has_a_test_for_every_rule_that_ran() -> None:
    suites = ET.fromstring(shown(full(), Form.JUNIT).encode())
    cases = {str(case.get("name"))[:5]: case for case in suites[0]}
    assert set(cases) == {"LT201", "LT205", "LT206", "LT215", "LT501"}
    assert not list(cases["LT201"])
    assert cases["LT206"][0].tag == "failure"
    assert cases["LT205"][0].tag == "system-out"
    assert cases["LT501"][0].tag == "skipped"
    assert suites[1][0][0].tag == "error"


def test_junit_fails_from_the_severity_that_was_asked_for() -> None:
    text = rendered(full(), Form.JUNIT, pages=PAGES, fail_on=Severity.WARNING)
    assert ET.fromstring(text.encode()).get("failures") == "2"


COMMAND = re.compile(r"::(error|warning|notice) ((?:(?:file|title)=[^,:\r\n]*,?)+)::([^\r\n]*)\Z")


def commands(text: str) -> list[tuple[str, str]]:
    """Return kind and message of every line that a runner would act on, and fail for any that is not ours."""
    found = []
    for line in text.splitlines():
        # the runner takes `::` after blanks, and the older `##[` anywhere
        assert "##[" not in line
        if line.lstrip().startswith("::"):
            match = COMMAND.match(line)
            assert match, line
            assert not re.search("%(?!25|0D|0A|3A|2C)", line)
            found.append((match[1], match[3]))
    return found


def test_github_annotates_each_rule_once() -> None:
    many = report(*(finding(subject=str(at)) for at in range(30)), finding(severity=Severity.WARNING, code="LT205"))
    text = shown(many, Form.GITHUB)
    assert [kind for kind, _ in commands(text)] == ["error", "warning"]
    assert "title=LT206 " in text
    assert "(30 times)" in text
    assert "file=a/adapter_model.safetensors," in text
    assert "%0Aand 27 more like it%0Ahint: mend it" in text
    assert text.splitlines()[-1].startswith("checked 1 adapter")


def test_github_stays_below_its_cap() -> None:
    findings = [finding(code=code) for code in sorted(RULES)[:25]]
    told = commands(shown(report(*findings, unread=full().unread), Form.GITHUB))
    assert len(told) == CAP
    assert "17 more annotations" in told[-1][1]
    codes = set(re.findall(r"LT\d+", told[-1][1]))
    assert codes


@pytest.mark.parametrize("text", EVIL)
@pytest.mark.parametrize("form", [Form.GITHUB, Form.TEXT, Form.MARKDOWN])
def test_names_from_files_are_no_workflow_commands(text: str, form: Form) -> None:
    told = shown(evil(text), form)
    assert not set(told) & set("\x1b\r\u202e\x00")
    assert len(commands(told)) == (2 if form is Form.GITHUB else 0)


@pytest.mark.parametrize("text", EVIL)
def test_names_from_files_do_nothing_in_markdown(text: str) -> None:
    told = shown(evil(text), Form.MARKDOWN)
    rest = re.sub(r"</?(code|b)>|&#\d+;", "", told)
    assert not set(rest) & set("<>`[]!@"), rest
    assert "://" not in rest
    for line in told.splitlines():
        assert line.startswith("|") <= (line.count("|") in (3, 5, 8)), line
    plain = re.sub(r"<code>.*?</code>", "", told)
    assert not re.search("[@#]\\w", html.unescape(re.sub("^#+", "", plain, flags=re.MULTILINE)))


def test_markdown_shows_the_run_and_what_was_left_out() -> None:
    told = html.unescape(shown(full(), Form.MARKDOWN))
    assert "| **best** <code>checkpoint-2</code> | 2 | 0.5 | 0.7 | - | 2 KiB | good |" in told
    assert "broken LT701" in told
    assert "LT501 on <code>a</code>: no base" in told
    assert "LT306: served with PEFT" in told
    assert "no such folder" in told


def test_markdown_fits_into_a_summary() -> None:
    subjects = tuple(Checked(path=f"run/checkpoint-{at}", kind="adapter") for at in range(3000))
    findings = tuple(finding(path=f"{checked.path}/x", message="m" * 500) for checked in subjects)
    told = shown(Report(subjects=subjects, findings=findings), Form.MARKDOWN)
    assert MOST_CHARACTERS < len(told) + 2000 < MOST_CHARACTERS + 4000
    assert "The rest is omitted because a summary has limited space" in told[-100:]


def test_text_shows_the_run_and_the_reasons_of_ignores() -> None:
    told = shown(full(), Form.TEXT)
    assert "  checkpoint    step  epoch  loss  eval_loss   size  verdict" in told
    assert "  checkpoint-2     2    0.5   0.7          -  2 KiB  good  <- best" in told
    assert "  checkpoint-2     2    0.5   NaN        0.5  2 KiB  broken LT701" in told
    assert "ignored LT306: served with PEFT" in told
    assert "LT111" not in told


@pytest.mark.parametrize("form", list(Form))
def test_real_findings_are_shown_in_every_form(form: Form, tmp_path: Path) -> None:
    name = "LT206"
    folder = copy_of(MUTATIONS[name].of, tmp_path)
    break_(folder, name)
    told = rendered(judge(folder), form, pages=PAGES)
    assert name in told
    assert "adapter_model.safetensors" in told
    assert name not in rendered(judge(FIXTURES / CAUSAL, select=["LT1"]), form, pages=PAGES)


def test_a_finding_belongs_to_the_innermost_folder() -> None:
    subjects = tuple(Checked(path=path, kind="x") for path in ("run", "run/checkpoint-1", "run/checkpoint-11"))
    paths = ("run/checkpoint-11/x", "run/checkpoint-1", "run/y", "/else")
    judged = Report(subjects=subjects, findings=tuple(finding(path=path) for path in paths))
    owned = {checked.path: [found.path for found in findings] for checked, findings in by_subject(judged)}
    assert owned == {
        "run": ["run/y", "/else"],
        "run/checkpoint-1": ["run/checkpoint-1"],
        "run/checkpoint-11": ["run/checkpoint-11/x"],
    }
    assert by_subject(Report(findings=(finding(),))) == ()


def test_a_folder_that_was_looked_at_twice_is_shown_once() -> None:
    subjects = (
        Checked(path="a", kind="adapter", rules=("LT101",)),
        Checked(path="a", kind="DeepSpeed", rules=("LT401",)),
    )
    ((checked, findings),) = by_subject(Report(subjects=subjects, findings=(finding(),)))
    assert (checked.kind, checked.rules, len(findings)) == ("adapter", ("LT101", "LT401"), 1)


def test_what_is_said_twice_is_kept_once() -> None:
    assert joined([full(), full()]).findings == full().findings
