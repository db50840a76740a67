from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.calling import FIXTURES, Caller, assert_golden

# `on disk` counts files that only a training checkpoint has and that git may not keep byte for byte


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("inspect-reward-qwen2.txt", "fixtures/reward-qwen2/adapter"),
        ("inspect-causal-llama.txt", "fixtures/causal-llama/adapter"),
        ("inspect-base.txt", "fixtures/reward-qwen2/base"),
        ("inspect-checkpoint.txt", "fixtures/reward-run/checkpoint-4"),
        ("inspect-reward-run.txt", "fixtures/reward-run"),
    ],
)
def test_fixtures(call: Caller, name: str, path: str) -> None:
    called = call("inspect", path)
    assert called.code == 0
    assert called.err == ""
    assert "\x1b" not in called.out
    assert max(map(len, called.out.splitlines())) <= 80
    assert_golden(name, called.out)


def test_without_norms(call: Caller) -> None:
    assert "‖" not in call("inspect", "fixtures/reward-qwen2/adapter", "--no-norms").out


def test_json(call: Caller) -> None:
    table = call("inspect", "fixtures/reward-qwen2/adapter", "--json").json
    assert table["kind"] == "adapter"
    assert table["targets"][0]["norms"]["delta"]["median"] > 0
    assert call("inspect", "fixtures/reward-run", "--json").json["checkpoints"][0]["training"]["step"] == 2


def test_a_folder_that_is_nothing_is_an_error(call: Caller, tmp_path: Path) -> None:
    called = call("inspect", tmp_path)
    assert called.code == 3
    assert called.out == ""
    assert called.err.startswith("error: ")


def test_a_broken_adapter_is_shown_with_its_problems(call: Caller, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "reward-qwen2" / "adapter", tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"not safetensors")
    called = call("inspect", tmp_path / "a")
    assert called.code == 0
    assert "1 problem\n" in called.out
    assert "lora-tool validate" in called.out


def test_names_from_files_do_not_act_on_the_terminal(call: Caller, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "reward-qwen2" / "adapter", tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    evil = "\x1b[2J[bold red]\u202e"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": evil, "task_type": evil}))
    for args in ([], ["--json"]):
        called = call("inspect", tmp_path / "a", *args)
        assert not set(called.out) & set("\x1b\u202e")
        assert "[bold red]" in called.out


def test_an_output_without_greek_letters_gets_question_marks(
    call: Caller, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "out.txt").open("w", encoding="ascii") as out:
        monkeypatch.setattr("sys.stdout", out)
        assert call("inspect", "fixtures/reward-qwen2/adapter").code == 0
    assert "?" in (tmp_path / "out.txt").read_text()
