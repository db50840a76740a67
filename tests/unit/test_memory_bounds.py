"""Commands on adapters take as much memory on a machine of 64 cores as on one of two."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_tool import plan_combine, plan_merge
from lora_tool.core import machine
from lora_tool.execution import local_engine
from lora_tool.execution.local_engine import workers_for
from lora_tool.plans.algebra import plan_extract
from lora_tool.plans.algebra.krylov import memory_of

CAUSAL = Path(__file__).parents[2] / "fixtures" / "causal-llama"
LLAMA_8B = [(14336, 4096), (4096, 14336), (4096, 4096), (1024, 4096)]


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (local_engine, machine):
        monkeypatch.setattr(module, "available_cores", lambda: 64)


def test_a_few_workers_make_factors_unless_more_are_asked_for() -> None:
    sums = plan_combine([CAUSAL / "adapter"], weights=[0.5])
    assert workers_for(sums, None) == 2
    assert workers_for(sums, 7) == 7
    assert workers_for(plan_merge(CAUSAL / "base", CAUSAL / "adapter"), None) == 64


@pytest.mark.parametrize("shape", LLAMA_8B, ids=str)
def test_two_of_the_widest_modules_of_8b_are_worked_on_at_a_time(shape: tuple[int, int]) -> None:
    most = plan_extract._MEMORY // max(memory_of(each, 64) for each in LLAMA_8B)
    assert most == 2
    assert most * memory_of(shape, 64) < 130e6
