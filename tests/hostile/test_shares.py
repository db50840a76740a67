"""Shares of a plan, as jobs of an array write them: in any order, twice, at once, killed; finished, they are one run's bytes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from lora_tool import Share, execute_share, plan_consolidate, plan_merge
from lora_tool.core.errors import ExecutionError, OutputExists, SourceChanged
from lora_tool.execution import at_work as at_work_module
from lora_tool.execution.attempts import WorkPart, parts_of
from lora_tool.execution.engine import execute
from lora_tool.execution.folder import shared_folder
from lora_tool.execution.journal import NAME, Journal, digest_of, recorded_looks
from lora_tool.execution.work import Work
from lora_tool.plans.core.plan import Plan
from tests.hostile.folders import FIXTURES, Pair, copy_pair, environment, left_behind, lora_tool
from tests.hostile.test_killed import SLOW
from tests.hostile.test_output import content
from tests.hostile.test_resume import MANY_FILES, expected, partial

RANKS = FIXTURES / "zero" / "stage3-reward"


def journal_of(pair: Pair) -> Path:
    return partial(pair) / NAME


def started(pair: Pair, part: str) -> subprocess.Popen[str]:
    """Return the slow command."""
    return subprocess.Popen(
        [sys.executable, "-c", SLOW, *pair.arguments, *MANY_FILES, "--quiet", "--jobs", "1", "--part", part],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def at_work(pair: Pair, part: str) -> subprocess.Popen[str]:
    """Return the slow command, already writing."""
    process = started(pair, part)
    assert process.stdout is not None
    assert process.stdout.readline() == "working\n"
    return process


def ended(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=60)
    return process.returncode


@pytest.mark.parametrize("order", [["1/1"], ["3/3", "1/3", "2/3", "1/3"], [f"{part}/99" for part in range(99, 0, -9)]])
def test_shares_in_any_order_are_finished_as_one_run(order: list[str], tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    whole = expected(pair)
    for part in order:
        done = lora_tool(*pair.arguments, *MANY_FILES, "--part", part)
        assert done.code == 0, done.err
        assert not pair.out.exists()
    done = lora_tool(*pair.arguments, *MANY_FILES, "--resume")
    assert done.code == 0, done.err
    assert content(pair.out) == whole
    assert left_behind(pair) == {"out", "quiet"}


def test_what_a_share_says(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    said = lora_tool(*pair.arguments, *MANY_FILES, "--part", "1/2").out
    assert said.startswith("part 1/2 written: ")
    assert "files of other parts still missing\nnext: when all parts have ended" in said
    told = json.loads(lora_tool(*pair.arguments, *MANY_FILES, "--part", "2/2", "--json").out)
    assert told["missing"] == []
    assert told["part"] == "2/2"
    assert set(told["files"]) < {path.name for path in partial(pair).iterdir()}


@pytest.mark.parametrize("part", ["0/3", "4/3", "3", "1/0", "-1/3", "a/b", "1/3/3"])
def test_what_is_no_share_is_a_usage_error(part: str, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    done = lora_tool(*pair.arguments, f"--part={part}")
    assert done.code == 2
    assert "expected I/N such as 3/8" in done.err


@pytest.mark.parametrize("option", [["--resume"], ["--engine", "ray"]])
def test_a_share_contradicts(option: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lora_tool_ray.ray_cluster.RayCluster.require", lambda _: None)
    pair = copy_pair(tmp_path)
    done = lora_tool(*pair.arguments, "--part", "1/2", *option)
    assert done.code == 2
    assert "--part" in done.err
    assert left_behind(pair) == set()


def test_shares_at_the_same_time_one_of_them_twice(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    whole = expected(pair)
    processes = [started(pair, part) for part in ("1/2", "2/2", "2/2")]
    assert [ended(process) for process in processes] == [0, 0, 0]
    assert not [path for path in journal_of(pair).iterdir() if path.is_dir() or "at-work" in path.name]
    assert lora_tool(*pair.arguments, *MANY_FILES, "--resume").code == 0
    assert content(pair.out) == whole


def test_a_killed_share_is_written_by_whoever_comes_next(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    whole = expected(pair)
    process = at_work(pair, "1/2")
    limit = time.monotonic() + 30
    while time.monotonic() < limit and not list(journal_of(pair).glob("*.json")):
        time.sleep(0.01)
    process.kill()
    ended(process)
    assert any(path.is_dir() for path in journal_of(pair).iterdir()), "what it had begun is left"
    kept = {path.stem: (partial(pair) / path.stem).stat().st_ino for path in journal_of(pair).glob("*.json")}
    assert lora_tool(*pair.arguments, *MANY_FILES, "--part", "2/2").code == 0
    assert lora_tool(*pair.arguments, *MANY_FILES, "--resume").code == 0
    assert content(pair.out) == whole
    assert {name: (pair.out / name).stat().st_ino for name in kept} == kept
    assert left_behind(pair) == {"out", "quiet"}


def test_nobody_finishes_while_a_share_is_at_work(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    process = at_work(pair, "1/2")
    for option in ("--resume", "--overwrite"):
        done = lora_tool(*pair.arguments, *MANY_FILES, option)
        assert done.code == 6, done.err
        assert "another run is writing" in done.err
    process.send_signal(signal.SIGINT)
    ended(process)
    assert lora_tool(*pair.arguments, *MANY_FILES, "--resume").code == 0


@pytest.fixture
def half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A pair whose first share is written, where nobody waits long for a sign of life."""
    monkeypatch.setattr(at_work_module, "_LOOK_S", 0.05)
    monkeypatch.setattr(at_work_module, "_BEAT_S", 0.05)
    pair = copy_pair(tmp_path)
    assert lora_tool(*pair.arguments, *MANY_FILES, "--part", "1/2").code == 0
    return pair


def sign(pair: Pair, *, process: int, among: str, hours: float = 0) -> Path:
    """Return the sign of life of a share, left by a clock that is some hours ahead."""
    path = journal_of(pair) / f"{process}.at-work"
    said = {"who": "part 1/2", "alone": False, "host": "another-machine", "process": process, "among": among}
    path.write_text(json.dumps(said))
    then = time.time() + 3600 * hours
    os.utime(path, (then, then))
    return path


@pytest.mark.parametrize("hours", [-1, 0, 1])
def test_without_locks_a_sign_of_life_keeps_others_away_whatever_the_clocks_say(
    hours: float, half_written: Pair
) -> None:
    left = sign(half_written, process=os.getpid(), among="elsewhere", hours=hours)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(0.1):
            then = left.stat().st_mtime_ns + 10**8
            os.utime(left, ns=(then, then))

    with ThreadPoolExecutor(1) as threads:
        threads.submit(beat)
        done = lora_tool(*half_written.arguments, *MANY_FILES, "--resume")
        ended.set()
    assert done.code == 6
    assert "part 1/2 is at work on another-machine" in done.err
    assert left.exists()
    assert lora_tool(*half_written.arguments, *MANY_FILES, "--resume").code == 0, "whoever left it was killed"


def test_a_process_of_this_machine_that_has_ended_is_not_waited_for(
    half_written: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    sign(half_written, process=2**22 + 1, among=at_work_module._processes())
    monkeypatch.setattr(at_work_module, "_last_beat", lambda _: pytest.fail("looked at again"))
    assert lora_tool(*half_written.arguments, *MANY_FILES, "--resume").code == 0


def test_without_locks_no_share_begins_while_a_run_finishes(half_written: Pair) -> None:
    journal = Journal(partial(half_written), "")
    with at_work_module.at_work(journal, "another run", alone=True):
        done = lora_tool(*half_written.arguments, *MANY_FILES, "--part", "2/2")
        assert done.code == 6
        assert "another run is at work on " in done.err
    with (
        at_work_module.at_work(journal, "part 1/2", alone=False),
        at_work_module.at_work(journal, "part 2/2", alone=False),
        pytest.raises(OutputExists, match="part ./2 is at work"),
        at_work_module.at_work(journal, "another run", alone=True),
    ):
        pass
    assert not list(journal.path.glob("*.at-work"))


def test_a_share_of_another_plan_is_refused_and_removes_nothing(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    assert lora_tool(*pair.arguments, *MANY_FILES, "--part", "1/2").code == 0
    before = sorted(partial(pair).rglob("*"))
    done = lora_tool(*pair.arguments, *MANY_FILES, "--part", "2/2", "--dtype", "float32")
    assert done.code == 6
    assert "was begun from another plan" in done.err
    assert sorted(partial(pair).rglob("*")) == before


def test_another_inode_is_the_same_file_and_another_time_is_not(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    plan = plan_merge(pair.base, pair.adapter, max_shard_size=600)
    weights = next(pair.base.glob("*.safetensors"))
    shutil.copy2(weights, tmp_path / "copy")
    (tmp_path / "copy").replace(weights)
    again = plan_merge(pair.base, pair.adapter, max_shard_size=600)
    assert plan.inputs != again.inputs
    assert digest_of(plan) == digest_of(again)
    elsewhere = replace(plan, inputs=tuple(stamp.for_another_machine() for stamp in plan.inputs))
    execute(elsewhere, tmp_path / "one")
    os.utime(weights)
    with pytest.raises(SourceChanged, match="but was last written at another time"):
        execute(elsewhere, tmp_path / "two")


def work_of(plan: Plan, folder: Path) -> Work:
    journal = Journal(folder, digest_of(plan))
    journal.begin()
    looks = recorded_looks(plan, journal)
    return Work(plan=plan, folder=folder, digest=journal.digest, shards=plan.shards, checks=looks)


def test_a_part_is_plain_data_and_done_twice_the_same(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    plan = plan_merge(pair.base, pair.adapter, max_shard_size=600)
    with shared_folder(pair.out) as folder:
        for part in parts_of(work_of(plan, folder)):
            sent: WorkPart = pickle.loads(pickle.dumps(part))
            assert sent == part
            assert {stamp.path for stamp in sent.work.plan.inputs} <= {stamp.path for stamp in plan.inputs}
            reported: list[int] = []
            first = sent.run(reported.append)
            assert sum(reported) == sent.nbytes
            written = (folder / sent.name).stat()
            assert sent.run(lambda _: None) == first
            assert (folder / sent.name).stat().st_ino == written.st_ino, "what is there is not written again"
    execute(plan, pair.out, resume=True)
    execute(plan, tmp_path / "whole")
    assert content(pair.out) == content(tmp_path / "whole")


def test_values_are_looked_at_once_and_what_they_are_is_known_to_who_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_consolidate(RANKS)
    assert plan.values is not None
    for number in (1, 2):
        execute_share(plan, tmp_path / "out", Share(number=number, of=2))
    monkeypatch.setattr(type(plan.values.parts[0]), "run", lambda *_: pytest.fail("looked at again"))
    execute(plan, tmp_path / "out", resume=True)
    monkeypatch.undo()
    execute(plan, tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_share_whose_folder_is_taken_over_by_another_plan_publishes_nothing(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    plan = plan_merge(pair.base, pair.adapter, max_shard_size=600)
    with shared_folder(pair.out) as folder:
        part = next(iter(parts_of(work_of(plan, folder))))
        Journal(folder, "0" * 64).begin()
        with pytest.raises(ExecutionError, match="was not begun from this plan"):
            part.run(lambda _: None)
        assert not (folder / part.name).exists()


def test_who_shares_a_folder_keeps_only_others_away(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with shared_folder(out), shared_folder(out), pytest.raises(OutputExists, match="another run is writing"):
        execute(plan_consolidate(RANKS), out)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lora-tool-partial"]
