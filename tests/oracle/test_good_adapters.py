"""No rule complains about an adapter that PEFT wrote, whatever feature it uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.judging import judge, lines
from tests.oracle.good_adapters import GOOD, make


@pytest.mark.parametrize("name", GOOD)
def test_no_rule_complains(name: str, tmp_path: Path) -> None:
    adapter, base = make(name, tmp_path)
    # PEFT repeats this initialisation with random numbers: the one thing that it serves otherwise than it was trained
    assert lines(judge(adapter, servers=[] if "niter" in name else ["peft"])) == []
    if base is not None:
        assert lines(judge(base)) == []
        assert lines(judge(adapter, base=base)) == []
