"""A merge of 16 GB, more than fits the page cache beside its output: `pytest -m bench -s tests/bench/test_large_speed.py`.

LORA_TOOL_BENCH_LARGE names a folder with 50 GB of room; without it nothing is run. PEFT's time is that of 1.5 GB, times
the bytes.

On 2 cores with 23 GB of memory: a copy 18.1 s (11.0 s of CPU); merges in another hour 21.8 and 22.9 s (31.4 and
32.1 s). With O_DIRECT they took 20.0 and 23.2 s (24.2 and 27.9 s).
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.models import EIGHT_BILLION, make_adapter, make_base
from tests.bench.processes import interleaved, run, table
from tests.bench.test_merge_speed import LAYERS, PEFT_MERGE

VARIABLE = "LORA_TOOL_BENCH_LARGE"
NEEDED = 50 * 10**9
COPY, MERGE = "cp -r; sync", "merge r=64 (aim ≤ 1.4 ×)"

pytestmark = pytest.mark.bench


@pytest.fixture
def root() -> Iterator[Path]:
    named = os.environ.get(VARIABLE)
    if not named:
        pytest.skip(f"{VARIABLE} names no folder")
    free = shutil.disk_usage(named).free
    if free < NEEDED:
        pytest.skip(f"{named} has {free / 1e9:.0f} GB free, and {NEEDED / 1e9:.0f} are needed")
    root = Path(named) / "lora-tool-bench"
    root.mkdir()
    yield root
    shutil.rmtree(root)


def test_sixteen_gigabytes(root: Path) -> None:
    out = root / "out"
    make_base(root / "base", layers=32, shards=4, sizes=EIGHT_BILLION)
    make_adapter(root / "adapter", layers=32, rank=64, sizes=EIGHT_BILLION)
    commands = {
        COPY: ["sh", "-c", f"cp -r '{root}/base' '{out}' && sync '{out}'/* '{out}'"],
        MERGE: [sys.executable, "-m", "lora_tool", "merge", str(root / "adapter"), "-o", str(out), "-q"],
    }
    print("\n" + table(interleaved(commands, out=out, rounds=2), against=COPY))
    make_base(root / "small", layers=LAYERS)
    make_adapter(root / "of-small", layers=LAYERS, rank=64)
    peft = run([sys.executable, "-c", PEFT_MERGE, str(root / "small"), str(root / "of-small"), str(out)])
    times = _bytes_in(root / "base") / _bytes_in(root / "small")
    print(f"PEFT: {peft.wall * times:.0f} s, {times:.1f} times the {peft.wall:.1f} s of 1.5 GB")


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
