"""What the page about several machines has one type is typed, as far as one machine can."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hostile.folders import FIXTURES, SOURCE, environment
from tests.hostile.test_output import content
from tests.readme import DOCUMENTATION

PAGE = (DOCUMENTATION / "machines.md").read_text()
SCRIPTS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def typed(tmp_path: Path) -> Path:
    for part in ("base", "adapter"):
        shutil.copytree(FIXTURES / "causal-llama" / part, tmp_path / part)
    program = tmp_path / "bin" / "lora-tool"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m lora_tool "$@"\n')
    program.chmod(0o755)
    return tmp_path


def run(script: str, folder: Path, **variables: str) -> None:
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    variables |= environment() | {"PATH": path, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        ["bash", "-eu", "-c", script], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_jobs_of_an_array_and_the_one_after_them_write_the_model(typed: Path) -> None:
    slurm, finish, kubernetes, *_ = SCRIPTS
    run(slurm, typed, SLURM_ARRAY_TASK_ID="2", SLURM_ARRAY_TASK_COUNT="2")
    run(kubernetes, typed, JOB_COMPLETION_INDEX="0", COMPLETIONS="2")
    assert not (typed / "model").exists()
    run(finish, typed)
    run("lora-tool merge adapter --base base -o whole", typed)
    assert content(typed / "model") == content(typed / "whole")
