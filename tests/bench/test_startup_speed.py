"""What commands cost on inputs of a few KB: `pytest -m bench -s tests/bench/test_startup_speed.py`.

CPU seconds, because a process that has nothing to wait for is as long as that. Records are msgspec's: while they were
dataclasses, a third of the 1.49 billion instructions of `merge` (callgrind, Python 3.11) parsed and compiled the methods
of 153 of them, 0.5 to 0.9 ms each, where a class of msgspec takes 0.02.

Tried on the way:
- collecting no garbage while modules are imported: no difference
- `os._exit` instead of taking the interpreter down: 2 % less CPU; left out, because nothing would be flushed behind us
- what a merge into a plain model does not need is imported where it is needed: 10 % less
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

from tests.bench.processes import interleaved

FIXTURES = Path(__file__).parents[2] / "fixtures"
ROUNDS = 15
AIMS = {"merge": "aim ≤ 0.35"}

pytestmark = pytest.mark.bench


def test_small_inputs(tmp_path: Path) -> None:
    out, adapter = tmp_path / "out", str(FIXTURES / "causal-llama" / "adapter")
    asked = {
        "--help": ["--help"],
        "validate": ["validate", adapter],
        "merge": ["merge", adapter, "-o", str(out), "-q"],
        "consolidate": ["consolidate", str(FIXTURES / "zero" / "stage3-full"), "-o", str(out), "-q"],
        "prepare": ["prepare", adapter, "--for", "vllm", "-o", str(out), "-q"],
        "combine": ["combine", f"{adapter}=0.5", "-o", str(out), "-q"],
    }
    commands = {name: [sys.executable, "-m", "lora_tool", *words] for name, words in asked.items()}
    print()
    for name, runs in interleaved(commands, out=out, rounds=ROUNDS).items():
        cpu = [run.cpu for run in runs]
        print(f"{name:<12} {statistics.median(cpu):.3f} s of CPU, least {min(cpu):.3f}  {AIMS.get(name, '')}".rstrip())
