from __future__ import annotations

import json

import pytest

from lora_tool.core.errors import FindingsFound
from lora_tool.core.report.findings import Finding, Severity
from lora_tool.core.report.model import Checked, Report, Skipped, joined
from lora_tool.core.report.text import spans


def finding(
    code: str = "LT206",
    severity: Severity = Severity.ERROR,
    path: str = "a/adapter_model.safetensors",
    subject: str | None = "x.lora_A.weight",
    message: str = "is wrong",
    hint: str | None = "mend it",
) -> Finding:
    return Finding(code=code, severity=severity, path=path, subject=subject, message=message, hint=hint)


def report(*findings: Finding, skipped: tuple[Skipped, ...] = ()) -> Report:
    return Report(subjects=(Checked(path="a", kind="adapter", rules=("LT206",)),), findings=findings, skipped=skipped)


def test_severities_compare_by_weight() -> None:
    assert Severity.ERROR > Severity.WARNING > Severity.INFO
    assert Severity.INFO <= Severity.INFO
    assert not Severity.INFO >= Severity.WARNING


def test_worst_counts_and_at_least() -> None:
    judged = report(finding(), finding(severity=Severity.WARNING), finding(severity=Severity.INFO))
    assert judged.worst is Severity.ERROR
    assert judged.count(Severity.WARNING) == 1
    assert len(judged.at_least(Severity.WARNING)) == 2
    assert Report().worst is None


def test_raise_for_errors_names_the_first_and_counts_the_rest() -> None:
    report(finding(severity=Severity.WARNING)).raise_for_errors()
    with pytest.raises(FindingsFound, match=r"LT206 .*`x.lora_A.weight`: is wrong \(and 1 more error\)") as raised:
        report(finding(), finding()).raise_for_errors()
    assert raised.value.hint == "mend it"


def test_the_rule_that_is_named_last_is_that_of_the_first_error_above_it() -> None:
    warned = finding(severity=Severity.WARNING, code="LT201", path="a/a.json")
    text = report(warned, finding(code="LT210"), finding(code="LT208"), finding(code="LT113", path="b")).text()
    assert text.splitlines()[-1] == "lora-tool rules LT208 explains the first of them"


def test_text_of_nothing_found() -> None:
    assert report().text() == "checked 1 adapter: no findings"


def test_text_groups_by_file_worst_first_with_each_hint_once() -> None:
    text = report(finding(severity=Severity.WARNING, code="LT210"), finding(), finding(subject="y")).text()
    assert text.splitlines() == [
        "a/adapter_model.safetensors",
        "  error    LT206  x.lora_A.weight: is wrong",
        "  error    LT206  y: is wrong",
        "                  hint: mend it",
        "  warning  LT210  x.lora_A.weight: is wrong",
        "                  hint: mend it",
        "",
        "checked 1 adapter: 2 errors, 1 warning",
        "lora-tool rules LT206 explains the first of them",
    ]


def test_text_counts_what_repeats() -> None:
    text = report(*(finding(subject=str(n)) for n in range(30))).text()
    assert text.count("error    LT206") == 3
    assert "and 27 more like it" in text
    assert "checked 1 adapter: 30 errors\n" in text


def test_text_sums_up_skipped_rules() -> None:
    skipped = tuple(
        Skipped(code=f"LT50{n}", path="a", reason="no base model was given (use --base)") for n in (1, 2, 3, 5)
    )
    lines = report(skipped=skipped).text().splitlines()
    assert lines == [
        "skipped 4 rules on a: no base model was given (use --base); --verbose lists them",
        "checked 1 adapter: no findings, 4 rules skipped",
    ]


def test_text_says_once_what_was_skipped_on_many_checkpoints() -> None:
    skipped = tuple(Skipped(code="LT501", path=f"run/checkpoint-{at}", reason="no base") for at in range(3))
    told = str(report(skipped=(*skipped, Skipped(code="LT502", path="other", reason="no base"))))
    assert told.splitlines()[:2] == [
        "skipped LT501 on 3 folders, run/checkpoint-0 the first: no base",
        "skipped LT502 on other: no base",
    ]


def test_spans_joins_neighbours() -> None:
    assert spans(["LT203", "LT201", "LT202", "LT4"]) == "LT201-LT203, LT4"
    assert spans([]) == ""


def test_text_has_colours_only_when_asked() -> None:
    assert "\x1b" not in report(finding()).text()
    assert "\x1b[31m" in report(finding()).text(color=True)


@pytest.mark.parametrize("evil", ["\x1b[2Jgone", "two\nlines", "\u202egnp.exe", "::error file=a::b\r"])
def test_names_from_files_act_on_nothing(evil: str) -> None:
    judged = Report(
        subjects=(Checked(path=evil, kind="adapter"),),
        findings=(finding(path=evil, subject=evil, message=evil, hint=evil),),
        skipped=(Skipped(code="LT501", path=evil, reason=evil),),
    )
    for shown in (judged.text(), json.dumps(judged.to_json(), ensure_ascii=False)):
        assert not set(shown) & set("\x1b\r\u202e")
    assert "\nlines" not in judged.text()


def test_json_is_complete_and_stable() -> None:
    table = report(finding(), skipped=(Skipped(code="LT501", path="a", reason="why"),)).to_json()
    assert table.pop("tool_version")
    assert table == {
        "schema_version": 1,
        "subjects": [{"path": "a", "kind": "adapter", "rules": ["LT206"], "formats": []}],
        "findings": [
            {
                "code": "LT206",
                "severity": "error",
                "path": "a/adapter_model.safetensors",
                "subject": "x.lora_A.weight",
                "message": "is wrong",
                "hint": "mend it",
            }
        ],
        "skipped": [{"code": "LT501", "path": "a", "reason": "why"}],
        "ignored": [],
        "unread": [],
        "runs": [],
        "summary": {"subjects": 1, "errors": 1, "warnings": 0, "infos": 0, "skipped": 1, "unread": 0},
    }


def test_joined_keeps_the_order() -> None:
    both = joined([report(finding(code="LT301")), report(finding(code="LT201"))])
    assert [found.code for found in both.findings] == ["LT301", "LT201"]
    assert len(both.subjects) == 2
