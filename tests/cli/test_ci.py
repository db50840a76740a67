"""`lora-tool ci`: from whatever training left to a proven model."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from safetensors.torch import load_file, save_file

from lora_tool.core.errors import ExecutionError
from lora_tool.core.report.json import schema as report_schema
from lora_tool.core.tensors import TensorTable
from lora_tool.execution.local_engine import LocalEngine
from lora_tool.execution.work import Work, WorkDone
from lora_tool.rules.engine.scan import Opener, Scans, WeightScan
from lora_tool.workflows.ci import render
from tests.cli.calling import FIXTURES, Caller

Stages = dict[str, str]


@pytest.fixture(autouse=True)
def no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    shutil.copytree(FIXTURES, tmp_path / "fixtures")
    return tmp_path / "fixtures"


def stages(call: Caller, *args: str | Path, code: int = 0) -> tuple[Stages, Any]:
    done = call("ci", *args, "--json")
    assert done.code == code, done.err
    return {stage["name"]: stage["status"] for stage in done.json["stages"]}, done.json


PASSED = {"open": "passed", "validate": "passed", "merge": "passed", "verify": "passed"}
UNASKED = {"consolidate": "skipped", "push": "skipped"}


def test_an_adapter_becomes_a_proven_model(call: Caller, tmp_path: Path) -> None:
    found, told = stages(call, "fixtures/reward-qwen2/adapter", "-o", tmp_path / "out", "--rm")
    assert found == PASSED | UNASKED
    assert told["output"] == str(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["architectures"] == [
        "Qwen2ForSequenceClassification"
    ]


def test_a_dry_run_plans_and_writes_nothing(call: Caller, tmp_path: Path) -> None:
    done = call("ci", "fixtures/reward-qwen2/adapter", "-o", tmp_path / "out", "--dry-run", "--push", "me/x")
    assert done.code == 0, done.err
    assert "planned merge       12 copied, 14 merged, 1 added" in done.out
    assert done.out.splitlines()[-2:] == ["skipped push        a dry run", "would pass: nothing was written"]
    pieces = call("ci", "fixtures/zero/stage3-reward", "-o", tmp_path / "out", "--dry-run").out
    assert "planned consolidate 31 copied, 26 dropped" in pieces
    assert not list(tmp_path.iterdir())
    (tmp_path / "notes.txt").touch()
    refused = call("ci", "fixtures/zero/stage3-reward", "-o", tmp_path, "--dry-run")
    assert refused.code == 6


def test_what_goes_into_what_and_the_skipped_rules_are_told(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = call("ci", "fixtures/reward-qwen2/adapter", "-o", tmp_path / "out")
    assert "merging fixtures/reward-qwen2/adapter into fixtures/reward-qwen2/base as Qwen2For" in done.err
    (tmp_path / "lora-tool.toml").write_text('for = ["vllm"]\n')
    adapter = FIXTURES / "reward-qwen2" / "adapter"
    monkeypatch.chdir(tmp_path)
    said = call("validate", adapter)
    assert "LT8" in said.out
    assert set(codes(call("ci", adapter, "-o", "served").out)) >= set(codes(said.out))


def codes(text: str) -> list[str]:
    return re.findall(r"  (?:warning|error) +(LT8\d\d)  ", text)


def test_the_values_of_an_adapter_are_judged_once(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned: list[int] = []
    scan = Scans._all

    def noted(scans: Scans, tensors: TensorTable, opened: Opener) -> dict[str, WeightScan]:
        scanned.append(len(tensors))
        return scan(scans, tensors, opened)

    monkeypatch.setattr(Scans, "_all", noted)
    stages(call, "fixtures/reward-qwen2/adapter", "-o", tmp_path / "out")
    assert scanned == [29]


def test_what_is_proven_is_not_done_again(call: Caller, tmp_path: Path) -> None:
    arguments = ("fixtures/reward-qwen2/adapter", "-o", tmp_path / "out")
    stages(call, *arguments)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    found, _ = stages(call, *arguments)
    assert found == PASSED | UNASKED | {"merge": "reused", "verify": "reused"}
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}


def test_a_result_that_was_changed_is_made_again(call: Caller, tmp_path: Path) -> None:
    arguments = ("fixtures/reward-qwen2/adapter", "-o", tmp_path / "out")
    stages(call, *arguments)
    weights = min((tmp_path / "out").glob("*.safetensors"))
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    found, _ = stages(call, *arguments)
    assert (found["merge"], found["verify"]) == ("passed", "passed")
    assert weights.read_bytes() == good


def test_a_run_that_was_cut_off_goes_on(call: Caller, tmp_path: Path) -> None:
    arguments = ("fixtures/reward-qwen2/adapter", "-o", tmp_path / "out")
    stages(call, *arguments)
    proofs = tmp_path / "out" / ".lora-tool-ci.json"
    held = json.loads(proofs.read_text())
    held["stages"] = {"merge": {"key": held["stages"]["merge"]["key"]}}  # killed after the folder got its name
    proofs.unlink()
    (tmp_path / ".out.lora-tool-ci.json").write_text(json.dumps(held))
    found, _ = stages(call, *arguments)
    assert found == PASSED | UNASKED


def test_proofs_go_with_the_output(call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("fixtures/reward-qwen2/adapter", "-o", tmp_path / "new" / "out")
    stages(call, *arguments)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]
    shutil.rmtree(tmp_path / "new" / "out")

    def fail(*_: object, **__: object) -> None:
        raise ExecutionError("the disk is gone")

    monkeypatch.setattr("lora_tool.workflows.ci.stages.write", fail)
    stages(call, *arguments, code=3)
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"stages": 3}', b'{"stages": {"merge": 1}}', b"\xff"])
def test_broken_proofs_prove_nothing(call: Caller, tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".out.lora-tool-ci.json").write_bytes(content)
    found, _ = stages(call, "fixtures/reward-qwen2/adapter", "-o", tmp_path / "out")
    assert found == PASSED | UNASKED


def test_other_inputs_do_not_replace_a_result(call: Caller, clone: Path, tmp_path: Path) -> None:
    adapter = clone / "reward-qwen2" / "adapter"
    stages(call, adapter, "-o", tmp_path / "out")
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 8', '"lora_alpha": 4'))
    found, _ = stages(call, adapter, "-o", tmp_path / "out", code=6)
    assert found["merge"] == "failed"
    found, _ = stages(call, adapter, "-o", tmp_path / "out", "--overwrite")
    assert found["merge"] == "passed"


def test_a_broken_checkpoint_stops_before_anything_is_merged(call: Caller, clone: Path, tmp_path: Path) -> None:
    weights = clone / "reward-qwen2" / "adapter" / "adapter_model.safetensors"
    tensors = load_file(weights)
    next(iter(tensors.values()))[0] = float("nan")
    save_file(tensors, weights)
    found, told = stages(call, weights.parent, "-o", tmp_path / "out", code=1)
    assert found == {
        "open": "passed",
        "validate": "failed",
        "consolidate": "skipped",
        "merge": "skipped",
        "verify": "skipped",
        "push": "skipped",
    }
    assert {finding["code"] for finding in told["report"]["findings"]} == {"LT209"}
    assert told["output"] is None
    assert not (tmp_path / "out").exists()


def test_finished_weights_that_are_not_the_best_are_named_as_such(call: Caller, clone: Path, tmp_path: Path) -> None:
    run = clone / "reward-run"
    shutil.copytree(run / "checkpoint-4", run, dirs_exist_ok=True)
    (run / "trainer_state.json").unlink()
    log = [{"step": 2, "eval_loss": 0.3}, {"step": 4, "eval_loss": 0.9}]
    for step, entries in ((2, log[:1]), (4, log)):
        path = run / f"checkpoint-{step}" / "trainer_state.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"log_history": entries}))
    _, told = stages(call, run, "-o", tmp_path / "out", "--base", clone / "reward-qwen2" / "base")
    summary = told["stages"][0]["summary"]
    better = f"the best is checkpoint-2 (lowest eval_loss, 0.3): lora-tool ci {run / 'checkpoint-2'}"
    assert f"taking its finished weights; {better}" in summary


def test_an_adapter_config_beside_fsdp_files_is_no_adapter(call: Caller, clone: Path, tmp_path: Path) -> None:
    run = clone / "fsdp2-reward"
    found, told = stages(call, run, "-o", tmp_path / "out", "--base", clone / "reward-qwen2" / "base")
    assert found == PASSED | {"consolidate": "passed", "push": "skipped"}
    assert "pytorch_model_fsdp_0" in told["stages"][2]["summary"]
    hint = call("validate", run, "--json").json["findings"][0]["hint"]
    assert hint == f"the folder holds them in pieces: lora-tool consolidate {run}"


def test_a_run_of_checkpoints_saved_without_gathering(call: Caller, clone: Path, tmp_path: Path) -> None:
    for step in (2, 10):
        shutil.copytree(clone / "zero" / "stage3-reward", tmp_path / "my run" / f"checkpoint-{step}")
    next((tmp_path / "my run" / "checkpoint-10").glob("*/*rank_1*optim*")).unlink()
    base = clone / "reward-qwen2" / "base"
    found, told = stages(call, tmp_path / "my run", "-o", tmp_path / "out", "--base", base)
    assert found == PASSED | {"consolidate": "passed", "push": "skipped"}
    assert "taking checkpoint-2 (the latest, because its rank files" in told["stages"][0]["summary"]


def test_what_it_writes_into_the_checkpoint_is_no_input(call: Caller, clone: Path) -> None:
    run = clone / "zero" / "stage3-reward"
    arguments = (run, "-o", run / "merged", "--report", f"junit={run / 'junit.xml'}")
    stages(call, *arguments)
    found, _ = stages(call, *arguments)
    assert (found["consolidate"], found["merge"], found["verify"]) == ("reused", "reused", "reused")


@pytest.mark.parametrize("stage", ["consolidate", "merge", "verify", "push"])
def test_a_run_killed_between_stages_goes_on(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    def killed(_self: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(f"lora_tool.workflows.ci.stages.Stages.{stage}", killed)
        assert call("ci", "fixtures/zero/stage3-reward", "-o", tmp_path / "out").code == 130
    found, _ = stages(call, "fixtures/zero/stage3-reward", "-o", tmp_path / "out")
    before = ("consolidate", "merge", "verify")
    done = before[: before.index(stage)] if stage in before else before
    assert [name for name in before if found[name] == "reused"] == list(done)


def test_an_input_changed_under_its_old_time_is_seen(call: Caller, clone: Path, tmp_path: Path) -> None:
    adapter = clone / "reward-qwen2" / "adapter"
    stages(call, adapter, "-o", tmp_path / "out")
    weights = adapter / "adapter_model.safetensors"
    when, content = weights.stat(), weights.read_bytes()
    weights.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    os.utime(weights, ns=(when.st_atime_ns, when.st_mtime_ns))
    found, told = stages(call, adapter, "-o", tmp_path / "out", code=6)
    assert found["merge"] == "failed"
    assert "from other inputs" in told["stages"][3]["summary"]
    found, _ = stages(call, adapter, "-o", tmp_path / "out", "--overwrite")
    assert found["merge"] == "passed"


def test_what_rank_files_lack_can_be_given(call: Caller, clone: Path, tmp_path: Path) -> None:
    run = clone / "zero" / "stage3-reward"
    config = (run / "adapter_config.json").rename(tmp_path / "adapter_config.json")
    (run / "adapter_model.safetensors").unlink()
    arguments = (run, "-o", tmp_path / "out", "--base", clone / "reward-qwen2" / "base")
    done = call("ci", *arguments)
    assert done.code == 3
    assert "--adapter-config FILE" in done.out
    found, _ = stages(call, *arguments, "--adapter-config", config, "--tag", "global_step2")
    assert found == PASSED | {"consolidate": "passed", "push": "skipped"}


def test_a_full_finetune_needs_no_merge(call: Caller, tmp_path: Path) -> None:
    found, told = stages(call, "fixtures/fsdp2-full", "-o", tmp_path / "out")
    assert (found["consolidate"], found["merge"], found["verify"]) == ("passed", "skipped", "skipped")
    assert told["output"] == str(tmp_path / "out")
    assert (tmp_path / "out" / "config.json").is_file()


def test_what_was_written_wrong_is_not_published(call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., WorkDone] = LocalEngine.run

    def damaged(engine: LocalEngine, work: Work, **kwargs: Any) -> WorkDone:
        written = real(engine, work, **kwargs)
        for shard in work.shards:
            path = work.folder / shard.filename
            data = bytearray(path.read_bytes())
            data[-64:] = bytes(byte ^ 0x41 for byte in data[-64:])
            path.write_bytes(data)
        return written

    monkeypatch.setattr(LocalEngine, "run", damaged)
    found, _ = stages(call, "fixtures/reward-qwen2/adapter", "-o", tmp_path / "out", code=5)
    assert found["merge"] == "failed"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("checkpoint", ["fixtures/reward-qwen2/adapter", "fixtures/zero/stage3-headless", "nowhere"])
def test_json_keeps_the_published_schema(call: Caller, tmp_path: Path, checkpoint: str) -> None:
    described = Registry().with_resource("urn:lora-tool:report:1", Resource.from_contents(report_schema()))
    found = call("ci", checkpoint, "-o", tmp_path / "out", "--json").json
    Draft202012Validator(
        json.loads(Path(render.__file__).with_name("ci.schema.json").read_text()), registry=described
    ).validate(found)


def test_the_job_summary_has_the_stages(call: Caller, tmp_path: Path) -> None:
    arguments = ("-o", tmp_path / "out", "--report", f"markdown={tmp_path / 'summary.md'}")
    call("ci", "fixtures/reward-qwen2/adapter", *arguments)
    text = (tmp_path / "summary.md").read_text()
    assert text.startswith("### ✅ lora-tool ci passed: ")
    assert [line.split("|")[2].strip() for line in text.splitlines() if line.startswith("| ✅")] == list(PASSED)
    call("ci", "fixtures/causal-llama/adapter", *arguments)
    text = (tmp_path / "summary.md").read_text()
    assert text.startswith("### ❌ lora-tool ci failed")
    assert "| ❌ | merge | " in text
    assert "replace it with --overwrite" in text


def test_github_gets_annotations_and_a_summary_unasked(
    call: Caller, clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    weights = clone / "reward-qwen2" / "adapter" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    done = call("ci", weights.parent, "-o", tmp_path / "out", "--json")
    assert done.code == 1
    assert "::error" in done.err
    assert done.json["passed"] is False
    assert "LT101" in (tmp_path / "summary.md").read_text()


def test_the_table_of_a_configuration(call: Caller, tmp_path: Path) -> None:
    config = tmp_path / "lora-tool.toml"
    config.write_text(f'[ci]\noutput = "{tmp_path / "from-file"}"\nrm = true\nprecision = "float64"\njobs = 1\n')
    stages(call, "fixtures/reward-qwen2/adapter", "--config", config)
    manifest = json.loads((tmp_path / "from-file" / "lora_tool.json").read_text())
    assert manifest["precision"] == "float64"
    stages(call, "fixtures/reward-qwen2/adapter", "--config", config, "-o", tmp_path / "typed")
    assert (tmp_path / "typed").is_dir()


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("outptu = 'x'", "lora-tool.toml: [ci]: unknown key 'outptu'. Did you mean 'output'"),
        ("checkpoint = 'x'", "'checkpoint' can only be given on the command line"),
        ("precision = 'peftt'", "[ci] precision: 'peftt' is not one of"),
        ("rm = 'yes'", "[ci] rm: expected true or false, found 'yes'"),
        ("jobs = true", "[ci] jobs: expected a whole number, found True"),
        ("num-labels = 1.0", "[ci] num-labels: expected a whole number"),
        ("base = ['a']", "[ci] base: expected a string"),
        ("push = 'a b'", "[ci] push: 'a b' is not a repository; expected owner/name"),
        ("report = 'junti=x'", "Did you mean 'junit'"),
        ("ignore = {LT306 = 'why'}", "[ci] ignore: expected a list of strings"),
        ("adapter-config = 'none.json'", "[ci] adapter-config"),
    ],
)
def test_a_wrong_table_is_usage(call: Caller, tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "lora-tool.toml").write_text(f"[ci]\n{line}\n")
    done = call("ci", "fixtures/reward-qwen2/adapter", "--config", tmp_path / "lora-tool.toml")
    assert done.code == 2
    assert told in done.err


def test_paths_in_the_table_begin_at_its_file(call: Caller, tmp_path: Path) -> None:
    config = tmp_path / "lora-tool.toml"
    config.write_text('[ci]\noutput = "new/deep/out"\nreport = ["junit=new/j.xml"]\n')
    stages(call, "fixtures/reward-qwen2/adapter", "--config", config)
    assert (tmp_path / "new" / "deep" / "out" / "lora_tool.json").is_file()
    assert (tmp_path / "new" / "j.xml").is_file()


def test_contradictions_are_usage(call: Caller) -> None:
    assert call("ci", "fixtures/reward-qwen2/adapter", "--rm", "--task", "causal-lm").code == 2
    assert call("ci", "fixtures/reward-qwen2/adapter", "--rm", "--num-labels", "2").code == 2
    assert call("ci", "fixtures/reward-qwen2/adapter", "--ignore", "LT999").code == 2
    assert call("ci", "fixtures/reward-qwen2/adapter", "--push", "").code == 2
