"""What verifying costs: `pytest -m bench -s tests/bench/test_verify_speed.py`. Against `cp`, and the check inside a merge."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest

from tests.bench.models import make_adapter, make_base
from tests.bench.processes import interleaved, run, table

LAYERS = 14
ROUNDS = 5

pytestmark = pytest.mark.bench


def test_verifying(tmp_path: Path) -> None:
    base, adapter, out, merged = (tmp_path / name for name in ("base", "adapter", "out", "merged"))
    make_base(base, layers=LAYERS)
    make_adapter(adapter, layers=LAYERS, rank=64)
    ours = [sys.executable, "-m", "lora_tool"]
    run([*ours, "merge", str(adapter), "-o", str(merged), "-q"])
    commands = {
        "cp -r; sync": ["sh", "-c", f"cp -r {base} {out} && sync {out}/* {out}"],
        "merge": [*ours, "merge", str(adapter), "-o", str(out), "-q"],
        "merge --no-verify": [*ours, "merge", str(adapter), "-o", str(out), "-q", "--no-verify"],
        "verify": [*ours, "verify", str(merged), "-q"],
        "verify --sample": [*ours, "verify", str(merged), "-q", "--sample"],
    }
    runs = interleaved(commands, out=out, rounds=ROUNDS)
    print("\n" + table(runs, against="cp -r; sync"))
    cpu = statistics.median(one.cpu for one in runs["verify"])
    print(f"verify: {cpu:.2f} s of CPU (aim ≤ 5)")
