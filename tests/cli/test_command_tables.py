"""The tables `[merge]`, `[push]` and `[verify]` of lora-tool.toml: a command's options, by their own names."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.cli.calling import Caller
from tests.mutations import CAUSAL, copy_of

ADAPTER = "fixtures/reward-qwen2/adapter"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "lora-tool.toml"


def made(call: Caller, *words: str | Path) -> dict[str, object]:
    """What the manifest says of the merge that was asked for."""
    done = call("merge", *words, "--json")
    assert done.code == 0, done.err
    manifest: dict[str, object] = json.loads(Path(done.json["output"], "lora_tool.json").read_text())
    return manifest


def test_what_is_typed_wins_over_the_environment_over_the_table_over_defaults(
    call: Caller, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.write_text('[merge]\noutput = "deep/out"\nprecision = "float64"\noverwrite = true\nrm = true\n')
    assert made(call, ADAPTER, "--config", config)["precision"] == "float64"
    assert (tmp_path / "deep" / "out").is_dir()  # beside the file that says so
    monkeypatch.setenv("LORA_TOOL_MERGE_PRECISION", "float32")
    assert made(call, ADAPTER, "--config", config)["precision"] == "float32"
    typed = made(call, ADAPTER, "--config", config, "--precision", "float64", "--task", "seq-cls")
    assert typed["precision"] == "float64"
    # the rules refuse a reward adapter as a language model; that the table says `rm` is no contradiction
    assert call("merge", ADAPTER, "--config", config, "--task", "causal-lm").code == 1
    assert made(call, ADAPTER, "-o", tmp_path / "plain")["precision"] == "float32"


def test_rules_of_the_table(call: Caller, config: Path, tmp_path: Path) -> None:
    adapter = copy_of(CAUSAL, tmp_path / "copy")
    tensors = load_file(adapter / "adapter_model.safetensors")
    zeros = {name: value * (".lora_A." in name) for name, value in tensors.items()}
    save_file(zeros, adapter / "adapter_model.safetensors", {"format": "pt"})
    out = ("-o", tmp_path / "out", "--config", config, "--dry-run")
    config.write_text('[merge]\nfail-on = "error"\n')
    assert "LT208" in call("merge", adapter, *out).err
    config.write_text('[merge]\nignore = ["LT208"]\n')
    assert call("merge", adapter, *out).code == 0


def test_the_tables_fail_on_goes_before_the_projects(call: Caller, config: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    assert call("merge", ADAPTER, "-o", model).code == 0
    (model / "tokenizer_config.json").unlink()  # a warning
    config.write_text('fail-on = "warning"\n[verify]\nfail-on = "error"\nsample = true\ntensors = true\n')
    done = call("verify", model, "--config", config)
    assert (done.code, "LT615" in done.out) == (0, True)
    assert "score.weight" in done.out  # of --tensors
    config.write_text('fail-on = "warning"\n')
    assert call("verify", model, "--config", config).code != 0
    config.write_text('fail-on = "warning"\nignore = ["LT615"]\n')
    assert call("verify", model, "--config", config).code == 0


def test_push_has_one_too(call: Caller, config: Path) -> None:
    config.write_text('[push]\ntag = "v1"\ncreate-pr = true\n')
    done = call("push", ADAPTER, "me/x", "--config", config)
    assert (done.code, "--tag TAG with --create-pr" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("command", "line", "told"),
    [
        ("merge", "presicion = 'peft'", "[merge]: unknown key 'presicion'. Did you mean 'precision'"),
        ("push", "priavte = true", "[push]: unknown key 'priavte'. Did you mean 'private'"),
        ("verify", "min_acuracy = 0.7", "[verify]: unknown key 'min_acuracy'. Did you mean 'min-accuracy'"),
        ("verify", "merged = 'x'", "'merged' can only be given on the command line"),
        ("merge", "json = true", "'json' can only be given on the command line"),
        ("push", "repo = 'me/x'", "'repo' can only be given on the command line"),
        ("verify", "min-accuracy = 'much'", "[verify] min-accuracy: expected a number, found 'much'"),
        ("verify", "prompts = 'none.txt'", "[verify] prompts"),
        ("push", "readme = 'mine'", "[push] readme: 'mine' is not one of"),
    ],
)
def test_a_wrong_table_is_usage(call: Caller, config: Path, command: str, line: str, told: str) -> None:
    config.write_text(f"[{command}]\n{line}\n")
    done = call(command, ADAPTER, *(["me/x"] if command == "push" else []), "--config", config)
    assert done.code == 2
    assert told in done.err


def test_a_table_inside_what_is_checked_is_not_trusted(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = copy_of(CAUSAL, tmp_path / "copy")
    (adapter / "lora-tool.toml").write_text('[merge]\nprecision = "float64"\n')
    monkeypatch.chdir(adapter)
    done = call("merge", "--dry-run", "--json")
    assert (done.code, done.json["precision"]) == (0, "float32"), done.err
    assert "is ignored because it lies in a folder that is being checked" in done.err
    assert done.err.count(os.fspath(adapter)) == 1
