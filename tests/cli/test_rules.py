from __future__ import annotations

from lora_tool.rules.engine.registry import RULES
from tests.cli.calling import Caller


def test_the_table_has_a_line_for_every_rule(call: Caller) -> None:
    called = call("rules")
    assert called.code == 0
    assert max(map(len, called.out.splitlines())) <= 100
    listed = [line.split()[0] for line in called.out.splitlines() if line.startswith("LT")]
    assert listed == sorted(RULES)


def test_a_page_has_all_its_sections(call: Caller) -> None:
    called = call("rules", "lt101")
    assert called.code == 0
    assert called.out.startswith("LT101  Truncated weights file\n\nerror\n\nWhat it does\n")
    assert "\nWhat to do\n" in called.out
    assert "\x1b" not in called.out


def test_the_beginning_of_codes_lists_them(call: Caller) -> None:
    codes = [line.split()[0] for line in call("rules", "LT1").out.splitlines() if line.startswith("LT")]
    assert codes == [code for code in sorted(RULES) if code.startswith("LT1")]


def test_an_unknown_code_is_a_usage_error_that_names_the_closest(call: Caller) -> None:
    called = call("rules", "LT1001")
    assert called.code == 2
    assert "Did you mean LT101?" in called.err


def test_json(call: Caller) -> None:
    (rule,) = call("rules", "LT101", "--json").json["rules"]
    assert rule["severity"] == "error"
    assert list(rule["page"]) == ["What it does", "Why it matters", "Example", "What to do"]
    assert len(call("rules", "--json").json["rules"]) == len(RULES)
