"""The command that compares a table with an installed server: what it finds, and what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_tool.rules.engine.subjects import Server
from lora_tool.rules.serving.tables import TABLES, table_of
from tests.servers import compare


@pytest.mark.parametrize(
    ("table", "server", "found"),
    [
        ({"ranks": [8, 16]}, {"ranks": [8, 16]}, []),
        ({"ranks": [8, 16]}, {"ranks": [8, 16, 512]}, ["ranks: the table says [8, 16], the server [8, 16, 512]"]),
        ({"fields": {"bias": "refuses", "a": "ignores"}}, {"fields": {"bias": "refuses"}}, []),  # `a` cannot be asked
        (
            {"fields": {"a": "ignores"}},
            {"fields": {"a": None}},
            ['fields.a: the table says "ignores", the server null'],
        ),
        (
            {"classes": {"plain": ["A", "B"]}},
            {"classes": {"plain": ["B", "C"]}},
            ["only the table has A", "only the server has C"],
        ),
    ],
)
def test_each_difference_is_a_line(table: dict[str, Any], server: dict[str, Any], found: list[str]) -> None:
    lines = list(compare.differences(table, server))
    assert len(lines) == len(found)
    assert all(map(str.endswith, lines, found))


def test_an_option_that_the_server_lost_is_a_line() -> None:
    record = {"start": "vllm serve BASE --enable-lora{towers}", "towers": "--towers"}
    assert list(compare.unknown_options(record, ["--enable-lora"])) == ["start: the server has no option --towers"]


def test_a_new_version_comes_first_and_the_others_stay_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = table_of("vllm")
    (tmp_path / "vllm.json").write_bytes((TABLES / "vllm.json").read_bytes())
    monkeypatch.setattr(compare, "TABLES", tmp_path)
    compare.write(Server.VLLM, {"version": "0.100.0", "ranks": [1024], "fields": {"use_dora": None, "bias": "ignores"}})
    newest, *older = json.loads((tmp_path / "vllm.json").read_bytes())["versions"]
    assert (newest["version"], newest["ranks"], newest["run"]) == ("0.100.0", [1024], "")
    assert newest["fields"] == {k: v for k, v in before["versions"][0]["fields"].items() if k != "use_dora"} | {
        "bias": "ignores"
    }
    first = before["versions"][0]
    assert [newest | each for each in older] == [first, *(first | each for each in before["versions"][1:])]
