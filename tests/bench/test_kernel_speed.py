"""Merges at the speed of a copy, with the compiled kernel: `pytest -m bench -s tests/bench/test_kernel_speed.py`.

One command, one table: what the machine can do, then `cp -r; sync` beside merges of several ranks, in the kernel and in
numpy, and PEFT; warm and cold. Needs 4 GB of disk under pytest's temporary folder and about five minutes of a machine
that does nothing else: CPU seconds double when a neighbour runs on the same core.

Tried on the way, CPU seconds by turns on a busy machine (Zen 4, 2 cores, r=64 into 1.5 GB unless it says otherwise):
- blocks of 2^17, 2^18, 2^19, 2^20 weights: 2.1, 1.9, 1.7, 1.7 of user time; 2^19 stayed
- a tile of 12 by 32 in registers, its delta in 1.5 KB of stack, columns in parts that keep the right factor in the
  second-level cache: 0.35, 0.49, 1.35, 4.9 ns a weight at k=8, 16, 64, 256, which is 107 GF a core
- Linux's `fallocate` before `ftruncate`: system time 0.80 s against 0.95 s (6 rounds), 0.81 against 0.97 at r=16 (5); it
  stayed. `posix_fallocate` would write every block where a file system cannot do it
- no early write-back at all, or `sync_file_range`: no difference in CPU; early write-back stayed for the flush at the end
- `posix_fadvise(WILLNEED)` of the next units, for a base that is not in the page cache: 2.57 s of wall against 2.50 s
  (4 quiet rounds), and left out
- units of several files at once, so that two threads seldom wait for the lock that the system holds on a file while it is
  written: 0.1 s less CPU at r=16 and for q,v, but 0.03 to 0.09 s more wall at r=64, and a run that is killed has
  finished fewer files; left out
- early write-back by the thread that flushes, so that those who copy never wait for the disk's queue: q,v 1.24 against
  1.28 s, r=64 1.57 against 1.51 s; left out
- copying by way of memory in place of `copy_file_range`, 1.5 GB: 0.42 to 0.48 s of system time with pieces of 512 KB
  against 0.35 s, and now and then 2.5 s with pieces of 1 MB and more
- writing in pieces of 512 KB or 4 MB in place of 1 MB: no difference at r=64. Of small ones after a large one that
  took long, 16 MB in place of 64 MB: no difference
- the read-back check on one thread: at r=64 it saves 0.05 s of CPU, at r=256 it takes 0.05 s longer; left at all cores
- prefetching right or left factors in the product, 128, 384 or 512 KB of right factors in place of 256: no difference
- io_uring, in C, 1.6 GB from one buffer, written and flushed (3 quiet rounds): 1.24 to 1.51 s in pieces of 64 KB, 16 at a
  time, 1.57 to 3.9 s in pieces of 1 MB, where `pwrite` of 64 KB takes 1.22 to 1.29 s and less CPU (0.5 against 0.7 s);
  past the page cache, 8 to 32 pieces of 1 and 4 MB at a time, 1.26 to 1.6 s, `pwrite` 1.42 to 1.55 s: it is the disk that
  takes 1.2 s; Docker's default seccomp profile forbids it, too
- mapping an input that is in the page cache, and looking at all of it: 0.07 s for 1.6 GB, 0.09 to 0.23 s read in pieces of
  1 MB; left out, because a file that is cut short meanwhile ends the process
- not tried: FICLONERANGE (ext4 has none)
- O_DIRECT of whole pages of each block, where it was computed: r=64 2.38 against 1.83 s, q,v 1.92 against 1.39 s (5 times),
  although it takes 0.1 to 0.3 s less CPU; with 4, 6 and 10 threads, so that some compute while others wait for the disk,
  no faster (4 rounds each)
- copies by `copy_file_range` whose offsets differ by 0, 8 or 64 bytes from pages: no difference
- at r=256 the product alone is 3.0 of 5.4 s of CPU (4.8 ns a weight), 1.5 s of wall on two cores, where a copy takes 1.0;
  a core that does nothing but fuse multiplications and additions in registers needs 4.4 ns (116 GF)
- one call of the kernel for a whole unit, which reads, merges and writes block after block, in place of calls of Python for
  each block: 2.35 s of CPU against 2.51 at r=64 (4 rounds at load 9), and a thread waits 0.3 s for others in place of 0.5;
  it stayed. In it blocks of 2^16, 2^17, 2^18, 2^19 weights: 2.47, 2.35, 2.30, 2.35 s; 2^19 stayed
- the interpreter's switch interval at 0.2 ms in place of 5: no difference that can be seen at load 9
- numpy loaded before the adapter's values are looked at, 32 MB at r=16: 0.012 s of CPU for that in place of 0.03; it stayed
- of 2.5 s of CPU at r=64 (`perf`) the kernel takes 0.87, the system 0.9 (writing 0.45, reading 0.20, early write-back 0.12,
  copies of what is not merged 0.07), Python 0.5, of which 0.33 before the first unit, the hash of the adapter 0.08
- of the wall at r=64, 1.5 s, the start takes 0.4 (imports 0.25, plan 0.07, numpy 0.05), on one core, beside which the
  adapter is hashed; then both cores are busy, and the disk is not. Samples of a file are read back while it is flushed:
  0.04 s of CPU for each file, which the end waited for after the last
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from lora_tool.core.tensors import DType
from lora_tool.native.library import VARIABLE, kernel
from lora_tool.native.structures import KernelTerm
from tests.bench.models import make_adapter, make_base
from tests.bench.processes import Run, interleaved, ratio
from tests.bench.test_merge_speed import LAYERS, PEFT_MERGE

ROUNDS = 5
COLD_ROUNDS = 3
PEFT_ROUNDS = 2
COPY, PEFT = "cp -r; sync", "PEFT load, merge, save r=64"
AIMS = {
    "merge r=64": "wall ≤ 1.45, towards 1.2; ≤ 85 MB",
    "merge r=16": "wall ≤ 1.25",
    "merge r=256": "wall ≤ 2.6; ≤ 135 MB",
    "merge q,v r=64": "wall ≤ 1.15",
    "merge r=64, cold": "wall ≤ 1.3, towards 1.1",
}

pytestmark = pytest.mark.bench


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bench")
    make_base(root / "base", layers=LAYERS)
    for rank in (16, 64, 256):
        make_adapter(root / f"r={rank}", layers=LAYERS, rank=rank)
    make_adapter(root / "q,v r=64", layers=LAYERS, rank=64, targets=("self_attn.q_proj", "self_attn.v_proj"))
    return root


def test_against_the_copy_and_peft(folders: Path) -> None:
    out = folders / "out"
    copy = ["sh", "-c", f"cp -r '{folders}/base' '{out}' && sync '{out}'/* '{out}'"]

    def merge(name: str, *settings: str) -> list[str]:
        asked = ["-m", "lora_tool", "merge", str(folders / name), "-o", str(out), "-q"]
        return ["env", *settings, sys.executable, *asked]

    required = f"{VARIABLE}=require"
    print("\n" + machine(folders))
    warm = {
        COPY: copy,
        **{f"merge {name}": merge(name, required) for name in ("r=64", "r=16", "r=256", "q,v r=64")},
        "merge r=64, numpy": merge("r=64", f"{VARIABLE}=off"),
    }
    runs = interleaved(warm, out=out, rounds=ROUNDS)
    peft = {PEFT: [sys.executable, "-c", PEFT_MERGE, str(folders / "base"), str(folders / "r=64"), str(out)]}
    cold = {f"{COPY}, cold": copy, "merge r=64, cold": merge("r=64", required)}
    colds = interleaved(cold, out=out, rounds=COLD_ROUNDS, cold=(folders / "base", folders / "r=64"))
    slow = interleaved(peft, out=out, rounds=PEFT_ROUNDS)
    print(f"{'':<28}{'wall s':>8}{'user+sys s':>12}{'peak MB':>9}{'to the copy':>13}   aim")
    print(lines(runs, against=COPY))
    print(lines(colds, against=f"{COPY}, cold"))
    print(lines(slow, against=None))
    theirs, ours = (statistics.median(one.cpu for one in some) for some in (slow[PEFT], runs["merge r=64"]))
    print(f"CPU of PEFT against merge r=64: {theirs / ours:.1f} × (aim ≥ 6, towards 8)")


def lines(runs: Mapping[str, Sequence[Run]], *, against: str | None) -> str:
    """Return medians as text; ratios of wall clock are taken round by round."""
    made = []
    for name, taken in runs.items():
        wall, cpu, rss = (statistics.median(getattr(one, field) for one in taken) for field in ("wall", "cpu", "rss"))
        times = f"{ratio(taken, runs[against], 'wall'):>11.2f} ×" if against else f"{'':>13}"
        made.append(f"{name:<28}{wall:>8.2f}{cpu:>12.2f}{rss:>9.0f}{times}   {AIMS.get(name, '')}")
    return "\n".join(made)


def machine(folder: Path) -> str:
    """Return what the machine has to give: the kernel's peak, copying in memory, and writing to the disk."""
    found = kernel()
    assert found is not None, "pip install -e . compiles the kernel"
    rows, columns, depth = 16 * found.rows, 8 * found.columns, 256
    left, right = (np.ones(length * depth, np.float32) for length in (rows, columns))
    weights = np.zeros((rows, columns), np.uint16)
    term = KernelTerm(left.ctypes.data, right.ctypes.data, depth, 1.0)
    place = weights.ctypes.data

    def product() -> None:
        found.merge(place, DType.BF16, place, DType.BF16, (rows, columns), (term,))

    source, target = np.ones(1 << 28, np.uint8), np.zeros(1 << 28, np.uint8)

    def write() -> None:
        with (folder / "written").open("wb") as file:
            file.write(source.data)
            os.fsync(file.fileno())
        (folder / "written").unlink()

    fused, copied, written = best(product, 20), best(lambda: np.copyto(target, source), 5), best(write, 3)
    return (
        f"{found}: {2e-9 * rows * columns * depth / fused:.0f} GF a core at k={depth}; memory copied at "
        f"{1e-9 * source.nbytes / copied:.1f} GB/s, written and flushed at {1e-9 * source.nbytes / written:.2f} GB/s"
    )


def best(call: Callable[[], object], times: int) -> float:
    """Return the least seconds of a call."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)
