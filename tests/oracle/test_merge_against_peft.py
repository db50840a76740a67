"""Merges against PEFT's own: the saved files, name by name and bit by bit, and `verify` of what each of both wrote.

A case is what PEFT's config may say of LoRA, or what base and adapter may be stored like. Every architecture is in
test_zoo.py, every task type in test_task_types.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file

from lora_tool import verify
from lora_tool.checkpoints import AdapterDir, open_checkpoint
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.rules.merged.evidence import Verdict
from lora_tool.verification.verified import Level, Verification
from tests.oracle.peft_merge import (
    Table,
    different,
    layout,
    load_model,
    merge_with_ours,
    merge_with_peft,
    require_same,
    save_adapter,
    save_base,
    saved_tensors,
)

# PEFT warns of every adapter on tied embeddings: what becomes of those is the test
pytestmark = [
    pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning"),
    pytest.mark.filterwarnings("ignore:Input and output embeddings are no longer tied:UserWarning"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32, "fp64": torch.float64}
THREE, FOUR = "bf16 fp16 fp32", "bf16 fp16 fp32 fp64"
ALL_LINEAR = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}


@dataclass(frozen=True, kw_only=True)
class Case:
    model_type: str
    lora: Mapping[str, Any] = field(default_factory=dict)
    """Fields of LoraConfig that differ from `ALL_LINEAR`."""
    dtypes: str = "bf16"
    """Types of the base, by their names in `DTYPES`."""
    tied: bool | None = None
    """None where the ends are as the class has them."""
    adapter_dtype: torch.dtype | None = None
    summed: bool = False
    """Each weight is W + s·B·A of linear layers, so that a float32 sum has a bound of its own."""

    def write(self, folder: Path, dtype: torch.dtype) -> tuple[Path, Path]:
        ends = {} if self.tied is None else {"tie_word_embeddings": self.tied}
        base = save_base(folder / "base", self.model_type, "causal-lm", dtype, **ends)
        lora = {**ALL_LINEAR, **self.lora}
        return base, save_adapter(folder / "adapter", base, "causal-lm", lora, dtype=self.adapter_dtype)


def plain(model_type: str = "llama", dtypes: str = "bf16", **lora: Any) -> Case:
    """Return a case of LoRA on linear layers, and of modules saved whole."""
    return Case(model_type=model_type, dtypes=dtypes, lora=lora, summed=True)


def case(model_type: str, dtypes: str = THREE, tied: bool | None = None, **lora: Any) -> Case:
    return Case(model_type=model_type, dtypes=dtypes, lora=lora, tied=tied)


QV = ["q_proj", "v_proj"]
CONV1D: dict[str, Any] = {"fan_in_fan_out": True}
CASES: dict[str, Case] = {
    "linear": plain(dtypes="bf16 fp16 fp32"),
    "linear-of-gpt": plain("openai-gpt", "fp16", **CONV1D),
    "linear-tied": Case(model_type="qwen2", tied=True, summed=True),
    "rslora": plain(r=6, lora_alpha=7, use_rslora=True),
    "rslora-gpt2": plain("gpt2", r=3, lora_alpha=7, use_rslora=True, **CONV1D),
    "patterns": plain(
        rank_pattern={"q_proj": 2, "layers.1.mlp.down_proj": 5, r".*\.0\..*v_proj": 3},
        alpha_pattern={"k_proj": 3, "^model.layers.0.mlp.up_proj": 11},
    ),
    "lora-bias": plain("qwen2", target_modules=QV, lora_alpha=3, lora_bias=True),
    "lora-bias-opt": plain("opt", "fp16", lora_alpha=3, lora_bias=True),
    "saved-norm": plain(target_modules=QV, modules_to_save=["norm"]),
    "saved-layer-norm": plain("opt", target_modules=QV, modules_to_save=["final_layer_norm"]),
    "saved-untied-head": plain(target_modules=QV, modules_to_save=["lm_head"]),
    "regex-target": plain(target_modules=r".*layers\.1\..*(q|o)_proj"),
    "some-layers": plain(target_modules=QV, layers_to_transform=[1], layers_pattern="layers"),
    "one-layer-by-number": plain(dtypes=THREE, target_modules=["q_proj", "up_proj"], layers_to_transform=1),
    "excluded": plain(exclude_modules=["down_proj"]),
    "excluded-by-regex": plain(dtypes=THREE, exclude_modules=r".*layers\.0.*|.*down_proj"),
    "adapter-bf16": Case(model_type="llama", lora={"lora_alpha": 7}, adapter_dtype=BF16, summed=True),
    "adapter-fp16-base-fp32": Case(model_type="qwen2", dtypes="fp32", adapter_dtype=FP16, summed=True),
    "rank-1": plain(r=1, lora_alpha=5),
    "rank-64": plain(r=64, lora_alpha=16),
    "dora": case("llama", FOUR, use_dora=True),
    "dora-rslora": case("qwen2", use_dora=True, use_rslora=True, lora_alpha=7),
    "dora-conv1d": case("gpt2", use_dora=True, **CONV1D),
    "dora-embedding": case("llama", FOUR, use_dora=True, target_modules=["embed_tokens", "q_proj"]),
    "dora-embedding-positions": case("gpt2", use_dora=True, use_rslora=True, target_modules=["wpe", "c_fc"], **CONV1D),
    "pissa": case("llama", init_lora_weights="pissa"),
    "pissa-conv1d": case("gpt2", init_lora_weights="pissa", lora_alpha=3, **CONV1D),
    "pissa-of-a-rank-beyond-the-matrix": case("llama", "bf16", init_lora_weights="pissa", r=64),
    "olora": case("qwen2", init_lora_weights="olora", use_rslora=True),
    "olora-of-a-rank-beyond-the-matrix": case("llama", "bf16", init_lora_weights="olora", r=64, use_rslora=True),
    "embedding-untied": case("llama", FOUR, target_modules=["embed_tokens", "q_proj"]),
    "embedding-rslora-non-power-of-two": case("llama", target_modules=["embed_tokens"], r=6, use_rslora=True),
    "embedding-and-lm-head": case("llama", target_modules=["embed_tokens", "lm_head", "o_proj"]),
    "embedding-gpt2-positions": case("gpt2", target_modules=["wpe", "c_attn"], **CONV1D),
    "tokens-untied": case("llama", trainable_token_indices=[1, 5, 3]),
    "tokens-tied": case("qwen2", FOUR, tied=True, trainable_token_indices={"embed_tokens": [0, 2]}),
    "saved-embedding-untied": case("llama", modules_to_save=["embed_tokens", "lm_head"]),
    "saved-embedding-of-tied": case("qwen2", tied=True, modules_to_save=["embed_tokens"]),
    "saved-lm-head-of-tied": case("qwen2", tied=True, modules_to_save=["lm_head"]),
    "saved-both-of-tied": case("qwen2", tied=True, modules_to_save=["embed_tokens", "lm_head"]),
    "bias-all": case("qwen2", FOUR, bias="all"),
    "bias-lora-only": case("qwen2", bias="lora_only", target_modules=QV),
    "bias-all-conv1d": case("gpt2", bias="all", **CONV1D),
    "bias-all-phi": case("phi", bias="all"),
    "lora-bias-on-a-trained-bias": case("opt", "bf16", tied=False, lora_bias=True, bias="lora_only"),
    "lora-bias-on-a-trained-bias-conv1d": case("gpt2", "bf16", lora_bias=True, bias="all", **CONV1D),
}


def proven(verification: Verification) -> None:
    """Every tensor was compared, and is what it should be; nothing is wrong, and the models here have no tokenizer."""
    assert {found.name: found.verdict for found in verification.evidence.values()} == dict.fromkeys(
        verification.evidence, Verdict.RIGHT
    )
    assert not verification.report.findings
    assert {skipped.code for skipped in verification.report.skipped} <= {"LT320"}  # which asks the tokenizer


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, each in CASES.items() for dtype in each.dtypes.split()]
)
def test_precision_peft_writes_pefts_bits(name: str, dtype: str, tmp_path: Path) -> None:
    base, adapter = CASES[name].write(tmp_path, DTYPES[dtype])
    peft = merge_with_peft(base, adapter, tmp_path / "theirs", "causal-lm")
    ours = merge_with_ours(base, adapter, tmp_path / "ours", "peft")
    theirs, before = require_same(ours, peft), saved_tensors(base)
    assert different(before, {name: theirs[name] for name in theirs if name in before})
    said = [json.loads((folder / "config.json").read_text())["tie_word_embeddings"] for folder in (ours, peft)]
    assert said[0] == said[1]
    proven(verify(ours))
    proven(verify(ours, level=Level.SAMPLE))
    proven(verify(peft, base=base, adapters=[adapter]))
    if CASES[name].summed or dtype == "bf16":
        require_our_own_arithmetic_near(CASES[name], base, adapter, theirs)


def require_our_own_arithmetic_near(case: Case, base: Path, adapter: Path, theirs: Table) -> None:
    """Within a bound of summation and one ulp of 16 bits; what has no such bound within one ulp."""
    for precision in ("float32", "float64"):
        if precision == "float64" and "init_lora_weights" in case.lora:
            with pytest.raises(UnsupportedAdapter, match="depend on the machine"):
                merge_with_ours(base, adapter, base.parent / precision, precision)
            continue
        folder = merge_with_ours(base, adapter, base.parent / precision, precision)
        ours = saved_tensors(folder)
        assert layout(ours) == layout(theirs)
        if case.summed:
            require_within_the_bound(ours, theirs, exact_inputs(base, adapter))
        elif case.lora.get("r") != 64:
            require_within_an_ulp(ours, theirs, case.lora.get("target_modules", ()))
        proven(verify(folder))
        proven(verify(folder, level=Level.SAMPLE))


def require_within_the_bound(
    ours: Table, theirs: Table, steps: Mapping[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]]
) -> None:
    for name, tensor in theirs.items():
        distance = (ours[name].double() - tensor.double()).abs()
        allowed = summation_bound(*steps[name]) if name in steps else torch.zeros(())
        if tensor.dtype is not FP32:
            allowed = allowed + ulp(tensor) * (name in steps)
        assert bool((distance <= allowed).all()), name


def require_within_an_ulp(ours: Table, theirs: Table, targets: str | list[str]) -> None:
    for name, tensor in theirs.items():
        if {"embed_tokens", "wpe"} & set(targets) & set(name.split(".")):
            # PEFT rounds the delta of an embedding before it adds it, so its own error is that of the larger summand
            largest = float(tensor.abs().max())
            assert torch.allclose(ours[name].float(), tensor.float(), rtol=2**-7, atol=2**-8 * largest), name
            continue
        apart = (tensor.contiguous().view(torch.int16).int() - ours[name].contiguous().view(torch.int16).int()).abs()
        assert int(apart.max()) <= 1, name


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_lora_bias_on_a_layer_without_bias_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", BF16)
    lora = {"r": 4, "lora_bias": True, "target_modules": ["q_proj"]}
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora)
    with pytest.raises(UnsupportedAdapter, match=r"`lora_bias` on a layer that has no bias.*PEFT cannot merge it"):
        merge_with_ours(base, adapter, tmp_path / "ours", "peft")


def test_a_base_of_mixed_types_keeps_each(tmp_path: Path) -> None:
    """PEFT sees what the files hold where the model is given its tensors as they are."""
    base = save_base(tmp_path / "base", "llama", "causal-lm", BF16)
    wide = {torch.float32: ("norm", "layers.1.mlp.up_proj"), torch.float16: ("layers.0.self_attn.q_proj",)}
    tensors = saved_tensors(base)
    for dtype, ends in wide.items():
        tensors |= {
            name: (tensor * 1.001).to(dtype)
            for name, tensor in tensors.items()
            if any(name.endswith(f"{end}.weight") for end in ends)
        }
    for path in base.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    model = load_model(base, "causal-lm")
    for name, parameter in model.named_parameters():
        parameter.data = tensors[name].clone()
    lora = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "modules_to_save": ["model.norm"]}
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora)
    theirs = dict(PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict())
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", "peft"))
    assert layout(ours) == layout(theirs)
    assert len({tensor.dtype for tensor in ours.values()}) == 3
    assert different(ours, theirs) == []


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_float64_base_keeps_its_digits(precision: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.float64)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora, dtype=torch.float32)
    theirs = saved_tensors(merge_with_peft(base, adapter, tmp_path / "peft", "causal-lm"))
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", precision))
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=1e-13, atol=1e-15), name


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("rslora", [False, True])
def test_float64_rounds_the_exact_sum_once(dtype: torch.dtype, rslora: bool, tmp_path: Path) -> None:
    lora = {"r": 3, "lora_alpha": 7, "use_rslora": rslora, "target_modules": ["q_proj", "down_proj"]}
    base, adapter = Case(model_type="llama", lora=lora).write(tmp_path, dtype)
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
