"""`lora-tool verify`, and the check that `merge` makes before it publishes."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path

import pytest

from lora_tool.core.tensors import DType
from lora_tool.execution import kernels
from lora_tool.execution import local_engine as worker
from lora_tool.execution.kernels import AnyArray
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import Shard
from lora_tool.rules.merged.evidence import TensorEvidence
from lora_tool.verification import checking
from lora_tool.workflows import writing
from tests.cli.calling import FIXTURES, Caller
from tests.mutations import break_, copy_of

ADAPTER = "fixtures/reward-qwen2/adapter"


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    return copy_of("reward-qwen2/merged", tmp_path)


def test_a_broken_manifest_is_said_to_be_one(call: Caller, merged: Path) -> None:
    (merged / "lora_tool.json").write_text("")
    refused = call("verify", merged)
    assert refused.code == 3
    assert "lora_tool.json: is not valid JSON" in refused.err


def test_a_good_merge_is_proven(call: Caller, merged: Path) -> None:
    called = call("verify", merged)
    assert called.code == 0
    assert called.out.splitlines()[0].endswith("every value")
    assert called.out.splitlines()[1:] == [
        "  12 copied have the base's bytes",
        "  14 merged are W + ΔW, max error 0.500 ulp; cosine of W' - W with ΔW at least 0.9998",
        "  1 added have the values of their source",
        "checked 1 merged model: no findings",
        f"next: lora-tool push {merged} OWNER/NAME",
    ]
    assert call("verify", merged, "-q").out == ""


def test_several_folders_in_one_table(call: Caller, tmp_path: Path) -> None:
    for name in ("good", "bad"):
        copy_of("reward-qwen2/merged", tmp_path / name)
    good, bad, absent = (tmp_path / name for name in ("good/reward-qwen2/merged", "bad/reward-qwen2/merged", "absent"))
    weights = next(bad.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-2] + b"\x80\x7f")
    assert call("verify", good, good).code == 0
    called = call("verify", good, bad, absent)
    assert called.code == 5, "the worst"
    rows = [line.split()[:2] for line in called.out.splitlines()[-3:]]
    assert rows == [[str(good), "right"], [str(bad), "failed"], [str(absent), "not"]]
    listed = call("verify", good, bad, absent, "--json").json["folders"]
    assert [each["exit_code"] for each in listed] == [0, 5, 3]
    alone = call("verify", good, "--json").json
    assert {name: listed[0][name] for name in alone} == alone
    assert call("verify", good, bad, "--adapter", ADAPTER).code == 2


def test_answers_that_nothing_can_give_are_refused_before_the_comparison(
    call: Caller, merged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    monkeypatch.setattr("lora_tool.verification.verifying.check_steps", lambda *_, **__: pytest.fail("it compared"))
    called = call("verify", merged, "--logits")
    assert (called.code, called.err.splitlines()[0]) == (3, "error: peft is not installed")


def test_json_has_every_tensor(call: Caller, merged: Path) -> None:
    called = call("verify", merged, "--json")
    verification = called.json["verification"]
    assert verification["tensors"] == verification["right"] == len(verification["per_tensor"]) == 27
    assert verification["values_compared"] == verification["values"]
    assert verification["precision"] == "float32"
    assert {entry["verdict"] for entry in verification["per_tensor"]} == {"right"}
    assert called.json["findings"] == []


def test_each_tensor_has_a_line(call: Caller, merged: Path) -> None:
    lines = call("verify", merged, "--tensors").out.splitlines()
    (line,) = [line for line in lines if "layers.0.self_attn.q_proj.weight" in line]
    assert len({line.index("ulps") for line in lines if " ulps " in line and "right" in line}) == 1
    assert line.split()[:3] == ["right", "merged", "model.layers.0.self_attn.q_proj.weight"]
    assert "cosine" in line


@pytest.mark.parametrize("options", [["--sample"], ["--format", "github"]])
def test_a_broken_merge_fails_its_check(call: Caller, merged: Path, options: list[str]) -> None:
    break_(merged, "LT606")
    called = call("verify", merged, *options)
    assert called.code == 5
    assert "LT606" in called.out
    assert call("verify", merged, "--ignore", "LT606").code == 0
    assert call("verify", merged, "--select", "LT1").code == 0


def test_warnings_fail_where_asked(call: Caller, merged: Path) -> None:
    break_(merged, "LT615")
    assert [call("verify", merged, *options).code for options in ([], ["--fail-on", "warning"], ["--strict"])] == [
        0,
        5,
        5,
    ]


def test_usage(call: Caller, merged: Path) -> None:
    assert call("verify", merged, "--select", "LT9999").code == 2
    assert call("verify", merged, "--report", "pdf=x").code == 2
    assert call("verify").code == 3  # this folder is no model


def test_inputs_that_went_away(call: Caller, merged: Path) -> None:
    shutil.rmtree(merged.parent / "base")
    called = call("verify", merged)
    assert called.code == 3
    assert f"hint: lora-tool verify {merged} --base BASE" in called.err
    assert call("verify", merged, "--base", FIXTURES / "reward-qwen2" / "base").code == 0


def test_another_tools_merge_needs_its_adapter(call: Caller, merged: Path) -> None:
    (merged / "lora_tool.json").unlink()
    called = call("verify", merged)
    assert called.code == 3
    assert f"hint: lora-tool verify {merged} --adapter ADAPTER" in called.err
    assert call("verify", merged, "--adapter", merged.parent / "adapter").code == 0


@pytest.mark.parametrize("path", ["fixtures/reward-qwen2/adapter", "fixtures", "nowhere"])
def test_what_is_no_model_cannot_be_verified(call: Caller, path: str) -> None:
    assert call("verify", path).code == 3


def _rounds_a_block_wrongly(values: AnyArray, dtype: DType, out: AnyArray) -> AnyArray:
    del dtype
    out[:] = values.astype(out.dtype)
    out[: out.size // 2] = 0
    return out


def test_a_wrong_merge_is_not_published(call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_TOOL_KERNEL", "off")
    monkeypatch.setattr(kernels, "round_to", _rounds_a_block_wrongly)
    called = call("merge", "--rm", ADAPTER, "-o", tmp_path / "out")
    assert called.code == 5
    assert "LT608" in called.err
    assert str(tmp_path / "out") in called.err
    assert "partial" not in called.err
    assert list(tmp_path.iterdir()) == []
    assert call("merge", "--rm", ADAPTER, "-o", tmp_path / "out", "--no-verify").code == 0
    assert call("verify", tmp_path / "out").code == 5


def test_a_wrong_merge_replaces_nothing(call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert call("merge", "--rm", ADAPTER, "-o", tmp_path / "out").code == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    monkeypatch.setenv("LORA_TOOL_KERNEL", "off")
    monkeypatch.setattr(kernels, "round_to", _rounds_a_block_wrongly)
    assert call("merge", "--rm", ADAPTER, "-o", tmp_path / "out", "--overwrite").code == 5
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("files", [13, 1])
def test_large_files_are_read_back_while_others_are_written(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: int, wrong: bool
) -> None:
    if wrong:
        monkeypatch.setenv("LORA_TOOL_KERNEL", "off")
        monkeypatch.setattr(kernels, "round_to", _rounds_a_block_wrongly)
    size = "1KB" if files > 1 else "1GB"
    asked = ("merge", "--rm", ADAPTER, "-o", tmp_path / "out", "--max-shard-size", size, "--json")
    at_the_end = call(*asked)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    seen = []

    def watched(plan: Plan, folder: Path, shard: Shard, *, jobs: int | None) -> dict[str, TensorEvidence]:
        assert (folder / shard.filename).stat().st_size == len(shard.header) + shard.data_bytes
        seen.append([step.out.name for step in shard.steps])
        return check_file(plan, folder, shard, jobs=jobs)

    check_file = checking.check_file
    monkeypatch.setattr(checking, "check_file", watched)
    monkeypatch.setattr(writing, "_LARGE_FILE", 900)
    monkeypatch.setattr(worker, "_BATCH_BYTES", 900)
    called = call(*asked)
    assert len(seen) == 1 if files == 1 else 3 < len(seen) < 13, "large files only; the others are read at the end"
    every = list(itertools.chain.from_iterable(seen))
    assert len(every) == len(set(every))
    assert files > 1 or len(every) == 27
    assert (called.code, called.err, called.out) == (at_the_end.code, at_the_end.err, at_the_end.out)
    assert called.code == (5 if wrong else 0)
    assert (tmp_path / "out").exists() is not wrong
    assert wrong or called.json["verification"]["right"] == 27
    assert {path.name for path in tmp_path.iterdir()} <= {"out"}


def test_the_manifest_says_what_was_checked(call: Caller, tmp_path: Path) -> None:
    result = call("merge", "--rm", ADAPTER, "-o", tmp_path / "out", "--json").json["verification"]
    assert result == json.loads((tmp_path / "out" / "lora_tool.json").read_text())["verification"]
    assert (result["level"], result["right"], result["tensors"], result["errors"]) == ("sample", 27, 27, 0)
    unchecked = call("merge", "--rm", ADAPTER, "-o", tmp_path / "unchecked", "--json", "--no-verify").json
    assert unchecked["verification"] is None
    assert json.loads((tmp_path / "unchecked" / "lora_tool.json").read_text())["verification"] is None


@pytest.mark.parametrize(
    ("checkpoint", "what"), [("stage3-reward", "adapter"), ("stage3-full", "model"), ("stage3-full", "state")]
)
def test_consolidate_reads_back_what_it_wrote(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: str, what: str
) -> None:
    asked = (
        "consolidate",
        f"fixtures/zero/{checkpoint}",
        "--what",
        what,
        "-o",
        tmp_path / "out",
        "--dtype",
        "bf16",
        "--verify",
    )
    good = call(*asked, "--json").json["verification"]
    assert good["right"] == good["tensors"] > 0
    shutil.rmtree(tmp_path / "out")
    monkeypatch.setenv("LORA_TOOL_KERNEL", "off")
    monkeypatch.setattr(kernels, "round_to", _rounds_a_block_wrongly)
    called = call(*asked)
    assert called.code == 5
    assert "LT605" in called.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("large", [1, writing._LARGE_FILE])
def test_an_interrupted_check_publishes_nothing(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: int
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(writing, "_LARGE_FILE", large)
    monkeypatch.setattr(checking, "check_steps", interrupted)
    assert call("merge", "--rm", ADAPTER, "-o", tmp_path / "out").code == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["LT101", "LT102", "LT107", "LT113"])
def test_a_merged_folder_with_broken_files(call: Caller, merged: Path, name: str) -> None:
    shard = merged / "model-00002-of-00003.safetensors"
    content = shard.read_bytes()
    if name == "LT107":
        shard.unlink()
    elif name == "LT113":
        (merged / "model.safetensors.index.json").write_text("{")
    else:
        shard.write_bytes(content[:-10] if name == "LT101" else b"\xff" * 64)
    called = call("verify", merged)
    assert called.code == 5
    assert name in called.out
    assert "Traceback" not in called.err
