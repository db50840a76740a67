"""`lora-tool consolidate`, as it is typed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lora_tool.checkpoints import open_sharded
from lora_tool.checkpoints.states import file_values
from lora_tool.execution import local_engine as worker
from lora_tool.plans.consolidate.library import plan_consolidate
from tests.cli.calling import FIXTURES, Caller

REWARD, FULL, HEADLESS = (f"fixtures/zero/stage3-{name}" for name in ("reward", "full", "headless"))

INTERRUPTED = """
import os, signal, sys, threading, time
from lora_tool.cli import consolidate
from lora_tool.cli.main import main
from lora_tool.checkpoints import open_sharded
from lora_tool.checkpoints.states import file_values
from lora_tool.plans.consolidate.library import plan_consolidate
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
file_values.BLOCK_BYTES = 64
look = file_values._Values.look_at
once = threading.Lock()
def slowly(*arguments):
    if once.acquire(blocking=False):  # two threads begin together
        os.kill(os.getpid(), signal.SIGINT)
    seen.append(1)
    time.sleep(0.01)
    look(*arguments)
seen = []
file_values._Values.look_at = slowly
try:
    main(sys.argv[1:])
finally:
    print(len(seen))
"""
"""The command, interrupted when the first values are looked at; it prints how many blocks it looked at in all."""


@pytest.mark.parametrize("checkpoint", [REWARD, FULL, "fixtures/fsdp2-reward"])
def test_a_dry_run_reads_no_values_and_writes_nothing(
    checkpoint: str, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_values.FileValues, "run", None)  # calling it would fail
    called = call("consolidate", checkpoint, "-o", "out", "--dry-run")
    assert called.code == 0
    assert "would write out" in called.out
    planned = call("consolidate", checkpoint, "-o", "out", "--dry-run", "--json").json
    assert planned["output"] == "out"
    assert not Path("out").exists()


def test_the_result_as_json(call: Caller, tmp_path: Path) -> None:
    out = tmp_path / "adapter"
    done = call("consolidate", REWARD, "-o", out, "--json")
    assert done.code == 0
    assert done.json["counts"] == {"copied": 31, "dropped": 26}
    assert sorted(done.json["files"]) == ["adapter_config.json", "adapter_model.safetensors"]
    told = json.loads((out / "lora_tool.json").read_text())
    assert told["inputs"]["checkpoint"]["world_size"] == 2
    assert told["values_checked"] is True


def test_the_default_output_is_beside(call: Caller, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "zero" / "stage3-full", tmp_path / "run")
    assert call("consolidate", tmp_path / "run").code == 0
    assert (tmp_path / "run-model" / "model.safetensors").is_file()
    assert call("consolidate", tmp_path / "run").code == 6


def test_a_lost_head_is_refused_and_can_be_ignored(call: Caller, tmp_path: Path) -> None:
    out = tmp_path / "adapter"
    refused = call("consolidate", HEADLESS, "-o", out)
    assert refused.code == 1
    assert "LT415" in refused.err
    assert "the head is lost" in refused.err
    assert "--ignore LT415" in refused.err
    assert "1 error: LT415" in refused.err, "as every command prints findings"
    assert not out.exists()
    ignored = call("consolidate", HEADLESS, "-o", out, "--ignore", "lt415")
    assert ignored.code == 0
    assert "1 error: LT415" in ignored.err
    told = json.loads((out / "lora_tool.json").read_text())
    assert told["ignored"] == ["LT415"]
    assert any("the head is lost" in warning for warning in told["warnings"])
    assert "LT302" in call("validate", out).out


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A checkpoint with one bit of a master weight turned over."""
    run = Path(shutil.copytree(FIXTURES.parent / REWARD, tmp_path / "in" / "run"))
    step = next(plan_consolidate(open_sharded(run)).steps)
    span = step.op.source.spans[-1]
    with span.path.open("r+b") as file:
        file.seek(span.offset)
        (byte,) = file.read(1)
        file.seek(span.offset)
        file.write(bytes([byte ^ 1]))
    return run


def test_values_that_are_damaged_are_not_published(damaged: Path, call: Caller, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for options in ([], ["--resume"], ["--resume"]):
        refused = call("consolidate", damaged, "-o", tmp_path / "out" / "adapter", *options)
        assert refused.code == 1
        assert "LT411" in refused.err
        assert "to continue despite these errors: --ignore LT411" in refused.err
        assert [path.name for path in tmp_path.glob("out/*") if not path.name.startswith(".")] == []
    assert not list(tmp_path.glob("out/.*/.lora-tool-journal")), "what was refused is not taken over"


def test_damaged_values_that_are_ignored_are_told(damaged: Path, call: Caller, tmp_path: Path) -> None:
    done = call("consolidate", damaged, "-o", tmp_path / "out", "--json", "--ignore", "LT411")
    assert done.code == 0
    assert "warning: LT411" in done.err
    told = json.loads((tmp_path / "out" / "lora_tool.json").read_text())["warnings"]
    assert told == done.json["warnings"]
    assert [warning.partition(" ")[0] for warning in told] == ["LT411"]


def test_a_disk_that_is_full_is_told_while_values_are_read(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    for name in ("_copy_in_kernel", "write_exactly"):  # what lies in short pieces is put together first
        monkeypatch.setattr(worker, name, full)
    called = call("consolidate", REWARD, "-o", tmp_path / "out")
    assert called.code == 3
    assert "the disk is full" in called.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["state", "model", "adapter"])
def test_what(what: str, call: Caller, tmp_path: Path) -> None:
    called = call("consolidate", REWARD, "-o", tmp_path / "out", "--what", what)
    assert called.code == (3 if what == "model" else 0)
    if what == "model":
        assert "holds a PEFT model, which is not a plain model" in called.err


@pytest.mark.parametrize("checkpoint", ["fixtures/reward-qwen2/base", "fixtures/zero", "nowhere"])
def test_what_is_no_checkpoint(checkpoint: str, call: Caller) -> None:
    called = call("consolidate", checkpoint, "-o", "out")
    assert called.code == 3
    assert len(called.err.splitlines()) <= 4


def test_interrupted_while_it_reads(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "consolidate", str(FIXTURES.parent / FULL), "-o", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 130, process.stderr
    assert process.stderr.strip() == "interrupted"
    assert int(process.stdout.splitlines()[-1]) < 10, "it went on reading"
    assert list(tmp_path.iterdir()) == []


def test_more_rank_files_than_may_be_open(tmp_path: Path) -> None:
    """40 ranks are 80 files; a user may have 256 open and 1,000 ranks."""
    from tests.bench.zero_checkpoints import write

    write(tmp_path / "run", {"model.norm.weight": (77, 3)}, {"model.embed.weight": (1000,)}, ranks=40)
    limited = 'ulimit -n 64; exec "$@"'
    out = ["-o", str(tmp_path / "out")]
    for command in (["validate", "--deep"], ["consolidate", "--what", "state", *out]):
        done = subprocess.run(
            ["sh", "-c", limited, "sh", sys.executable, "-m", "lora_tool", *command, str(tmp_path / "run")],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
