"""Regular expressions in `adapter_config.json` that would run for ever, or are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hostile.folders import Pair, assert_refused, copy_pair

CATASTROPHIC = [
    "(a+)+$",
    "(a|a)*$",
    "((a*)*)*b",
    "(.*a){20}",
    "(x+x+)+y",
    ".*" * 30 + "z",
    "(?:(?:.+)+)+!",
    "a" * 30_000,
]
BROKEN = ["(", "[", "*", "(?P<x", "\\", "a{2,1}", "(" * 5000]


def change(pair: Pair, **fields: object) -> Path:
    path = pair.adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return path


@pytest.mark.parametrize("pattern", [*CATASTROPHIC, *BROKEN], ids=lambda pattern: pattern[:20])
@pytest.mark.parametrize("field", ["target_modules", "rank_pattern"])
def test_a_pattern_that_cannot_be_trusted_is_refused(field: str, pattern: str, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    path = change(pair, **{field: pattern if field == "target_modules" else {pattern: 2}})
    assert_refused(pair, str(path), field, "regular expression")


@pytest.mark.parametrize("field", ["exclude_modules", "alpha_pattern"])
def test_the_other_fields_are_judged_alike(field: str, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    path = change(pair, **{field: "(a+)+$" if field == "exclude_modules" else {"(a+)+$": 2}})
    assert_refused(pair, str(path), field, "regular expression")
