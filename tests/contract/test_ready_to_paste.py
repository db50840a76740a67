"""The GitHub action, the pre-commit hook and the documentation's CI jobs: valid by their schemas, and their scripts run."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from lora_tool.checkpoints import open_model
from lora_tool.cli import ci

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"
ACTION = GITHUB / "actions" / "lora-tool" / "action.yml"


def jobs() -> dict[str, str]:
    """The YAML blocks of the page on CI by what they are for."""
    blocks = re.findall(
        r"^```yaml\n(.*?)^```$",
        (ROOT / ".github" / "docs" / "tasks" / "ci-step.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    found: dict[str, str] = {}
    for block in blocks:
        for kind, key in (("github", "jobs"), ("gitlab", "lora-tool"), ("pre-commit", "repos")):
            if key in yaml.safe_load(block):
                found.setdefault(kind, block)
    return found


FILES: dict[str, tuple[str | Path, ...]] = {
    "vendor.github-actions": (ACTION,),
    "vendor.github-workflows": ("github", *sorted((GITHUB / "workflows").glob("*.yml"))),
    "vendor.gitlab-ci": ("gitlab",),
    "vendor.github-issue-forms": (
        GITHUB / "ISSUE_TEMPLATE" / "fault.yml",
        GITHUB / "ISSUE_TEMPLATE" / "kind.yml",
    ),
    "vendor.github-issue-config": (GITHUB / "ISSUE_TEMPLATE" / "config.yml",),
}
"""Schema → the project's files that keep it, and jobs of the documentation by their kind."""


@pytest.mark.parametrize("schema", FILES)
def test_the_projects_files_and_the_documented_jobs_are_valid(schema: str, tmp_path: Path) -> None:
    files = []
    for file in FILES[schema]:
        if isinstance(file, str):
            text = jobs()[file]
            (tmp_path / "job.yml").write_text(text if file == "gitlab" else f"on: push\n{text}")
        files.append(str(tmp_path / "job.yml" if isinstance(file, str) else file))
    command = importlib.import_module("check_jsonschema").main  # it has no types
    done = CliRunner().invoke(command, ["--builtin-schema", schema, *files])
    assert done.exit_code == 0, done.output


def test_steps_of_the_release_are_there(tmp_path: Path) -> None:
    steps = GITHUB / "release" / "steps.sh"
    usage = subprocess.run([str(steps), "help", str(tmp_path)], capture_output=True, text=True, check=False)
    assert usage.returncode == 2
    asked = re.findall(r"release/steps\.sh (\w+)", (GITHUB / "workflows" / "release.yml").read_text())
    assert {"check", "wheel", "source"} == set(asked)
    assert set(asked) <= set(re.findall(r"^  (\w+)", usage.stdout, re.MULTILINE))


def test_no_secret_is_kept_and_no_event_is_a_part_of_a_script() -> None:
    for workflow in (GITHUB / "workflows").glob("*.yml"):
        assert "secrets." not in workflow.read_text()
        for job in yaml.safe_load(workflow.read_text())["jobs"].values():
            for step in job["steps"]:
                assert "${{" not in step.get("run", "")


def test_no_input_is_a_part_of_a_script() -> None:
    for step in yaml.safe_load(ACTION.read_text())["runs"]["steps"]:
        assert "${{" not in step["run"]
        assert step["shell"] == "bash"


def program(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def run_step(at: int, tmp_path: Path, inputs: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a script of the action as the runner does, with these `inputs` and the defaults of the others."""
    action: dict[str, Any] = yaml.safe_load(ACTION.read_text())
    step = action["runs"]["steps"][at]
    values = {name: str(entry.get("default", "")) for name, entry in action["inputs"].items()} | inputs
    env = {
        variable: values[re.fullmatch(r"\$\{\{ inputs\.([a-z-]+) \}\}", expression)[1]]  # type: ignore[index]
        for variable, expression in step["env"].items()
    }
    more = {"RUNNER_TEMP": str(tmp_path), "GITHUB_ACTIONS": "true", "GITHUB_OUTPUT": str(tmp_path / "outputs")}
    more |= {"GITHUB_ACTION_PATH": str(ACTION.parent)}
    more |= {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"), "PATH": f"{tmp_path}/path:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=ROOT,
        env={**os.environ, **env, **more},
        capture_output=True,
        text=True,
        check=False,
    )


def run_action(tmp_path: Path, script: str, **inputs: str) -> subprocess.CompletedProcess[str]:
    """Run the action's last script, with `script` for the lora-tool that the first one installs."""
    program(tmp_path / "lora-tool" / "bin" / "lora-tool", script)
    return run_step(-1, tmp_path, {name.replace("_", "-"): value for name, value in inputs.items()})


def test_the_action_makes_a_model(tmp_path: Path) -> None:
    done = run_action(
        tmp_path,
        f'exec "{sys.executable}" -m lora_tool "$@"',
        checkpoint="fixtures/reward-qwen2/adapter",
        output=str(tmp_path / "out put; rm -rf x"),
        task="reward",
        dtype="float32",
        precision="float64",
        junit=str(tmp_path / "junit.xml"),
        sarif=str(tmp_path / "found.sarif"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "outputs").read_text() == f"output={tmp_path / 'out put; rm -rf x'}\n"
    manifest = json.loads((tmp_path / "out put; rm -rf x" / "lora_tool.json").read_text())
    assert manifest["precision"] == "float64"
    model = open_model(tmp_path / "out put; rm -rf x")
    assert {str(tensor.dtype) for tensor in model.tensors.values()} == {"F32"}
    assert json.loads((tmp_path / "found.sarif").read_text())["version"] == "2.1.0"
    assert (tmp_path / "junit.xml").is_file()
    assert (tmp_path / "summary.md").is_file()


def told(tmp_path: Path, **inputs: str) -> list[str]:
    """What the action has lora-tool do, given these inputs."""
    done = run_action(tmp_path, 'printf "%s\\n" "$@"', **{"checkpoint": "c", **inputs})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_input_is_an_option_and_an_empty_one_is_left_to_the_configuration(tmp_path: Path) -> None:
    assert told(tmp_path) == ["ci", "--", "c"]
    assert told(tmp_path, private="true", create_pr="true") == ["ci", "--private", "--create-pr", "--", "c"]
    assert told(tmp_path, private="false", create_pr="false") == ["ci", "--public", "--", "c"]
    assert run_step(-1, tmp_path, {"checkpoint": "c", "private": "yes"}).returncode == 2
    given = dict.fromkeys(yaml.safe_load(ACTION.read_text())["inputs"], "true")
    typed = told(tmp_path, **{**given, "checkpoint": "c"})
    known = {option for param in ci.command.params for option in param.opts}
    assert {word.partition("=")[0] for word in typed[1:-2]} <= known
    assert len(typed) == len(given) - 3 + 3  # checkpoint, version and extras are no options; `ci -- c` are no inputs


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
