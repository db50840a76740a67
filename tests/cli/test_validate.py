from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lora_tool.formats.safetensors import build_header
from lora_tool.tensors import DType, TensorSpec
from tests.cli.calling import FIXTURES, REPOSITORY, Caller, assert_golden

REWARD = "fixtures/reward-qwen2/adapter"


def edit_config(adapter: Path, **fields: object) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """Return a copy of the reward adapter, with its base where its config says."""
    shutil.copytree(FIXTURES / "reward-qwen2", tmp_path / "reward")
    return tmp_path / "reward" / "adapter"


@pytest.fixture
def truncated(adapter: Path) -> Path:
    os.truncate(adapter / "adapter_model.safetensors", 9000)
    return adapter


def large_adapter(root: Path, layers: int = 80) -> Path:
    """Write an adapter on all linear layers of a model with many."""
    modules = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    specs = [
        TensorSpec(name=f"base_model.model.model.layers.{layer}.{module}.{part}.weight", dtype=DType.F32, shape=shape)
        for layer in range(layers)
        for module in modules
        for part, shape in (("lora_A", (4, 16)), ("lora_B", (16, 4)))
    ]
    header = build_header(specs, {"format": "pt"})
    values = b"\0\0\x80\x3f" * (sum(spec.nbytes for spec in specs) // 4)
    root.mkdir()
    (root / "adapter_model.safetensors").write_bytes(header + values)
    shutil.copy(FIXTURES / "reward-qwen2" / "adapter" / "adapter_config.json", root)
    names = [module.rpartition(".")[2] for module in modules]
    edit_config(root, target_modules=names, task_type="CAUSAL_LM", base_model_name_or_path="o/m", modules_to_save=None)
    return root


def in_a_process(*args: str, start: tuple[str, ...] = ("-m", "lora_tool")) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *start, *args],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
    )


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("validate-reward-qwen2.txt", [REWARD, "--rm"]),
        ("validate-causal-llama.txt", ["fixtures/causal-llama/adapter"]),
        ("validate-reward-run.txt", ["fixtures/reward-run", "--rm"]),
        ("validate-bases.txt", ["fixtures/causal-llama/base", "fixtures/reward-qwen2/base"]),
    ],
)
def test_good_fixtures_have_no_findings(call: Caller, name: str, args: list[str]) -> None:
    called = call("validate", *args)
    assert called.code == 0, called.out
    assert_golden(name, called.out)


def test_findings_are_on_stdout_and_the_exit_code_is_1(call: Caller, truncated: Path) -> None:
    called = call("validate", truncated)
    assert called.code == 1
    assert "LT101" in called.out
    assert called.err == ""
    assert "\x1b" not in called.out


def test_the_working_directory_is_the_default(call: Caller, adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(adapter)
    assert call("validate").out.startswith("checked 1 adapter")


def test_json_has_the_fields_of_the_design(call: Caller, truncated: Path) -> None:
    called = call("validate", truncated, "--json")
    assert called.code == 1
    assert set(called.json) == {"schema_version", "tool_version", "subjects", "findings", "skipped", "summary"}
    finding = called.json["findings"][0]
    assert set(finding) == {"code", "severity", "path", "subject", "message", "hint"}
    assert called.json == call("validate", truncated, "--format", "json").json


def test_select_and_ignore_take_lists_and_repeat(call: Caller, truncated: Path) -> None:
    assert call("validate", truncated, "--select", "LT2,LT3", "--select", "lt102").code == 0
    assert call("validate", truncated, "--ignore", "LT1").code == 0
    assert call("validate", truncated, "--select", "LT101").code == 1


@pytest.mark.parametrize("option", ["--select", "--ignore"])
def test_an_unknown_rule_is_a_usage_error_that_names_the_closest(call: Caller, option: str) -> None:
    called = call("validate", REWARD, option, "LT1011")
    assert called.code == 2
    assert "Did you mean LT" in called.err


def test_rm_contradicts_other_numbers_of_labels(call: Caller) -> None:
    assert call("validate", REWARD, "--rm", "--num-labels", "2").code == 2


def test_wrong_number_of_labels_is_a_finding(call: Caller) -> None:
    called = call("validate", REWARD, "--num-labels", "3", "--json")
    assert called.code == 1
    assert {finding["code"][:3] for finding in called.json["findings"]} == {"LT3"}


def test_a_base_that_is_not_here_is_told_and_does_not_fail(call: Caller, adapter: Path) -> None:
    edit_config(adapter, base_model_name_or_path="somebody/some-model")
    called = call("validate", adapter)
    assert called.code == 0
    assert "somebody/some-model is no folder and not in the Hub cache" in called.out
    assert call("validate", adapter, "--strict").code == 1


def test_a_base_in_the_hub_cache_is_found(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = adapter.parent / "hub" / "models--somebody--some-model"
    shutil.copytree(adapter.parent / "base", repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setenv("HF_HUB_CACHE", str(adapter.parent / "hub"))
    # huggingface_hub reads its variables when it is imported, so this needs a process of its own
    edit_config(adapter, base_model_name_or_path="somebody/some-model")
    done = in_a_process("validate", str(adapter), "--json")
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["skipped"] == []


def test_a_base_that_is_given_must_be_there(call: Caller, tmp_path: Path) -> None:
    called = call("validate", REWARD, "--base", tmp_path / "nowhere")
    assert called.code == 3
    assert called.out == ""
    assert called.err.startswith("error: ")


def test_a_base_with_too_few_layers_is_found_out(call: Caller, tmp_path: Path) -> None:
    adapter = large_adapter(tmp_path / "large", layers=3)
    called = call("validate", adapter, "--base", "fixtures/causal-llama/base", "--select", "LT5", "--json")
    assert called.code == 1
    assert any("layers.2." in finding["subject"] for finding in called.json["findings"])


def test_all_paths_are_judged_though_one_cannot_be_read(call: Caller, truncated: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    called = call("validate", tmp_path / "empty", REWARD, truncated, "--json")
    assert called.code == 3
    assert len(called.json["subjects"]) == 2
    assert called.json["summary"]["errors"] >= 1
    assert f"error: {tmp_path / 'empty'} holds no" in called.err


def test_quiet_says_nothing_where_nothing_is_wrong(call: Caller, truncated: Path) -> None:
    assert call("validate", "-q", REWARD).out == ""
    assert "LT101" in call("validate", "-q", truncated).out


def test_names_from_files_do_not_act_on_the_terminal(call: Caller, tmp_path: Path) -> None:
    folder = tmp_path / "evil\x1b[2J"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": "\\u001b[31m8"}')
    header = build_header([TensorSpec(name="\x1b]0;x\x07.lora_A.weight", dtype=DType.F32, shape=(1, 1))], {})
    (folder / "adapter_model.safetensors").write_bytes(header + bytes(4))
    called = call("validate", folder)
    assert called.code == 1
    assert "\x1b" not in called.out + called.err
    assert "\x1b" not in json.dumps(call("validate", folder, "--json").json, ensure_ascii=False)


def test_many_findings_of_a_kind_are_counted(call: Caller, tmp_path: Path) -> None:
    adapter = large_adapter(tmp_path / "large", layers=8)
    edit_config(adapter, target_modules=["q_proj"])
    called = call("validate", adapter)
    assert called.code == 1
    assert "more like it" in called.out
    assert len(called.out.splitlines()) < 30


HEAVY = ("torch", "transformers", "peft", "numpy", "rich", "huggingface_hub")


@pytest.mark.parametrize("which", ["fixture", "large"])
def test_nothing_heavy_is_imported(which: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "none"))
    adapter = FIXTURES / "reward-qwen2" / "adapter" if which == "fixture" else large_adapter(tmp_path / "large")
    script = (
        "import sys\n"
        "from lora_tool.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    print([name for name in sys.modules if name in " + repr(HEAVY) + "], file=sys.stderr)\n"
    )
    done = in_a_process("validate", str(adapter), start=("-c", script))
    assert done.returncode == 0, done.stdout
    assert done.stderr.strip() == "[]"
