"""Comparisons against what numpy says of the formed products."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_tool.checkpoints import AdapterDir, ModelDir, open_checkpoint
from lora_tool.workflows.inspection.comparison import (
    Comparison,
    Difference,
    ModuleChange,
    compare_adapters,
    compare_models,
)

FIXTURES = Path(__file__).parents[2] / "fixtures"
PREFIX = "base_model.model."


def adapters(first: Path, second: Path) -> Comparison:
    pair = open_checkpoint(first), open_checkpoint(second)
    assert isinstance(pair[0], AdapterDir)
    assert isinstance(pair[1], AdapterDir)
    return compare_adapters(pair[0], pair[1])


def models(first: Path, second: Path) -> Comparison:
    pair = open_checkpoint(first), open_checkpoint(second)
    assert isinstance(pair[0], ModelDir)
    assert isinstance(pair[1], ModelDir)
    return compare_models(pair[0], pair[1])


def named(comparison: Comparison) -> dict[str, Difference]:
    return {item.name: item for item in comparison.differences}


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("one", "two"):
        shutil.copytree(FIXTURES / "reward-run" / "checkpoint-4", tmp_path / name)
    return tmp_path / "one", tmp_path / "two"


def edit(folder: Path, change: dict[str, torch.Tensor], *, drop: tuple[str, ...] = (), **config: object) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name not in drop} | change
    save_file(tensors, path)
    held = json.loads((folder / "adapter_config.json").read_text()) | config
    (folder / "adapter_config.json").write_text(json.dumps(held))


def test_two_steps_of_a_run_differ_as_their_products_do() -> None:
    run = FIXTURES / "reward-run"
    held = [load_file(run / name / "adapter_model.safetensors") for name in ("checkpoint-2", "checkpoint-4")]
    comparison = adapters(run / "checkpoint-2", run / "checkpoint-4")
    lora = [item for item in comparison.differences if item.kind == "LoRA"]
    assert len(lora) == sum(name.endswith("lora_A.weight") for name in held[0])
    for item in lora:
        deltas = [
            2
            * (one[f"{PREFIX}{item.name}.lora_B.weight"].double() @ one[f"{PREFIX}{item.name}.lora_A.weight"].double())
            for one in held
        ]
        assert item.first == pytest.approx(float(deltas[0].norm()), rel=1e-12)
        assert item.second == pytest.approx(float(deltas[1].norm()), rel=1e-12)
        assert item.apart == pytest.approx(float((deltas[1] - deltas[0]).norm()), rel=1e-9)
        cosine = float((deltas[0] * deltas[1]).sum() / deltas[0].norm() / deltas[1].norm())
        assert item.cosine == pytest.approx(cosine, abs=1e-12)
        assert item.change is ModuleChange.CHANGED
    head = named(comparison)[f"{PREFIX}score.weight"]
    scores = [one[f"{PREFIX}score.weight"].double() for one in held]
    assert head.apart == pytest.approx(float((scores[1] - scores[0]).norm()))


def test_an_adapter_is_the_same_as_itself(pair: tuple[Path, Path]) -> None:
    comparison = adapters(*pair)
    assert comparison.same
    assert all(item.apart == 0 for item in comparison.differences)


def test_other_factors_of_the_same_product_are_no_distance_apart(pair: tuple[Path, Path]) -> None:
    tensors = load_file(pair[1] / "adapter_model.safetensors")
    module = f"{PREFIX}model.layers.0.self_attn.q_proj"
    turned = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))[0]
    a, b = tensors[f"{module}.lora_A.weight"].double(), tensors[f"{module}.lora_B.weight"].double()
    wider = {f"{module}.lora_A.weight": turned @ a, f"{module}.lora_B.weight": b @ turned.T}
    edit(pair[1], wider)
    item = named(adapters(*pair))["model.layers.0.self_attn.q_proj"]
    assert item.change is ModuleChange.ALIKE
    assert item.first is not None
    assert item.apart is not None
    assert item.apart < 1e-6 * item.first
    assert item.cosine == pytest.approx(1)


def test_config_scaling_and_absent_modules(pair: tuple[Path, Path]) -> None:
    gone = tuple(f"{PREFIX}model.layers.1.mlp.up_proj.lora_{x}.weight" for x in "AB")
    edit(pair[1], {}, drop=gone, lora_alpha=16)
    comparison = adapters(*pair)
    assert comparison.fields == {"lora_alpha": ("8", "16")} or comparison.fields["lora_alpha"][1].startswith("16")
    items = named(comparison)
    assert items["model.layers.1.mlp.up_proj"].change is ModuleChange.FIRST_ONLY
    doubled = items["model.layers.0.mlp.up_proj"]
    assert doubled.relative == pytest.approx(1)
    assert doubled.cosine == pytest.approx(1)


def test_base_models_are_compared_as_what_they_mean(pair: tuple[Path, Path], tmp_path: Path) -> None:
    for name in ("base", "two/base", "far/base"):
        (tmp_path / name).mkdir(parents=True)
    edit(pair[0], {}, base_model_name_or_path="../base")
    edit(pair[1], {}, base_model_name_or_path=str(tmp_path / "base"))
    assert adapters(*pair).same
    edit(pair[0], {}, base_model_name_or_path="./base")
    (pair[0] / "base").mkdir()
    edit(pair[1], {}, base_model_name_or_path="./base")  # the same words, another folder
    assert adapters(*pair).fields == {"base_model": (str(pair[0] / "base"), str(pair[1] / "base"))}
    edit(pair[1], {}, base_model_name_or_path="me/other")
    assert adapters(*pair).fields["base_model"][1] == "me/other"


def test_nan_is_no_number_and_no_error(pair: tuple[Path, Path]) -> None:
    name = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"
    edit(pair[1], {name: torch.full((4, 16), math.nan)})
    item = named(adapters(*pair))["model.layers.0.self_attn.q_proj"]
    assert item.change is ModuleChange.CHANGED
    assert item.apart is not None
    assert math.isnan(item.apart)


def test_models_tensor_by_tensor(tmp_path: Path) -> None:
    base = FIXTURES / "causal-llama" / "base"
    tensors = {name: tensor for path in base.glob("*.safetensors") for name, tensor in load_file(path).items()}
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_bytes((base / "config.json").read_bytes())
    changed, wider, resized, gone, *_ = sorted(tensors)
    edited = dict(tensors)
    edited[changed] = tensors[changed] + 0.5
    edited[wider] = tensors[wider].float()
    edited[resized] = torch.zeros(3, 3)
    del edited[gone]
    edited["new.weight"] = torch.ones(4)
    save_file({name: tensor.contiguous() for name, tensor in edited.items()}, other / "model.safetensors")
    items = named(models(base, other))
    assert items.keys() == tensors.keys() | {"new.weight"}
    difference = (edited[changed].double() - tensors[changed].double()).norm()
    assert items[changed].apart == pytest.approx(float(difference))
    assert (items[wider].change, items[wider].apart, items[wider].note) == (ModuleChange.CHANGED, 0, "BF16 and F32")
    assert items[resized].change is ModuleChange.UNLIKE
    assert "[3, 3]" in items[resized].note
    assert items[gone].change is ModuleChange.FIRST_ONLY
    assert (items["new.weight"].change, items["new.weight"].second) == (ModuleChange.SECOND_ONLY, 2)
    untouched = tensors.keys() - {changed, wider, resized, gone}
    assert all(items[name].change is ModuleChange.SAME for name in untouched)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = models(FIXTURES / "causal-llama" / "base", FIXTURES / "causal-llama" / "base")
    monkeypatch.setattr("lora_tool.formats.stored_numbers.BLOCK", 7)
    assert [(i.name, i.change) for i in whole.differences] == [
        (i.name, i.change)
        for i in models(FIXTURES / "causal-llama" / "base", FIXTURES / "causal-llama" / "base").differences
    ]
    assert np.isfinite([item.first for item in whole.differences if item.first is not None]).all()
