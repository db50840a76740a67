"""What the parent makes of workers that end in one way or another; they are played by scripts, so that it costs nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lora_tool.errors import TrainingFailed
from lora_tool.train import launch
from lora_tool.train.config import GuardSettings, RunConfig, read_run_config
from lora_tool.train.job import FOLDER_VARIABLE, TrainingJob, TrainingOutcome, TrainingStatus, write_job
from lora_tool.train.methods import METHODS

BEGIN = """
import os, signal, sys
from pathlib import Path
from lora_tool.train.job import TrainingOutcome, TrainingStatus, write_begun, write_outcome
folder = Path(os.environ["LORA_TOOL_JOB"])
def fails(rank, error):
    write_outcome(folder, rank, TrainingOutcome(status=TrainingStatus.FAILED, error=error))
"""


def ended(monkeypatch: pytest.MonkeyPatch, script: str) -> object:
    monkeypatch.setattr(launch, "launch_command", lambda _: [sys.executable, "-c", BEGIN + script])
    return launch.launch(RunConfig(method=METHODS["sft"]))


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("sys.exit(1)", "before a worker began"),
        ("os.kill(os.getpid(), signal.SIGTERM)", "SIGTERM"),
        ("write_begun(folder, 0); os.kill(os.getpid(), signal.SIGKILL)", "the worker died without an error"),
        ("write_begun(folder, 0); os._exit(5)", "the worker died without an error"),
        (
            "write_begun(folder, 0); write_begun(folder, 1); fails(0, 'RuntimeError: Connection closed by peer'); sys.exit(1)",
            "the worker of rank 1 died without an error",
        ),
    ],
)
def test_a_worker_that_says_nothing_is_said_to_be_killed(
    monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    with pytest.raises(TrainingFailed, match=said):
        ended(monkeypatch, script)


@pytest.mark.parametrize("other", ["", "fails(0, 'RuntimeError: [gloo] Connection closed by peer');"])
def test_the_cause_is_that_of_the_worker_that_failed(monkeypatch: pytest.MonkeyPatch, other: str) -> None:
    # its launcher ends the other one, which says nothing, or that its peer has left
    outcome = ended(
        monkeypatch,
        f"write_begun(folder, 0); write_begun(folder, 1); {other} fails(1, 'ValueError: mine'); sys.exit(1)",
    )
    assert isinstance(outcome, TrainingOutcome)
    assert (outcome.status, outcome.error) == (TrainingStatus.FAILED, "ValueError: mine")


def test_a_crash_after_the_work_was_done_takes_no_result_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # torch's threads can abort a process while Python ends
    done = "write_outcome(folder, {0}, TrainingOutcome(status=TrainingStatus.DONE, facts={{'rank': {0}}}));"
    begun = "write_begun(folder, 0); write_begun(folder, 1);"
    outcome = ended(monkeypatch, f"{begun} {done.format(0)} {done.format(1)} sys.exit(1)")
    assert isinstance(outcome, TrainingOutcome)
    assert (outcome.status, outcome.facts) == (TrainingStatus.DONE, {"rank": 0})
    assert "exit code 1 of the launcher came after every worker was done" in capsys.readouterr().err
    with pytest.raises(TrainingFailed, match="the worker died without an error"):
        ended(monkeypatch, f"{begun} {done.format(1)} sys.exit(1)")


@pytest.mark.parametrize(
    ("status", "left"), [(TrainingStatus.DONE, True), (TrainingStatus.CHECKED, True), (TrainingStatus.FAILED, False)]
)
def test_a_worker_that_is_done_ends_torchs_communication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: TrainingStatus, *, left: bool
) -> None:
    from torch import distributed

    from lora_tool.train import worker

    write_job(TrainingJob(guard=GuardSettings(), method=METHODS["sft"]), tmp_path)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setattr(worker.TrainingProcess, "whole", lambda _: TrainingOutcome(status=status))
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", world_size=1, rank=0)
    try:
        assert worker.work() == 0
        assert distributed.is_initialized() is not left
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("text", "asked"),
    [("", None), ("num_processes: 2", 2), ("accelerate_config: c.yaml", 3)],
)
def test_the_processes_that_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, asked: int | None
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("num_processes: 3\n")
    Path("run.yaml").write_text(text)
    assert read_run_config(METHODS["sft"], Path("run.yaml"), ()).processes == asked


@pytest.mark.filterwarnings("default")
def test_accelerate_starting_fewer_is_told() -> None:
    from lora_tool.train.live_checks import process_findings

    (found,) = process_findings(2, 1)
    assert (found.code, found.severity.value) == ("processes", "warning")
    assert not list(process_findings(2, 2))
    assert not list(process_findings(None, 2))


ENDLESS = "lifeline.follow(folder); (folder.parent / 'pid').write_text(str(os.getpid())); time.sleep(60)"
"""A worker that trains, as whoever launched it sees it."""


def gone(pid: int, seconds: float = 10.0) -> bool:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def worker_of(folder: Path, parent: subprocess.Popen[str]) -> int:
    while not (text := (folder / "pid").read_text() if (folder / "pid").exists() else ""):
        assert parent.poll() is None
        time.sleep(0.05)
    return int(text)


@pytest.mark.parametrize("killed", ["command", "launcher"])
def test_workers_end_with_what_was_killed_above_them(tmp_path: Path, killed: str) -> None:
    worker = BEGIN + "import time\nfrom lora_tool.train import lifeline\n" + ENDLESS
    launcher = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {worker!r}]))"
    command = (
        "import sys\nfrom lora_tool.train import launch\nfrom lora_tool.train.config import RunConfig\n"
        "from lora_tool.train.methods import METHODS\n"
        f"launch.launch_command = lambda _: [sys.executable, '-c', {launcher!r}]\n"
        "launch.launch(RunConfig(method=METHODS['sft']))"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", command], env=environment, stderr=subprocess.PIPE, text=True)
    pid = worker_of(tmp_path, parent)
    os.kill(parent.pid if killed == "command" else os.getpgid(pid), signal.SIGKILL)
    assert gone(pid)
    said = parent.communicate()[1]
    assert list(tmp_path.glob("lora-tool-train-*")) == []
    assert killed == "command" or "the launcher was killed by SIGKILL" in said
