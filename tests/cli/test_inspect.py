from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from jsonschema import Draft202012Validator
from peft import LoraConfig
from safetensors.torch import load_file

from tests.cli.calling import FIXTURES, REPOSITORY, Caller, assert_golden

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


SCHEMA = json.loads((REPOSITORY / "src/lora_tool/workflows/inspection/inspect.schema.json").read_text())


@pytest.mark.parametrize(
    "paths",
    [
        ("reward-qwen2/adapter",),
        ("reward-qwen2/base",),
        ("reward-run",),
        ("reward-run/checkpoint-4",),
        ("zero/stage3-reward",),
        ("reward-run/checkpoint-2", "causal-llama/adapter", "causal-llama/base"),
    ],
)
def test_json_keeps_the_published_schema(call: Caller, paths: tuple[str, ...]) -> None:
    Draft202012Validator.check_schema(SCHEMA)
    found = call("inspect", *(FIXTURES / path for path in paths), "--json").json
    Draft202012Validator(SCHEMA).validate(found)


def test_json_has_the_numbers_of_every_module(call: Caller) -> None:
    folder = FIXTURES / "causal-llama" / "adapter"  # rsLoRA, with ranks and alphas by pattern
    stored = {name: values.double().numpy() for name, values in load_file(folder / "adapter_model.safetensors").items()}
    table = call("inspect", folder, "--json").json
    config = LoraConfig.from_pretrained(str(folder))
    assert len(table["modules"]) == sum(name.endswith("lora_A.weight") for name in stored) == 6
    for module in table["modules"]:
        a, b = (stored[f"base_model.model.{module['module']}.lora_{factor}.weight"] for factor in "AB")
        path = module["module"]
        alpha = next((value for key, value in config.alpha_pattern.items() if key in path), config.lora_alpha)
        values = np.linalg.svd(alpha / math.sqrt(len(a)) * b @ a, compute_uv=False)[: len(a)]
        assert (module["rank"], module["alpha"]) == (len(a), alpha)
        np.testing.assert_allclose(module["singular_values"], values, rtol=1e-9)
        shares = values / values.sum()
        assert module["effective_rank"] == pytest.approx(math.exp(-(shares * np.log(shares)).sum()))
        norms = [module[f"norm_{name}"] for name in ("a", "b", "delta")]
        assert norms == pytest.approx([*map(np.linalg.norm, (a, b, values))])
    without = call("inspect", folder, "--json", "--no-norms").json["modules"]
    assert [(each["norm_delta"], each["singular_values"]) for each in without] == [(None, [])] * 6


def test_several_are_shown_side_by_side(call: Caller) -> None:
    run = FIXTURES / "reward-run"
    assert_golden("inspect-several.txt", call("inspect", run / "checkpoint-2", run / "checkpoint-4").out)
    called = call("inspect", run / "checkpoint-2", run / "checkpoint-4", "--plot", "x.png")
    assert called.code == 2
    assert "lora-tool diff A B --plot" in called.err


def test_the_makers_of_a_folder_are_named(call: Caller, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "reward-qwen2" / "adapter", tmp_path / "a")
    listed = "- PEFT 0.1\n- TRL: 1.16.0\n- Pytorch: 2.13.0+cpu\n- Nonsense: latest\n\n## Citations\n- Year: 2020"
    (tmp_path / "a" / "README.md").write_text(f"# a card\n- Python 3\n### Framework versions\n\n{listed}\n")
    versions = call("inspect", tmp_path / "a", "--json").json["versions"]
    assert versions == {"peft": "0.21.2", "trl": "1.16.0", "torch": "2.13.0+cpu"}


def test_a_picture_of_another_kind_is_a_mistake_in_usage(call: Caller) -> None:
    called = call("inspect", FIXTURES / "reward-run", "--plot", "run.jpg")
    assert called.code == 2
    assert ".svg, .pdf, .html" in called.err


def test_a_broken_adapter_is_shown_with_its_problems(call: Caller, tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "reward-qwen2" / "adapter", tmp_path / "a")
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(b"not safetensors")
    called = call("inspect", tmp_path / "a")
    assert called.code == 0
    assert "1 problem\n" in called.out
    assert "lora-tool validate" in called.out
