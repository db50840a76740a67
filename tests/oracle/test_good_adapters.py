"""No rule complains about an adapter that PEFT wrote, whatever feature it uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.judging import judge, lines
from tests.oracle.good_adapters import GOOD, make

SERVED_OTHERWISE = ("pissa-niter", "lora-ga", "corda")
"""Inits that change the base, and that PEFT repeats with random numbers, does not repeat, and cannot repeat."""


@pytest.mark.parametrize("name", GOOD)
def test_no_rule_complains(name: str, tmp_path: Path) -> None:
    adapter, base = make(name, tmp_path)
    assert lines(judge(adapter, servers=[] if name in SERVED_OTHERWISE else ["peft"])) == []
    if base is not None:
        assert lines(judge(base)) == []
        assert lines(judge(adapter, base=base)) == []
