"""`lora-tool diff` as it is typed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.calling import Caller, assert_golden

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
