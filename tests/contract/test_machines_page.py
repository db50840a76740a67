"""What the page about several machines has one type is typed, as far as one machine can."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.hostile.folders import FIXTURES, SOURCE, environment
from tests.hostile.test_output import content
from tests.readme import DOCUMENTATION

PAGE = (DOCUMENTATION / "machines.md").read_text()
SCRIPTS, MANIFESTS = (
    re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) for kind in ("bash", "yaml")
)
SBATCH = """
import os, re, subprocess, sys
script = sys.argv[-1]
array = re.search("--array=([0-9]+)-([0-9]+)", open(script).read())
tasks = [str(task) for task in range(int(array[1]), int(array[2]) + 1)][1::4] if array else [""]
jobs = [subprocess.Popen(["bash", "-eu", script], env={**os.environ, "SLURM_ARRAY_TASK_ID": task}) for task in tasks]
print(171)
sys.exit(max(job.wait() for job in jobs))
"""
"""What Slurm does with a script, where six of the eight jobs of an array are lost with their machines."""


@pytest.fixture
def typed(tmp_path: Path) -> Path:
    """A folder with a base, an adapter, and the programs that are typed."""
    for part in ("base", "adapter"):
        shutil.copytree(FIXTURES / "causal-llama" / part, tmp_path / part)
    (tmp_path / "bin").mkdir()
    for name, arguments in (("lora-tool", "-m lora_tool"), ("sbatch", tmp_path / "sbatch.py")):
        program = tmp_path / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
        program.chmod(0o755)
    (tmp_path / "sbatch.py").write_text(SBATCH)
    return tmp_path


def run(script: str, folder: Path, **variables: str) -> None:
    path = os.pathsep.join([str(folder / "bin"), os.environ["PATH"]])
    variables |= environment() | {"PATH": path, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        ["bash", "-eu", "-c", script], cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_jobs_of_an_array_and_the_one_after_them_write_the_model(typed: Path) -> None:
    parts, finish, submit, *_ = SCRIPTS
    [job, _] = (yaml.safe_load(each) for each in MANIFESTS)
    completions, container = job["spec"]["completions"], job["spec"]["template"]["spec"]["containers"][0]
    assert job["spec"]["completionMode"] == "Indexed"
    shell, option, line = container["command"]
    assert (shell, option, completions) == ("sh", "-c", 8)
    run(line.replace("/data/", ""), typed, JOB_COMPLETION_INDEX="2")
    assert not (typed / "model").exists()
    for name, script in (("parts.sh", parts), ("finish.sh", finish)):
        (typed / name).write_text(script)
    run(submit, typed)
    run("lora-tool merge adapter --base base -o whole", typed)
    assert content(typed / "model") == content(typed / "whole")


def test_the_job_of_a_ray_cluster_types_what_is_typed_from_outside() -> None:
    [_, job] = (yaml.safe_load(each) for each in MANIFESTS)
    submitted = " ".join(SCRIPTS[-1].replace("\\\n", " ").split())
    assert submitted.endswith(f" -- {job['spec']['entrypoint']}")
