"""`--resume`: finished files of a killed run are taken over after a look at them, and the result is the same bytes."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lora_tool import plan_merge
from lora_tool.checkpoints import AdapterDir, open_checkpoint, open_model
from lora_tool.core.tensors import DType
from lora_tool.execution.engine import execute
from lora_tool.execution.journal import NAME
from lora_tool.plans.core.plan import Plan
from lora_tool.verification.checking import check_written
from lora_tool.verification.verified import summary_json
from tests.hostile.folders import Pair, copy_pair, environment, left_behind, lora_tool
from tests.hostile.test_killed import SLOW
from tests.hostile.test_output import content

MANY_FILES = ("--max-shard-size", "600")


def partial(pair: Pair) -> Path:
    return pair.out.parent / f".{pair.out.name}.lora-tool-partial"


def kill_midway(pair: Pair) -> None:
    """Start a slow merge and kill it once a file is finished."""
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, *pair.arguments, *MANY_FILES, "--quiet", "--jobs", "1"],
        env=environment(),
        stdout=subprocess.DEVNULL,
    )
    limit = time.monotonic() + 30
    while time.monotonic() < limit and len(records(pair)) < 2:
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert records(pair)
    assert not pair.out.exists()


def records(pair: Pair) -> list[Path]:
    return sorted((partial(pair) / NAME).glob("*.json"))


def kept_inodes(pair: Pair) -> dict[str, int]:
    names = [path.stem for path in records(pair)]
    return {name: (partial(pair) / name).stat().st_ino for name in names}


def expected(pair: Pair) -> dict[str, bytes]:
    quiet = pair.out.parent / "quiet"
    arguments = [str(quiet) if argument == str(pair.out) else argument for argument in pair.arguments]
    assert lora_tool(*arguments, *MANY_FILES).code == 0
    return content(quiet)


def test_finished_files_are_kept_and_the_rest_is_written(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    whole = expected(pair)
    kill_midway(pair)
    kept = kept_inodes(pair)
    assert kept
    done = lora_tool(*pair.arguments, *MANY_FILES, "--resume")
    assert done.code == 0, done.err
    assert content(pair.out) == whole
    assert {name: (pair.out / name).stat().st_ino for name in kept} == kept
    assert left_behind(pair) == {"out", "quiet"}


def flip_a_byte(pair: Pair, name: str) -> None:
    path = partial(pair) / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def cut(pair: Pair, name: str) -> None:
    path = partial(pair) / name
    path.write_bytes(path.read_bytes()[:-8])


def forget(pair: Pair, name: str) -> None:
    (partial(pair) / name).unlink()


def tear_the_record(pair: Pair, name: str) -> None:
    path = partial(pair) / NAME / f"{name}.json"
    path.write_text(path.read_text()[:40])


@pytest.mark.parametrize("injure", [flip_a_byte, cut, forget, tear_the_record])
def test_a_file_that_is_not_as_it_was_is_written_again(injure: Callable[[Pair, str], None], tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    whole = expected(pair)
    kill_midway(pair)
    injure(pair, next(iter(kept_inodes(pair))))
    done = lora_tool(*pair.arguments, *MANY_FILES, "--resume")
    assert done.code == 0, done.err
    assert content(pair.out) == whole


def test_a_finished_output_stays_and_another_is_not_replaced(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    assert lora_tool(*pair.arguments).code == 0
    inode = pair.out.stat().st_ino
    again = lora_tool(*pair.arguments, "--resume")
    assert (again.code, pair.out.stat().st_ino) == (0, inode), again.err
    assert "finished before, and left as it is" in again.out
    other = lora_tool(*pair.arguments, "--resume", "--dtype", "float32")
    assert (other.code, pair.out.stat().st_ino) == (6, inode)
    assert "exists already" in other.err


def test_another_plan_takes_nothing_over(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    kill_midway(pair)
    done = lora_tool(*pair.arguments, *MANY_FILES, "--resume", "--dtype", "float32")
    assert done.code == 0, done.err
    merged = open_model(pair.out)
    assert {tensor.dtype for tensor in merged.tensors.values()} == {DType.F32}
    assert merged.problems == ()


def test_without_it_a_killed_run_is_cleared_away(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    whole = expected(pair)
    kill_midway(pair)
    assert lora_tool(*pair.arguments, *MANY_FILES).code == 0
    assert content(pair.out) == whole
    assert left_behind(pair) == {"out", "quiet"}


def many_shards(tmp_path: Path) -> tuple[Plan, Pair]:
    pair = copy_pair(tmp_path)
    adapter = open_checkpoint(pair.adapter)
    assert isinstance(adapter, AdapterDir)
    return plan_merge(open_model(pair.base), adapter, max_shard_size=1), pair


def test_few_files_are_open_at_once(tmp_path: Path) -> None:
    plan, pair = many_shards(tmp_path)
    assert len(plan.shards) > 15
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 26, hard))  # fewer than there are shards to read and to write
    try:
        execute(plan, pair.out, jobs=2, check=lambda folder: summary_json(check_written(plan, folder)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list(pair.out.glob("*.safetensors"))) == len(plan.shards)
