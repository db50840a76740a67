"""Every merge against PEFT's own: the saved files, name by name and bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_tool.checkpoints import AdapterDir, open_checkpoint
from tests.oracle.peft_merge import (
    Table,
    different,
    layout,
    merge_with_ours,
    merge_with_peft,
    save_adapter,
    save_base,
    saved_tensors,
)
from tests.oracle.tiny import Task

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ALL_LINEAR = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    model_type: str
    task: Task = "causal-lm"
    dtype: torch.dtype = BF16
    lora: Mapping[str, Any] = field(default_factory=lambda: ALL_LINEAR)
    base: Mapping[str, Any] = field(default_factory=dict)
    adapter_dtype: torch.dtype | None = None

    def write(self, folder: Path) -> tuple[Path, Path]:
        base = save_base(folder / "base", self.model_type, self.task, self.dtype, **self.base)
        return base, save_adapter(folder / "adapter", base, self.task, self.lora, dtype=self.adapter_dtype)


BASES = [
    Case(name="gpt2", model_type="gpt2", lora={**ALL_LINEAR, "fan_in_fan_out": True}),
    Case(name="openai-gpt", model_type="openai-gpt", dtype=FP16, lora={**ALL_LINEAR, "fan_in_fan_out": True}),
    Case(name="llama", model_type="llama"),
    Case(name="qwen2-tied", model_type="qwen2", base={"tie_word_embeddings": True}),
    Case(name="qwen2-untied", model_type="qwen2", base={"tie_word_embeddings": False}),
    Case(name="bert-seq-cls", model_type="bert", task="seq-cls", dtype=FP32),
    Case(
        name="distilbert-seq-cls",
        model_type="distilbert",
        task="seq-cls",
        dtype=FP32,
        lora={"r": 4, "target_modules": ["q_lin", "v_lin", "lin1"]},
    ),
    Case(name="score-in-fp16", model_type="qwen2", task="seq-cls", dtype=FP16),
]
"""What a base may be stored like; every architecture is in test_zoo."""
_Q_AND_V = {"r": 4, "target_modules": ["q_proj", "v_proj"]}
FEATURES = [
    Case(name="fp16", model_type="llama", dtype=FP16),
    Case(name="fp32", model_type="llama", dtype=FP32),
    Case(name="rslora", model_type="llama", lora={**ALL_LINEAR, "r": 6, "lora_alpha": 7, "use_rslora": True}),
    Case(
        name="rslora-gpt2",
        model_type="gpt2",
        lora={**ALL_LINEAR, "r": 3, "lora_alpha": 7, "use_rslora": True, "fan_in_fan_out": True},
    ),
    Case(
        name="patterns",
        model_type="llama",
        lora={
            **ALL_LINEAR,
            "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 5, r".*\.0\..*v_proj": 3},
            "alpha_pattern": {"k_proj": 3, "^model.layers.0.mlp.up_proj": 11},
        },
    ),
    Case(name="lora-bias", model_type="qwen2", lora={**_Q_AND_V, "lora_alpha": 3, "lora_bias": True}),
    Case(name="lora-bias-opt", model_type="opt", dtype=FP16, lora={**ALL_LINEAR, "lora_alpha": 3, "lora_bias": True}),
    Case(name="saved-norm", model_type="llama", lora={**_Q_AND_V, "modules_to_save": ["norm"]}),
    Case(name="saved-layer-norm", model_type="opt", lora={**_Q_AND_V, "modules_to_save": ["final_layer_norm"]}),
    Case(
        name="saved-untied-head",
        model_type="llama",
        lora={**_Q_AND_V, "modules_to_save": ["lm_head"]},
        base={"tie_word_embeddings": False},
    ),
    Case(name="regex-target", model_type="llama", lora={"r": 4, "target_modules": r".*layers\.1\..*(q|o)_proj"}),
    Case(
        name="some-layers",
        model_type="llama",
        lora={**_Q_AND_V, "layers_to_transform": [1], "layers_pattern": "layers"},
    ),
    Case(name="excluded", model_type="llama", lora={**ALL_LINEAR, "exclude_modules": ["down_proj"]}),
    Case(name="adapter-bf16", model_type="llama", lora={**ALL_LINEAR, "lora_alpha": 7}, adapter_dtype=BF16),
    Case(name="adapter-fp16-base-fp32", model_type="qwen2", dtype=FP32, adapter_dtype=FP16),
    Case(name="rank-1", model_type="llama", lora={**ALL_LINEAR, "r": 1, "lora_alpha": 5}),
    Case(name="rank-64", model_type="llama", lora={**ALL_LINEAR, "r": 64, "lora_alpha": 16}),
]


@pytest.mark.parametrize("case", BASES + FEATURES, ids=lambda case: case.name)
def test_precision_peft_writes_pefts_bits(case: Case, tmp_path: Path) -> None:
    base, adapter = case.write(tmp_path)
    theirs = saved_tensors(merge_with_peft(base, adapter, tmp_path / "theirs", case.task))
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", "peft"))
    assert layout(ours) == layout(theirs)
    assert not different(ours, theirs)
    assert different(saved_tensors(base), {name: theirs[name] for name in theirs if name in saved_tensors(base)})


@pytest.mark.parametrize("case", FEATURES, ids=lambda case: case.name)
def test_float32_is_within_one_ulp_of_peft_in_16_bits_and_a_summation_bound_in_32(case: Case, tmp_path: Path) -> None:
    base, adapter = case.write(tmp_path)
    theirs = saved_tensors(merge_with_ours(base, adapter, tmp_path / "peft", "peft"))
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", "float32"))
    assert layout(ours) == layout(theirs)
    steps = exact_inputs(base, adapter)
    for name, tensor in theirs.items():
        distance = (ours[name].double() - tensor.double()).abs()
        allowed = summation_bound(*steps[name]) if name in steps else torch.zeros(())
        if tensor.dtype is not FP32:
            allowed = allowed + ulp(tensor) * (name in steps)
        assert bool((distance <= allowed).all()), name


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("rslora", [False, True])
def test_float64_rounds_the_exact_sum_once(dtype: torch.dtype, rslora: bool, tmp_path: Path) -> None:
    lora = {"r": 3, "lora_alpha": 7, "use_rslora": rslora, "target_modules": ["q_proj", "down_proj"]}
    base, adapter = Case(name="exact", model_type="llama", dtype=dtype, lora=lora).write(tmp_path)
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", "float64"))
    steps = exact_inputs(base, adapter)
    assert len(steps) == 4
    for name, (weight, a, b, scaling) in steps.items():
        exact = exact_sum(weight, a, b, scaling)
        flat = ours[name].reshape(-1)
        assert [round_exactly(value, dtype) for value in exact] == flat.double().tolist(), name


def exact_inputs(base: Path, adapter: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]]:
    """Return the weight, A, B and scaling of each adapted tensor; a bias is taken as B of one column and A of 1."""
    opened = open_checkpoint(adapter)
    assert isinstance(opened, AdapterDir)
    assert opened.config is not None
    weights, factors = saved_tensors(base), saved_tensors(adapter)
    inputs = {}
    for name in factors:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if not name.endswith("lora_A.weight"):
            continue
        a, b = factors[name].double(), factors[name.replace("lora_A", "lora_B")].double()
        weight = weights[f"{module}.weight"].double()
        conv1d = opened.config.fan_in_fan_out
        inputs[f"{module}.weight"] = (
            (weight, b.T, a.T, opened.config.scaling(module))
            if conv1d
            else (weight, a, b, opened.config.scaling(module))
        )
        bias = factors.get(f"base_model.model.{module}.lora_B.bias")
        if bias is not None:
            column = weights[f"{module}.bias"].double()[:, None]
            one = torch.ones((1, 1), dtype=torch.float64)
            inputs[f"{module}.bias"] = (column, one, bias.double()[:, None], opened.config.scaling(module))
    return inputs


def summation_bound(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """How far two float32 evaluations of W + s·B·A may lie apart, whatever their order of summation.

    Each is off by at most (r + 2) roundings of 2^-24 of the sum of the terms' magnitudes (Higham, Accuracy and
    Stability, §3.1).
    """
    magnitude = weight.abs() + scaling * (b.abs() @ a.abs())
    bound = 2 * (a.shape[0] + 2) * 2.0**-24 * magnitude
    return bound[:, 0] if weight.shape[1] == 1 else bound


def ulp(values: torch.Tensor) -> torch.Tensor:
    """Return the distance to the next 16-bit number away from zero."""
    away = torch.full_like(values, torch.inf).copysign(values)
    return (torch.nextafter(values, away).double() - values.double()).abs()


def exact_sum(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> list[Fraction]:
    rows, columns = b.tolist(), a.T.tolist()
    return [
        Fraction(w) + Fraction(scaling) * sum(Fraction(x) * Fraction(y) for x, y in zip(row, column, strict=True))
        for row, weights in zip(rows, weight.tolist(), strict=True)
        for column, w in zip(columns, weights, strict=True)
    ]


def round_exactly(value: Fraction, dtype: torch.dtype) -> float:
    """Return the normal number of `dtype` nearest to `value`, ties to even, by integer arithmetic alone."""
    digits = {BF16: 8, FP16: 11, FP32: 24}[dtype]
    smallest = {BF16: -126, FP16: -14, FP32: -126}[dtype]
    if not value:
        return 0.0
    exponent = abs(value.numerator).bit_length() - value.denominator.bit_length()
    exponent -= abs(value) < Fraction(2) ** exponent
    unit = Fraction(2) ** (max(exponent, smallest) - digits + 1)
    return float(round(value / unit) * unit)  # round() of a Fraction goes to even on ties


def test_the_exact_reference_itself_agrees_with_torch() -> None:
    samples = torch.randn(500, generator=torch.Generator().manual_seed(1)) * 1e-3
    for dtype in (BF16, FP16):
        rounded = [round_exactly(Fraction(value), dtype) for value in samples.tolist()]
        assert rounded == samples.to(dtype).double().tolist()


def test_the_comparison_sees_one_wrong_bit(tmp_path: Path) -> None:
    base = saved_tensors(save_base(tmp_path, "llama", "causal-lm", BF16))
    changed: Table = {name: tensor.clone() for name, tensor in base.items()}
    name = next(iter(changed))
    changed[name].view(torch.int16).reshape(-1)[-1] ^= 1
    assert different(changed, base) == [name]
