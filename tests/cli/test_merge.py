"""`lora-tool merge`, as it is typed."""

from __future__ import annotations

import datetime as dt
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from lora_tool.checkpoints import ModelDir, open_checkpoint
from tests.cli.calling import FIXTURES, Caller, assert_golden

LLAMA, QWEN = "fixtures/causal-llama/adapter", "fixtures/reward-qwen2/adapter"


@pytest.fixture
def copies(tmp_path: Path) -> Path:
    """Both fixtures in a folder of their own, to write beside them."""
    for name in ("causal-llama", "reward-qwen2", "reward-run"):
        shutil.copytree(FIXTURES / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(("name", "adapter"), [("causal-llama", LLAMA), ("reward-qwen2", QWEN)])
def test_a_dry_run_prints_the_plan(name: str, adapter: str, call: Caller) -> None:
    called = call("merge", adapter, "-o", "merged", "--dry-run")
    assert called.code == 0
    assert_golden(f"merge-{name}.txt", called.out)
    as_json = call("merge", adapter, "-o", "merged", "--dry-run", "--json")
    assert as_json.code == 0
    assert_golden(f"merge-{name}.json", relative(as_json.out))
    assert not Path("merged").exists()


def relative(text: str) -> str:
    """Take the repository's folder out of the paths."""
    return text.replace(f"{FIXTURES.parent}/", "")


def test_the_reward_model_in_one_command(copies: Path, call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copies / "reward-qwen2" / "adapter")
    called = call("merge", "--rm")
    assert called.code == 0, called.err
    merged = copies / "reward-qwen2" / "adapter-merged"
    assert str(open_checkpoint(merged).kind) == "merged model"
    assert str(merged) in called.out
    config = json.loads((merged / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForSequenceClassification"]
    assert config["id2label"] == {"0": "LABEL_0"}


def test_the_result_as_json(tmp_path: Path, call: Caller) -> None:
    called = call("merge", LLAMA, "-o", tmp_path / "out", "--json")
    assert called.code == 0
    result = called.json
    assert result["schema_version"] == 1
    assert result["output"] == str(tmp_path / "out")
    assert set(result["files"]) == {path.name for path in (tmp_path / "out").iterdir()} - {"lora_tool.json"}
    assert result["counts"]["merged"] == 6


def test_quiet_says_nothing(tmp_path: Path, call: Caller) -> None:
    called = call("merge", LLAMA, "-o", tmp_path / "out", "--quiet")
    assert (called.code, called.out, called.err) == (0, "", "")


def manifest(folder: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((folder / "lora_tool.json").read_text())
    return table


@pytest.mark.parametrize(
    ("size", "limit"), [("1GB", 10**9), ("5000", 5000), ("4 KiB", 4096), ("1.5kb", 1500), ("1b", 1)]
)
def test_the_largest_shard_size(size: str, limit: int, tmp_path: Path, call: Caller) -> None:
    called = call("merge", LLAMA, "-o", tmp_path / "out", "--max-shard-size", size)
    assert called.code == 0, called.err
    model = open_checkpoint(tmp_path / "out")
    assert isinstance(model, ModelDir)
    for file in model.weights.files:
        assert sum(tensor.nbytes for tensor in file.tensors.values()) <= limit or len(file.tensors) == 1
    assert (len(model.weights.files) == 1) == (limit >= model.weights.nbytes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--task", "poetry"], "poetry"),
        (["--num-labels", "0"], "0"),
        (["--jobs", "0"], "0"),
        (["--dtype", "int8"], "int8"),
        (["--precision", "exact"], "exact"),
        (["--max-shard-size", "five"], "expected a number of bytes such as 5GB or 500MiB, found 'five'"),
        (["--max-shard-size", "0"], "found '0'"),
        (["--rm", "--task", "causal-lm"], "--rm means --task reward, but --task is causal-lm"),
        (["--rm", "--num-labels", "3"], "--rm means one label"),
        (["--dyr-run"], "--dry-run"),
        (["a", "b"], ""),
    ],
)
def test_a_wrong_usage_is_told(options: list[str], words: str, call: Caller) -> None:
    called = call("merge", LLAMA, *options)
    assert called.code == 2
    assert words in called.err
    assert not Path("fixtures/causal-llama/adapter-merged").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], ["nowhere: no such folder"]),
        (["fixtures/causal-llama/base"], ["is a base model: expected an adapter", "--base fixtures/causal-llama/base"]),
        (
            ["fixtures/reward-run"],
            ["is a run folder: expected an adapter", "lora-tool merge fixtures/reward-run/checkpoint-4"],
        ),
        ([LLAMA, "--base", "fixtures/reward-run/checkpoint-2"], ["is a trainer checkpoint: expected a model"]),
        ([LLAMA, "--base", ""], ["the name is empty: give a folder or a Hub id"]),
    ],
)
def test_what_cannot_be_done_is_told_with_exit_code_3(
    arguments: list[str], words: list[str], tmp_path: Path, call: Caller
) -> None:
    called = call("merge", *arguments, "-o", tmp_path / "out")
    assert called.code == 3, called.err
    assert called.out == ""
    assert called.err.startswith("error: ")
    for word in words:
        assert word in called.err
    assert not (tmp_path / "out").exists()


def test_another_base_of_the_same_shape_is_a_warning(tmp_path: Path, call: Caller) -> None:
    called = call("merge", LLAMA, "--base", "fixtures/reward-qwen2/base", "-o", tmp_path / "out")
    assert called.code == 0
    assert "2 warnings: LT325, LT520" in called.err  # its tokenizer is another, too
    strict = ("--base", "fixtures/reward-qwen2/base", "--fail-on", "warning")
    for command in (("merge", LLAMA, "-o", tmp_path / "no"), ("validate", LLAMA), ("ci", LLAMA, "-o", tmp_path / "no")):
        refused = call(*command, *strict)
        assert (refused.code, "LT520" in refused.out + refused.err) == (1, True)
    assert not (tmp_path / "no").exists()


def test_a_number_that_is_nan_is_the_bases(copies: Path, call: Caller) -> None:
    config = copies / "causal-llama/base/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": float("nan")}))
    assert call("merge", copies / "causal-llama/adapter", "--base", copies / "causal-llama/base", "-q").code == 0


def test_a_base_that_the_config_does_not_name(copies: Path, call: Caller) -> None:
    path = copies / "causal-llama" / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": None}))
    called = call("merge", path.parent)
    assert called.code == 3
    assert "names no base model" in called.err
    assert "--base MODEL" in called.err
    assert call("merge", path.parent, "--base", copies / "causal-llama" / "base").code == 0


def test_a_base_recorded_by_its_whole_path_is_shown_from_here(
    copies: Path, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(copies / "causal-llama")
    path = Path("adapter/adapter_config.json")
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": str(Path("base").resolve())})
    )
    assert "merging adapter into base as LlamaForCausalLM" in call("merge", "adapter", "--dry-run").out


@pytest.mark.parametrize(
    ("config", "code"),
    [('{"r": 4', "LT113"), ('{"default": {}}', "LT214"), ('{"base_model_name_or_path": 7}', "LT214")],
)
def test_a_broken_config_that_names_no_base_is_the_finding_of_validate(
    config: str, code: str, copies: Path, call: Caller
) -> None:
    adapter = copies / "causal-llama" / "adapter"
    (adapter / "adapter_config.json").write_text(config)
    for command in (("validate", adapter), ("merge", adapter), ("ci", adapter)):
        called = call(*command)
        assert (called.code, code in called.out + called.err) == (1, True), command


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", "BF16"),
        ("float16", "F16"),
        ("fp32", "F32"),
    ],
)
def test_every_name_of_a_dtype(name: str, dtype: str, tmp_path: Path, call: Caller) -> None:
    assert call("merge", LLAMA, "-o", tmp_path / "out", "--dtype", name).code == 0
    model = open_checkpoint(tmp_path / "out")
    assert isinstance(model, ModelDir)
    assert {str(tensor.dtype) for tensor in model.tensors.values()} == {dtype}


def test_the_manifest_names_the_inputs(copies: Path, call: Caller) -> None:
    assert call("merge", copies / "reward-qwen2" / "adapter", "-o", copies / "out").code == 0
    table = manifest(copies / "out")
    assert table["inputs"]["base"]["path"] == os.fspath(copies / "reward-qwen2" / "base")
    assert table["inputs"]["adapter"]["hub_id"] is None
    assert table["task"] == "seq-cls"
    assert table["num_labels"] == 1
    assert len(table["sha256"]["adapter_model.safetensors"]) == 64
    for file in table["inputs"]["base"]["files"]:
        changed = (copies / "reward-qwen2" / "base" / file["name"]).stat().st_mtime
        assert file["sha256"] is None
        assert dt.datetime.fromisoformat(file["modified"]).timestamp() == pytest.approx(changed, abs=1e-5)
    merged = open_checkpoint(copies / "out")
    assert isinstance(merged, ModelDir)
    assert {entry["name"] for entry in table["ledger"]} == merged.tensors.keys()


@pytest.mark.parametrize(
    ("typed", "kept"),
    [
        ("{base} {adapter}", ""),
        ("--dry-run {base} {adapter} -o x", " --dry-run -o x"),
        ("{base} --base {adapter} --dry-run --dtype float32", " --dry-run --dtype float32"),
        ("{base} {adapter}=0.5 -o x --dry-run", " -o x --dry-run"),
    ],
)
def test_the_base_in_the_adapters_place_names_the_command_that_was_meant(typed: str, kept: str, call: Caller) -> None:
    base = LLAMA.replace("adapter", "base")
    called = call("merge", *typed.format(base=base, adapter=LLAMA).split())
    assert called.code in (2, 3)
    words = shlex.split(called.err.rpartition("lora-tool ")[2])
    adapter = next(word for word in typed.format(base=base, adapter=LLAMA).split() if word.startswith(LLAMA))
    assert words == ["merge", adapter, "--base", base, *kept.split()]
    if "--dry-run" in typed:
        assert call(*words).code == 0


def test_what_goes_into_what_is_told_before_the_work_and_the_verdict_after(
    copies: Path, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, out = copies / "reward-qwen2" / "adapter", copies / "it's"
    with monkeypatch.context() as patched:
        patched.setattr("lora_tool.execution.engine.check_space", interrupted)
        stopped = call("merge", adapter, "-o", out)
    assert stopped.code == 130
    done = call("merge", adapter, "-o", out).out
    told = stopped.out.splitlines()
    assert (told[0].split()[0], told[-1]) == (
        "merging",
        "tensors: 12 copied, 14 merged, 1 added; all 29 tensors of the adapter used (precision float32)",
    )
    assert done.startswith(stopped.out)
    *_, wrote, verdict, next_step, serving = done.splitlines()
    assert wrote.startswith("wrote ")
    assert verdict.startswith("verified in sampled values: 27 of 27 tensors match")
    assert next_step == f'next: AutoModelForSequenceClassification.from_pretrained("{out}")'
    assert shlex.split(serving)[:4] == ["next:", "vllm", "serve", str(out)], "it is quoted"


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_several_adapters_need_a_name_and_are_all_in_the_manifest(copies: Path, call: Caller) -> None:
    first = copies / "causal-llama" / "adapter"
    second = copies / "causal-llama" / "second"
    shutil.copytree(first, second)
    assert call("merge", first, second).code == 2
    twice = call("merge", first, second, "-o", copies / "out")
    assert (twice.code, "LT512" in twice.err) == (1, True)
    assert "holds the same weights" in twice.err
    weights = second / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2] + b"\x01\x01")
    done = call("merge", first, second, "-o", copies / "out")
    assert done.code == 0, done.err
    assert {"adapter", "adapter 2", "base"} == manifest(copies / "out")["inputs"].keys()
    again = call("merge", second, "--base", copies / "out", "-o", copies / "again")
    assert again.code == 1
    assert "LT511" in again.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([LLAMA, "--rm"], ["LT304", "a reward model was requested, but this is the adapter of a causal LM"]),
        ([QWEN, "--num-labels", "4"], ["LT303", "has 1 row, but 4 labels are requested"]),
    ],
)
def test_findings_refuse_with_exit_code_1(arguments: list[str], words: list[str], tmp_path: Path, call: Caller) -> None:
    called = call("merge", *arguments, "-o", tmp_path / "out")
    assert (called.code, called.out) == (1, "")
    for word in (*words, "hint:", "1 error: "):
        assert word in called.err
    assert not (tmp_path / "out").exists()


def test_ignoring_goes_on_where_there_is_something_to_compute(copies: Path, call: Caller) -> None:
    adapter, out = copies / "causal-llama" / "adapter", copies / "out"
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in tensors:
        if ".lora_B." in name:
            tensors[name].zero_()
    save_file(tensors, adapter / "adapter_model.safetensors", {"format": "pt"})
    (copies / "lora-tool.toml").write_text('[ignore]\nLT208 = "a control"\n')
    assert call("merge", adapter, "-o", out).code == 1
    configured = call("merge", adapter, "-o", out, "--config", copies / "lora-tool.toml", "--dry-run")
    assert (configured.code, configured.err) == (0, "")
    ignored = call("merge", adapter, "-o", out, "--ignore", "LT208", "--json")
    assert (ignored.code, json.loads(ignored.out)["findings"]) == (0, [])
    tensors.popitem()
    save_file(tensors, adapter / "adapter_model.safetensors", {"format": "pt"})
    halved = call("merge", adapter, "-o", copies / "other", "--ignore", "LT2")
    assert halved.code == 1
    assert "LT201" in halved.err
    assert "ignoring the rule does not help" in halved.err
    assert not (copies / "other").exists()


def test_warnings_are_shown_counted_and_may_fail(copies: Path, call: Caller) -> None:
    adapter, out = copies / "causal-llama" / "adapter", copies / "out"
    (adapter / "non_lora_trainables.bin").write_bytes(b"PK")
    assert call("merge", adapter, "-o", out, "--fail-on", "warning").code == 1
    assert not out.exists()
    done = call("merge", adapter, "-o", out, "--json")
    assert done.code == 0
    assert [finding["code"] for finding in json.loads(done.out)["findings"]] == ["LT222"]
    assert "1 warning: LT222" in done.err


def test_peft_precision_without_torch_names_the_extra(
    copies: Path, call: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    called = call("merge", copies / "causal-llama" / "adapter", "-o", copies / "out", "--precision", "peft")
    assert (called.code, called.err.startswith("error: torch is not installed")) == (3, True), called.err
    assert "[merge]'" in called.err
    assert not list(copies.glob("*out*"))


BAD_VALUES = {
    "NaN in lora_A": ("adapter", "lora_A", float("nan"), "would hold NaN or infinity"),
    "infinity in lora_B": ("adapter", "lora_B", float("-inf"), "would hold NaN or infinity"),
    "infinity in the base": ("base", "q_proj", float("inf"), "would hold NaN or infinity"),
    "the sum is beyond bfloat16": ("base", "q_proj", 255 * 2.0**120, "too large for BF16"),
}


@pytest.mark.parametrize("precision", ["float32", "float64", "peft"])
@pytest.mark.parametrize(("folder", "part", "value", "refusal"), list(BAD_VALUES.values()), ids=list(BAD_VALUES))
def test_a_value_that_no_weight_may_have_is_refused(
    folder: str, part: str, value: float, refusal: str, precision: str, copies: Path, call: Caller
) -> None:
    llama = copies / "causal-llama"
    for path in [*llama.glob("*/*.safetensors")]:
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if "layers.0.self_attn.q_proj" in name and path.parent.name == folder and part in name:
                tensor[0, 0], tensor[1, 1] = value, -value
            elif "layers.0.self_attn.q_proj.lora_" in name and "too large" in refusal:
                # with r = 4 and a scaling of 4 the delta is 1.5 · 2^119: float32 holds the sum, and bfloat16 does not
                tensor.fill_(2.0**58 if "lora_A" in name else 2.0**58 * 0.75)
        save_file(tensors, path, {"format": "pt"})
    arguments: list[str | Path] = [
        llama / "adapter",
        "--base",
        llama / "base",
        "-o",
        copies / "out",
        "--precision",
        precision,
    ]
    called = call("merge", *arguments, "--ignore", "LT209,LT219,LT220")
    assert called.code == 3
    assert refusal in called.err
    assert not (copies / "out").exists()


@pytest.mark.parametrize(("precision", "dtype"), [("float32", "bfloat16"), ("peft", "float32")])
def test_a_damaged_head_is_not_published(precision: str, dtype: str, copies: Path, call: Caller) -> None:
    adapter = copies / "reward-qwen2" / "adapter"
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors["base_model.model.score.weight"][0, 3] = float("nan")
    save_file(tensors, adapter / "adapter_model.safetensors", {"format": "pt"})
    arguments: list[str | Path] = ["--rm", adapter, "-o", copies / "out", "--precision", precision, "--dtype", dtype]
    called = call("merge", *arguments, "--ignore", "LT209")
    assert called.code == 3
    assert "`score.weight` would hold NaN or infinity" in called.err
    assert not (copies / "out").exists()
