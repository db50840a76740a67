"""Sums and smaller forms of adapters, against PEFT's own ΔW and a dense singular value decomposition in float64."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from lora_tool import combine, resize, validate, verify
from lora_tool.core.errors import FindingsFound, IncompatibleBase, LoraToolError, UnsupportedAdapter, WrongValue
from lora_tool.formats.files import read_json
from lora_tool.plans.algebra.plan_combine import plan_combine, plan_resize
from tests.oracle.peft_merge import load_model, save_adapter, save_base, saved_tensors
from tests.oracle.tiny import Task

pytestmark = pytest.mark.usefixtures("typed_hints")
Deltas = dict[str, torch.Tensor]

EXACT = 2e-7
QV: dict[str, Any] = {"r": 6, "lora_alpha": 7, "target_modules": ["q_proj", "v_proj"]}
ALL: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
PATTERNS = QV | {"rank_pattern": {"layers.0.self_attn.q_proj": 3}, "alpha_pattern": {"v_proj": 5}}
RSLORA = {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"], "use_rslora": True}
EMBEDDINGS = {"r": 2, "target_modules": ["embed_tokens", "q_proj"]}
CONV1D = {"r": 2, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True}


def deltas(base: Path, adapter: Path, task: Task = "causal-lm") -> Deltas:
    """Return what PEFT computes as ΔW of every module, in float64."""
    model = PeftModel.from_pretrained(load_model(base, task), adapter, autocast_adapter_dtype=False).double()
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "get_delta_weight")}
    return {
        name: layer.get_delta_weight("default").detach()
        for name, layer in layers.items()
        if "default" in {**layer.lora_A, **layer.lora_embedding_A}
    }


def summed(parts: list[tuple[float, Deltas]]) -> Deltas:
    names = dict.fromkeys(name for _, table in parts for name in table)
    return {
        name: torch.stack([weight * table[name] for weight, table in parts if name in table]).sum(dim=0)
        for name in names
    }


def farthest(ours: Deltas, expected: Deltas) -> float:
    """Return the largest relative distance of a module's ΔW."""
    assert ours.keys() == expected.keys()
    return max(float((ours[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def adapters_of(folder: Path, model_type: str, *loras: dict[str, Any], dtype: Any = None) -> tuple[Path, list[Path]]:
    base = save_base(folder / "base", model_type, "causal-lm", torch.float32)
    made = []
    for at, lora in enumerate(loras):
        path = save_adapter(folder / f"adapter-{at}", base, "causal-lm", lora, dtype=dtype)
        weights = load_file(path / "adapter_model.safetensors")
        generator = torch.Generator().manual_seed(at)  # every adapter has values of its own
        noise = {n: t + (torch.randn(t.shape, generator=generator) * 0.05).to(t.dtype) for n, t in weights.items()}
        save_file(noise, path / "adapter_model.safetensors", metadata={"format": "pt"})
        made.append(path)
    return base, made


CASES: dict[str, tuple[str, list[dict[str, Any]], list[float]]] = {
    "ranks-and-targets": ("llama", [ALL, QV], [0.7, -0.3]),
    "patterns": ("llama", [PATTERNS, QV | {"r": 3}], [1.0, 2.5]),
    "rslora-and-plain": ("llama", [RSLORA, QV, ALL], [0.5, 1.0, -1.5]),
    "rslora-alone": ("llama", [RSLORA], [1.0]),
    "embeddings": ("llama", [EMBEDDINGS, EMBEDDINGS | {"r": 3}], [0.4, 0.6]),
    "conv1d": ("gpt2", [CONV1D, CONV1D | {"r": 4}], [0.3, 0.3]),
}


@pytest.mark.parametrize("name", CASES)
def test_pefts_delta_of_the_sum_is_the_sum_of_pefts_deltas(name: str, tmp_path: Path) -> None:
    model_type, loras, weights = CASES[name]
    base, adapters = adapters_of(tmp_path, model_type, *loras)
    out = combine(adapters, weights=weights, out=tmp_path / "out").path
    expected = summed([(weight, deltas(base, each)) for weight, each in zip(weights, adapters, strict=True)])
    assert farthest(deltas(base, out), expected) <= EXACT
    assert not validate(out, base=base).findings
    assert not verify(out).report.findings


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_factors_in_16_bits_keep_their_type_where_nothing_is_rounded(dtype: torch.dtype, tmp_path: Path) -> None:
    base, adapters = adapters_of(tmp_path, "llama", QV | {"lora_alpha": 6}, QV | {"lora_alpha": 6, "r": 6}, dtype=dtype)
    same = combine(adapters, out=tmp_path / "same").path
    assert {tensor.dtype for tensor in saved_tensors(same).values()} == {dtype}
    scaled = combine(adapters, weights=[0.7, 0.3], out=tmp_path / "scaled").path
    assert {tensor.dtype for tensor in saved_tensors(scaled).values()} == {torch.float32}
    for out, weights in ((same, (1.0, 1.0)), (scaled, (0.7, 0.3))):
        expected = summed([(weight, deltas(base, each)) for weight, each in zip(weights, adapters, strict=True)])
        assert farthest(deltas(base, out), expected) <= EXACT


def least(delta: torch.Tensor, rank: int) -> float:
    """Return the distance of the best approximation of this rank, by a dense decomposition."""
    return float(torch.linalg.svdvals(delta)[rank:].norm())


def test_each_module_keeps_the_share_that_is_asked_for_at_the_lowest_rank(tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "llama", ALL | {"r": 12})
    expected = deltas(base, adapter)
    out = resize(adapter, keep=0.9, out=tmp_path / "out").path
    ours = deltas(base, out)
    for name, delta in expected.items():
        rank = int(torch.linalg.matrix_rank(ours[name], atol=1e-6))
        total = float(delta.norm()) ** 2
        assert 1 - least(delta, rank) ** 2 / total >= 0.9 > 1 - least(delta, rank - 1) ** 2 / total
    assert not validate(out, base=base).findings
    assert resize(adapter, rank=12, out=tmp_path / "whole").path
    assert farthest(deltas(base, tmp_path / "whole"), expected) <= EXACT


def test_the_same_factors_twice_cancel_to_zero_and_lose_no_tensor(tmp_path: Path) -> None:
    base, (one,) = adapters_of(tmp_path, "llama", QV)
    other = Path(shutil.copytree(one, tmp_path / "negative"))
    table = load_file(one / "adapter_model.safetensors")
    save_file({n: -t if "lora_B" in n else t for n, t in table.items()}, other / "adapter_model.safetensors")
    done = combine([one, other], rank=4, out=tmp_path / "out")
    assert {float(delta.abs().max()) for delta in deltas(base, done.path).values()} == {0.0}
    assert "4 modules of 4 is zero" in done.plan.warnings[0]


def test_heads_are_kept_chosen_or_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "seq-cls", torch.float32)
    one, other = (save_adapter(tmp_path / name, base, "seq-cls", lora) for name, lora in (("a", QV), ("b", ALL)))
    head = "base_model.model.score.weight"
    changed = saved_tensors(other)
    save_file({**changed, head: saved_tensors(one)[head]}, other / "adapter_model.safetensors")
    kept = combine([one, other], out=tmp_path / "kept").path
    assert torch.equal(saved_tensors(kept)[head], saved_tensors(one)[head])
    save_file(changed, other / "adapter_model.safetensors")
    with pytest.raises(FindingsFound, match=r"LT512.*score\.weight"):
        combine([one, other], out=tmp_path / "refused")
    chosen = combine([one, other], head_of=other, out=tmp_path / "chosen").path
    assert torch.equal(saved_tensors(chosen)[head], changed[head])
    assert not validate(chosen, base=base).findings
    assert not verify(chosen).report.findings
    loaded = PeftModel.from_pretrained(load_model(base, "seq-cls"), chosen)
    score: Any = loaded.get_submodule("base_model.model.score")
    assert torch.equal(score.weight.detach(), changed[head])


def test_biases_of_lora_b_add_up(tmp_path: Path) -> None:
    biased = QV | {"lora_bias": True}
    _, adapters = adapters_of(tmp_path, "qwen2", biased, biased | {"r": 3})
    out = combine(adapters, weights=[0.7, -0.2], out=tmp_path / "out").path
    tables = [saved_tensors(each) for each in adapters]
    for name, tensor in saved_tensors(out).items():
        if name.endswith("lora_B.bias"):
            expected = 0.7 * 7 / 6 * tables[0][name].double() - 0.2 * 7 / 3 * tables[1][name].double()
            assert torch.allclose(tensor.double(), expected, rtol=1e-6, atol=0)
    assert not verify(out).report.findings


REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "dora": ([QV | {"use_dora": True}, QV], r"DoRA"),
    "pissa": ([QV | {"init_lora_weights": "pissa"}, QV], r"init_lora_weights. pissa"),
    "biases": ([QV | {"lora_bias": True}, QV], r"`lora_bias` is True in .*, False in"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_add_up_is_refused_by_name(name: str, tmp_path: Path) -> None:
    loras, message = REFUSED[name]
    base, adapters = adapters_of(tmp_path, "qwen2", *loras)
    with pytest.raises((UnsupportedAdapter, FindingsFound), match=message) as refused:
        plan_combine(adapters)
    assert refused.value.hint
    assert base.is_dir()


def test_adapters_of_two_bases_are_refused(tmp_path: Path) -> None:
    _, (one, other) = adapters_of(tmp_path, "llama", QV, QV | {"r": 3})
    config = read_json(other / "adapter_config.json")
    (other / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": "another/base"}))
    with pytest.raises(IncompatibleBase, match="another/base"):
        plan_combine([one, other])
    assert plan_combine([one, other], base=tmp_path / "base").side_files


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"rank": 2, "keep": 0.5}, "not both"),
        ({"rank": 0}, "at least 1"),
        ({"keep": 1.5}, "up to 1"),
        ({"weights": [1.0, 2.0]}, "one for each"),
        ({"weights": [float("nan")]}, "weight nan"),
        ({"head_of": "nobody"}, "not one of the adapters"),
    ],
)
def test_a_wrong_wish_is_named(asked: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, (adapter,) = adapters_of(tmp_path, "llama", QV)
    with pytest.raises(WrongValue, match=message):
        plan_combine([adapter], **asked)
    with pytest.raises(LoraToolError, match="one of the two"):
        plan_resize(adapter)


def test_a_tensor_that_is_not_a_number_is_refused(tmp_path: Path) -> None:
    _, (adapter,) = adapters_of(tmp_path, "llama", QV)
    table = saved_tensors(adapter)
    name = next(name for name in table if "lora_A" in name)
    table[name][0, 0] = float(np.nan)
    save_file(table, adapter / "adapter_model.safetensors")
    for ignore in ((), ("LT2",)):
        with pytest.raises(LoraToolError, match=r"NaN|LT2"):
            resize(adapter, rank=2, out=tmp_path / "out", ignore=ignore)
    assert not (tmp_path / "out").exists()


def test_factors_of_three_types_are_recompressed(tmp_path: Path) -> None:
    base, adapters = adapters_of(tmp_path, "llama", QV, QV | {"r": 3}, ALL)
    for adapter, dtype in zip(adapters, (torch.bfloat16, torch.float16, torch.float32), strict=True):
        table = {name: tensor.to(dtype) for name, tensor in saved_tensors(adapter).items()}
        save_file(table, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    expected = summed([(1.0, deltas(base, each)) for each in adapters])
    out = combine(adapters, rank=4, out=tmp_path / "out").path
    for name, found in deltas(base, out).items():
        size = float(expected[name].norm())
        assert float((found - expected[name]).norm()) <= least(expected[name], 4) * (1 + 1e-6) + EXACT * size
    assert not verify(out).report.findings


def test_what_is_no_number_is_told_and_not_computed_with(tmp_path: Path) -> None:
    _, (adapter,) = adapters_of(tmp_path, "llama", QV)
    table = saved_tensors(adapter)
    name = next(name for name in table if "lora_A" in name)
    whole = combine([adapter], weights=[0.5], out=tmp_path / "whole").path
    table[name][0, 0] = float("nan")
    save_file(table, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    out = combine([adapter], weights=[0.5], ignore=["LT2"], out=tmp_path / "out").path
    found = verify(out).report
    assert (found.findings, [skipped.code for skipped in found.skipped]) == ((), ["LT608"])
    written = saved_tensors(whole)
    written[name][0, 0] = float("inf")
    save_file(written, whole / "adapter_model.safetensors", metadata={"format": "pt"})
    table[name][0, 0] = 0.5
    save_file(table, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    assert "NaN or infinity" in str([finding.message for finding in verify(whole).report.findings])


def test_trained_tokens_are_kept_once_chosen_or_refused(tmp_path: Path) -> None:
    tokens = [QV | {"trainable_token_indices": {"embed_tokens": rows}} for rows in ([3, 5], [4, 9])]
    base, (one, other) = adapters_of(tmp_path, "llama", *tokens)
    with pytest.raises(FindingsFound, match=r"LT512.*trained tokens in both"):
        plan_combine([one, other])
    chosen = combine([one, other], head_of=other, out=tmp_path / "chosen").path
    assert read_json(chosen / "adapter_config.json")["trainable_token_indices"] == {"embed_tokens": [4, 9]}
    loaded = PeftModel.from_pretrained(load_model(base, "causal-lm"), chosen).merge_and_unload().state_dict()
    rows = next(tensor for name, tensor in saved_tensors(other).items() if "trainable_tokens_delta" in name)
    assert torch.equal(loaded["model.embed_tokens.weight"][[4, 9]], rows)
    assert torch.equal(
        loaded["model.embed_tokens.weight"][[3, 5]], saved_tensors(base)["model.embed_tokens.weight"][[3, 5]]
    )
    assert not verify(chosen).report.findings
    table, same = saved_tensors(one), Path(shutil.copytree(one, tmp_path / "same"))
    save_file(
        {name: -tensor if "lora_B" in name else tensor for name, tensor in table.items()},
        same / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    kept = combine([one, same], weights=[1, 0.5], out=tmp_path / "kept").path
    assert not verify(kept).report.findings
