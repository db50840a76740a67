"""Killed or interrupted at any moment: nothing under the final name, and the next run gives the bytes of a quiet one."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hostile.folders import Pair, copy_pair, environment, left_behind, lora_tool
from tests.hostile.test_output import content

SLOW = """
import sys, time
from lora_tool.execution import engine, local_engine
from lora_tool.execution.backends.numpy_backend import NumpyBackend
from lora_tool.cli.main import main
copy, write = local_engine._copy, engine.write_file
def slowly(function):
    def slow(*arguments):
        print("working", flush=True)
        time.sleep(0.03)
        return function(*arguments)
    return slow
local_engine._copy = slowly(copy)
engine.write_file = local_engine.write_file = slowly(write)
NumpyBackend.run = slowly(NumpyBackend.run)
main(sys.argv[1:])
"""
"""The command with every unit and file taking 30 ms, so that a signal lands in the middle."""


def start(pair: Pair) -> subprocess.Popen[str]:
    """Return the slow merge, already writing."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *pair.arguments, "--quiet", "--jobs", "1"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a job in the background inherits that SIGINT is ignored
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509 - one thread, and no lock
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    return process


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an uninterrupted run writes, without the manifest, which names its inputs' folder."""
    pair = copy_pair(tmp_path_factory.mktemp("quiet"))
    assert lora_tool(*pair.arguments).code == 0
    return without_manifest(pair.out)


def without_manifest(folder: Path) -> dict[str, bytes]:
    return {name: data for name, data in content(folder).items() if name != "lora_tool.json"}


@pytest.mark.parametrize("seed", range(8))
def test_sigkill_leaves_nothing_and_the_next_run_is_whole(seed: int, quiet: dict[str, bytes], tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    process = start(pair)
    time.sleep(random.Random(seed).uniform(0, 0.6))
    process.kill()
    process.communicate(timeout=30)
    assert not pair.out.exists() or without_manifest(pair.out) == quiet
    done = lora_tool(*pair.arguments, "--overwrite")
    assert done.code == 0, done.err
    assert without_manifest(pair.out) == quiet
    assert left_behind(pair) == {"out"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("delay", [0, 0.1, 0.25])
def test_an_interrupt_ends_with_130_and_cleans_up(number: signal.Signals, delay: float, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    process = start(pair)
    time.sleep(delay)
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert errors.strip() == "interrupted"
    assert left_behind(pair) == set()
