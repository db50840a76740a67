"""`lora-tool ci --each`: every checkpoint of a sweep goes the way of `ci`, and what stops one stops no other."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from safetensors.torch import load_file, save_file

from lora_tool.core.report.json import schema as report_schema
from lora_tool.workflows.ci import render
from lora_tool.workflows.ci.model import Job, Outcome, Ranked, Stage, Status, Swept, best_first, best_of
from tests.cli.calling import FIXTURES, Caller

NAMES = ["broken", "lr1", "run-checkpoint-2", "run-checkpoint-4"]
CODES = {"broken": 1, "lr1": 0, "run-checkpoint-2": 0, "run-checkpoint-4": 0}


@pytest.fixture(autouse=True)
def no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A sweep: an adapter, a truncated one, a run of two checkpoints, and what is no part of it."""
    folder = tmp_path / "runs"
    shutil.copytree(FIXTURES / "reward-run", folder / "run")
    shutil.copytree(FIXTURES / "reward-qwen2" / "base", folder / "base")
    for name in ("lr1", "broken"):
        shutil.copytree(FIXTURES / "reward-qwen2" / "adapter", folder / name)
    weights = folder / "broken" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    (folder / "latest").symlink_to("lr1")
    (folder / "plots").mkdir()
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lora-tool-ci.json"}


def schema(name: str) -> Any:
    return json.loads(Path(render.__file__).with_name(f"{name}.schema.json").read_text())


def swept(call: Caller, runs: Path, *args: str | Path, code: int = 1) -> Any:
    done = call("ci", runs, "--each", "--base", runs / "base", *args, "--json")
    assert done.code == code, done.err
    described = Registry().with_resources(
        [
            ("urn:lora-tool:report:1", Resource.from_contents(report_schema())),
            ("urn:lora-tool:ci:1", Resource.from_contents(schema("ci"))),
        ]
    )
    Draft202012Validator(schema("ci-each"), registry=described).validate(done.json)
    return done.json


def stages(run: Any) -> dict[str, str]:
    return {stage["name"]: stage["status"] for stage in run["outcome"]["stages"]}


def test_every_checkpoint_goes_its_own_way(call: Caller, runs: Path, tmp_path: Path) -> None:
    out = runs / "merged"  # in the sweep's own folder: what it writes is no part of the sweep
    told = swept(call, runs, "-o", out)
    assert {run["name"]: run["exit_code"] for run in told["runs"]} == CODES
    assert stages(told["runs"][0])["validate"] == "failed"
    assert {path.name for path in out.iterdir()} == set(NAMES) - {"broken"}
    assert call("ci", runs / "lr1", "--base", runs / "base", "-o", tmp_path / "alone").code == 0
    assert content(out / "lr1") == content(tmp_path / "alone")
    again = swept(call, runs, "-o", out)
    assert [stages(run)["merge"] for run in again["runs"]] == ["skipped", "reused", "reused", "reused"]
    alone = call("ci", runs / "lr1", "--base", runs / "base", "-o", out / "lr1", "--json").json
    assert {stage["name"]: stage["status"] for stage in alone["stages"]}["verify"] == "reused"


def test_of_a_run_every_checkpoint_is_taken_and_the_adapter_beside_them(call: Caller, runs: Path) -> None:
    shutil.copytree(runs / "lr1", runs / "run", dirs_exist_ok=True)
    told = swept(call, runs, "--dry-run")
    assert [run["name"] for run in told["runs"]] == ["broken", "lr1", "run", "run-checkpoint-2", "run-checkpoint-4"]


def test_the_table_says_what_became_of_each(call: Caller, runs: Path) -> None:
    done = call("ci", runs, "--each", "--base", runs / "base", "-o", runs / "merged")
    assert done.code == 1
    lines = done.out.splitlines()
    rows = {line.split()[0]: line for line in lines if line.split()[:1] and line.split()[0] in NAMES}
    assert list(rows) == NAMES
    assert "validate failed" in rows["broken"]
    assert "passed" in rows["lr1"]
    assert lines[-1] == f"3 of 4 checkpoints passed: {runs / 'merged'}"
    assert f"left out: {runs / 'base'}" in done.err
    assert "LT101" in done.out


def test_a_dry_run_writes_nothing(call: Caller, runs: Path, tmp_path: Path) -> None:
    before = sorted(runs.rglob("*"))
    told = swept(call, runs, "--dry-run")
    assert [stages(run)["merge"] for run in told["runs"]] == ["skipped", "planned", "planned", "planned"]
    assert sorted(runs.rglob("*")) == before
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_each_has_its_place_in_the_reports(
    call: Caller, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_OUTPUT", str(tmp_path / "github"))
    (runs / "empty").mkdir()
    (runs / "empty" / "adapter_config.json").write_text((runs / "lr1" / "adapter_config.json").read_text())
    files = [f"--report={form}={tmp_path / form}" for form in ("junit", "markdown", "sarif", "json")]
    assert call("ci", runs, "--each", "--base", runs / "base", "-o", tmp_path / "out", *files).code == 1
    suites = {suite.get("name"): suite for suite in ET.parse(tmp_path / "junit").getroot()}
    assert {str(runs / name) for name in ("broken", "empty", "lr1", "run/checkpoint-2")} <= set(suites)
    assert suites[str(runs / "lr1")].get("failures") == "0"
    assert suites[str(runs / "broken")].get("failures") == "1"
    text = (tmp_path / "markdown").read_text()
    assert text.startswith("### ❌ lora-tool ci --each: 3 of 5 passed")
    assert "| ✅ | <code>lr1</code> |" in text
    assert "LT101" in json.dumps(json.loads((tmp_path / "json").read_text()))
    assert (tmp_path / "github").read_text() == "output=\nbest=\n"


def test_the_pairs_rank_the_models(call: Caller, runs: Path, tmp_path: Path) -> None:
    shutil.rmtree(runs / "run")
    shutil.copytree(runs / "lr1", runs / "worse")
    weights = runs / "worse" / "adapter_model.safetensors"
    tensors = load_file(weights)
    save_file({name: -one if "score" in name else one for name, one in tensors.items()}, weights, {"format": "pt"})
    arguments = ("-o", tmp_path / "out", "--pairs", "tests/pairs.jsonl", "--rm")
    first = swept(call, runs, *arguments)
    found = {run["name"]: run["pairs"] for run in first["runs"]}
    assert found["broken"] is None
    assert found["worse"]["accuracy"] == pytest.approx(1 - found["lr1"]["accuracy"])
    measured = {name: (one["accuracy"], one["margin"]) for name, one in found.items() if one}
    assert first["ranking"] == sorted(measured, key=lambda name: measured[name], reverse=True)
    assert first["best"] == first["ranking"][0]
    again = swept(call, runs, *arguments)
    assert [stages(run)["verify"] for run in again["runs"]] == ["skipped", "reused", "reused"]
    assert again["ranking"] == first["ranking"]
    assert {run["name"]: run["pairs"] for run in again["runs"]} == found


def ranked(name: str, accuracy: float, margin: float | None, status: Status = Status.PASSED) -> Swept:
    stage = Stage(name="verify", status=status, summary="", ranking=Ranked(accuracy=accuracy, margin=margin))
    return Swept(job=Job(checkpoint=Path(name), output=Path("out", name)), outcome=Outcome(stages=(stage,)))


def test_the_ranking_is_by_accuracy_then_margin_then_name() -> None:
    runs = [
        ranked("nan", 0.75, None),
        ranked("b", 0.75, 1.0),
        ranked("failed", 0.9, 1.0, Status.FAILED),
        ranked("a", 0.75, 1.0),
        ranked("wide", 0.75, 2.0),
        ranked("low", 0.5, 9.0),
    ]
    assert [each.name for each in best_first(runs)] == ["failed", "wide", "a", "b", "nan", "low"]
    best = best_of(runs)
    assert best is not None
    assert best.name == "wide"


def test_a_checkpoint_and_the_adapter_that_was_consolidated_from_it_are_one(call: Caller, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(FIXTURES / "zero" / "stage3-reward", runs / "a")
    assert call("consolidate", runs / "a").code == 0
    settings = ("--each", "--base", FIXTURES / "reward-qwen2" / "base", "--dry-run")
    done = call("ci", runs, *settings)
    assert f"left out: {runs / 'a-adapter'}, the adapter that lora-tool consolidated from a" in done.err
    assert [run["name"] for run in call("ci", runs, *settings, "--json").json["runs"]] == ["a"]
    shutil.rmtree(runs / "a")
    assert [run["name"] for run in call("ci", runs, *settings, "--json").json["runs"]] == ["a-adapter"]


def test_what_cannot_be_a_sweep_is_refused_by_name(call: Caller, runs: Path, tmp_path: Path) -> None:
    done = call("ci", runs, "--each", "--push", "me/x")
    assert done.code == 2
    assert "--each makes several" in done.err
    done = call("ci", runs / "plots", "--each")
    assert done.code == 3
    assert "holds no adapter and no training checkpoint" in done.err
    assert call("ci", tmp_path / "nowhere", "--each").code == 3
    shutil.copytree(runs / "lr1", runs / "ranks-adapter")
    shutil.copytree(FIXTURES / "zero" / "stage3-reward", runs / "ranks")
    done = call("ci", runs, "--each", "-o", tmp_path / "out")
    assert done.code == 2
    assert "would both be written to" in done.err
