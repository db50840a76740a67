"""Timing whole processes: wall, CPU and peak memory as the system accounts for them, in interleaved rounds.

lora-tool is compiled to bytecode first, as pip does where it installs: an environment that forbids writing bytecode has
each process compile the sources anew, which takes a quarter of a second.
"""

from __future__ import annotations

import compileall
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import lora_tool


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One finished process: seconds of wall and of CPU (user + system), peak resident memory in MB."""

    wall: float
    cpu: float
    rss: float


def run(command: Sequence[str], *, env: Mapping[str, str] | None = None) -> Run:
    """Return the cost of running `command` to its end, which must be successful."""
    _compile_sources()
    # through a small process of its own: a child's peak memory counts from its parent's at the fork
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, *command],
        stdout=subprocess.PIPE,
        env={**os.environ, **(env or {})},
        check=True,
        text=True,
    )
    wall, cpu, rss = map(float, done.stdout.split())
    return Run(wall=wall, cpu=cpu, rss=rss)


@cache
def _compile_sources() -> None:
    compileall.compile_dir(str(Path(lora_tool.__file__).parent), quiet=1)


_MEASURE = """
import os, sys, time
start = time.perf_counter()
null = os.open(os.devnull, os.O_WRONLY)
pid = os.posix_spawnp(sys.argv[1], sys.argv[1:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, null, 1)])
_, status, usage = os.wait4(pid, 0)
print(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def interleaved(
    commands: Mapping[str, Sequence[str]], *, out: Path, rounds: int, cold: Sequence[Path] = ()
) -> dict[str, list[Run]]:
    """Return `rounds` runs of every command, taken in turn; `out` is removed between runs, outside the clock.

    The files of the folders `cold` are dropped from the page cache before each run.
    """
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            shutil.rmtree(out, ignore_errors=True)
            subprocess.run(["sync"], check=True)
            for folder in cold:
                _forget(folder)
            runs[name].append(run(command))
    shutil.rmtree(out, ignore_errors=True)
    return runs


def _forget(folder: Path) -> None:
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def table(runs: Mapping[str, Sequence[Run]], *, against: str) -> str:
    """Return medians as text, with the median of the ratios to `against` taken round by round."""
    lines = [f"{'':<32}{'wall s':>8}{'cpu s':>8}{'rss MB':>8}   against {against}: wall, cpu"]
    for name, taken in runs.items():
        wall, cpu, rss = (statistics.median(getattr(one, field) for one in taken) for field in ("wall", "cpu", "rss"))
        ratios = f"{ratio(taken, runs[against], 'wall'):>8.2f} ×{ratio(taken, runs[against], 'cpu'):>8.2f} ×"
        lines.append(f"{name:<32}{wall:>8.2f}{cpu:>8.2f}{rss:>8.0f}   {ratios}")
    return "\n".join(lines)


def ratio(some: Sequence[Run], others: Sequence[Run], field: str) -> float:
    """Return the median of the ratios of one figure, round by round."""
    return float(statistics.median(getattr(a, field) / getattr(b, field) for a, b in zip(some, others, strict=True)))
