"""`lora-tool diff` as it is typed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.calling import FIXTURES, Caller, assert_golden

FIRST, SECOND = "fixtures/reward-run/checkpoint-2", "fixtures/reward-run/checkpoint-4"


def test_two_steps_of_a_run(call: Caller) -> None:
    done = call("diff", FIRST, SECOND)
    assert (done.code, done.err) == (0, "")
    assert_golden("diff.txt", done.out)


def test_json_has_every_module(call: Caller) -> None:
    report = call("diff", FIRST, SECOND, "--json").json
    assert report["same"] is False
    names = [item["name"] for item in report["differences"]]
    assert "model.layers.0.self_attn.q_proj" in names
    assert {item["change"] for item in report["differences"]} == {"changed"}


@pytest.mark.parametrize(("other", "code"), [(FIRST, 0), (SECOND, 1)])
def test_exit_code_tells(call: Caller, other: str, code: int) -> None:
    assert call("diff", FIRST, other, "--exit-code").code == code


def test_all_lists_each_module(call: Caller) -> None:
    assert call("diff", FIRST, SECOND, "--all").out.count("layers.1.") == 7


def test_a_small_turn_has_digits_that_say_something(call: Caller, tmp_path: Path) -> None:
    for name in ("a", "b"):
        shutil.copytree(FIXTURES / "reward-run" / "checkpoint-4", tmp_path / name)
    weights = tmp_path / "b" / "adapter_model.safetensors"
    tensors = load_file(weights)
    name = next(name for name in tensors if name.endswith("q_proj.lora_B.weight"))
    before = tensors[name].double()
    noise = torch.randn(before.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tensors[name] = (before + 1e-4 * noise * before.std()).float()
    save_file(tensors, weights)
    a = tensors[name.replace("lora_B", "lora_A")].double()
    first, second = before @ a, tensors[name].double() @ a
    unit = first / first.norm() - second / second.norm()
    (line,) = [line for line in call("diff", tmp_path / "a", tmp_path / "b").out.splitlines() if "q_proj" in line]
    assert f"1 - {float((unit * unit).sum()) / 2:.1e}" in line


@pytest.mark.parametrize("other", ["fixtures/reward-qwen2/base", "fixtures/reward-run"])
def test_unlike_things_are_refused(call: Caller, other: str) -> None:
    done = call("diff", FIRST, other)
    assert done.code == 3
    assert "hint:" in done.err
    assert done.out == ""


def test_a_damaged_file_is_one_error(call: Caller, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\xff" * 20)
    done = call("diff", FIRST, tmp_path)
    assert done.code == 3
    assert done.err.startswith("error:")
