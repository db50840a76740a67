"""The GitHub action, the pre-commit hook and the documentation's CI jobs: valid by their schemas, and their scripts run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ACTION = ROOT / ".github" / "actions" / "lora-tool" / "action.yml"


def jobs() -> dict[str, str]:
    """The YAML blocks of the page on CI by what they are for."""
    blocks = re.findall(
        r"^```yaml\n(.*?)^```$",
        (ROOT / ".github" / "docs" / "tasks" / "ci-step.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    found: dict[str, str] = {}
    for block in blocks:
        table = yaml.safe_load(block)
        kind = (
            "github"
            if "jobs" in table
            else "gitlab"
            if "lora-tool" in table
            else "pre-commit"
            if "repos" in table
            else ""
        )
        if kind:
            found.setdefault(kind, block)
    return found


def check(schema: str, path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_action_is_one() -> None:
    check("vendor.github-actions", ACTION)


@pytest.mark.parametrize(("kind", "schema"), [("github", "vendor.github-workflows"), ("gitlab", "vendor.gitlab-ci")])
def test_the_jobs_are_valid(kind: str, schema: str, tmp_path: Path) -> None:
    text = jobs()[kind]
    (tmp_path / "job.yml").write_text(text if kind == "gitlab" else f"on: push\n{text}")
    check(schema, tmp_path / "job.yml")


def test_no_input_is_a_part_of_a_script() -> None:
    for step in yaml.safe_load(ACTION.read_text())["runs"]["steps"]:
        assert "${{" not in step["run"]
        assert step["shell"] == "bash"


def run_action(tmp_path: Path, **inputs: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run the action's last script as the runner does, with lora-tool where the first step installs it."""
    action: dict[str, Any] = yaml.safe_load(ACTION.read_text())
    step = action["runs"]["steps"][-1]
    program = tmp_path / "lora-tool" / "bin" / "lora-tool"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m lora_tool "$@"\n')
    program.chmod(0o755)
    values = {name: str(entry.get("default", "")) for name, entry in action["inputs"].items()} | inputs
    env = {
        variable: values[re.fullmatch(r"\$\{\{ inputs\.([a-z-]+) \}\}", expression)[1]]  # type: ignore[index]
        for variable, expression in step["env"].items()
    }
    outputs = tmp_path / "outputs"
    more = {"RUNNER_TEMP": str(tmp_path), "GITHUB_ACTIONS": "true", "GITHUB_OUTPUT": str(outputs)}
    summary = {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=ROOT,
        env={**os.environ, **env, **more, **summary},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, outputs


def test_the_action_makes_a_model(tmp_path: Path) -> None:
    done, outputs = run_action(
        tmp_path,
        checkpoint="fixtures/reward-qwen2/adapter",
        output=str(tmp_path / "out put; rm -rf x"),
        task="reward",
        junit=str(tmp_path / "junit.xml"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert outputs.read_text() == f"output={tmp_path / 'out put; rm -rf x'}\n"
    assert (tmp_path / "out put; rm -rf x" / "lora_tool.json").is_file()
    assert (tmp_path / "junit.xml").is_file()
    assert (tmp_path / "summary.md").is_file()


def test_the_action_fails_with_annotations(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "fixtures" / "reward-qwen2", tmp_path / "reward")
    weights = tmp_path / "reward" / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-3])
    done, _ = run_action(tmp_path, checkpoint=str(weights.parent), output=str(tmp_path / "out"))
    assert done.returncode == 1
    assert "::error" in done.stderr
    assert not (tmp_path / "out").exists()


def test_the_gitlab_job_runs(tmp_path: Path) -> None:
    job = yaml.safe_load(jobs()["gitlab"])["lora-tool"]
    assert job["artifacts"]["reports"]["junit"] == "lora-tool.xml"
    (line,) = (line for line in job["script"] if line.startswith("lora-tool "))
    shutil.copytree(ROOT / "fixtures" / "reward-run", tmp_path / "reward-run")
    shutil.copytree(ROOT / "fixtures" / "reward-qwen2", tmp_path / "reward-qwen2")
    arguments = line.removeprefix("lora-tool ").replace("my-run", "reward-run").split()
    subprocess.run([sys.executable, "-m", "lora_tool", *arguments], cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "lora-tool.xml").is_file()


def test_the_hook_is_one() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    assert hook.keys() == {"id", "name", "description", "entry", "language", "files", "pass_filenames"}
    named = yaml.safe_load(jobs()["pre-commit"])["repos"][0]["hooks"][0]
    assert named["id"] == hook["id"]
    arguments = [*hook["entry"].split()[1:], str(ROOT / "fixtures" / "reward-qwen2" / "adapter")]
    subprocess.run([sys.executable, "-m", "lora_tool", *arguments], check=True, capture_output=True)
    for name in ("adapter/adapter_config.json", "m/model-00001-of-00002.safetensors"):
        assert re.search(hook["files"], name)
