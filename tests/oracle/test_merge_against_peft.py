"""Merges against PEFT's own: the saved files, name by name and bit by bit, and `verify` of what each of both wrote.

A case is what PEFT's config may say of LoRA, or what base and adapter may be stored like: no rule complains of one.
Every architecture is in test_zoo.py, every task type in test_task_types.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file

from lora_tool import verify
from lora_tool.checkpoints import AdapterDir, open_checkpoint
from lora_tool.core.errors import LoraToolError, UnsupportedAdapter
from lora_tool.rules.merged.evidence import Verdict
from lora_tool.verification.levels import Level
from lora_tool.verification.verified import Verification
from tests.judging import codes, judge, lines
from tests.oracle.adapter_cases import FEATURES, Case, case
from tests.oracle.peft_merge import (
    BF16,
    FP16,
    FP32,
    Table,
    different,
    layout,
    load_model,
    merge_with_ours,
    merge_with_peft,
    randomise,
    require_pefts,
    require_tensors,
    save_adapter,
    save_base,
    saved_tensors,
)

# PEFT warns of adapters on tied embeddings, and of targets that it does not find: what becomes of those is the test
pytestmark = pytest.mark.filterwarnings("ignore")

DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32, "fp64": torch.float64}
IN_OTHER_TYPES = {
    **dict.fromkeys(("linear", "excluded-by-regex", "dora-conv1d", "olora", "embedding-rslora"), "fp16 fp32"),
    **dict.fromkeys(("pissa", "tokens", "saved-both-of-tied"), "fp16"),
    **dict.fromkeys(("pissa-conv1d", "bias-lora-only", "dora-embedding-positions", "experts-of-mixtral"), "fp32"),
    **dict.fromkeys(("dora", "dora-embedding", "embedding", "tokens-tied", "bias-all"), "fp16 fp32 fp64"),
}
"""Features whose arithmetic has roundings of its own, in the types that the base has besides its usual one."""


def proven(verification: Verification) -> None:
    """Every tensor was compared, and is what it should be; nothing is wrong, and the models here have no tokenizer."""
    assert {found.name: found.verdict for found in verification.evidence.values()} == dict.fromkeys(
        verification.evidence, Verdict.RIGHT
    )
    assert not verification.report.findings
    assert {skipped.code for skipped in verification.report.skipped} <= {"LT320"}  # which asks the tokenizer


OF_ONE_MATRIX = ("ties to the other end", "is one layer in several places")
"""Refusals of what one matrix cannot hold, which a rule warns of."""


@pytest.mark.parametrize("name", FEATURES)
def test_no_rule_complains_and_the_merge_is_pefts(name: str, tmp_path: Path) -> None:
    one = FEATURES[name]
    base, adapter = one.write(tmp_path)
    warned = {"LT508"} if one.refused in OF_ONE_MATRIX else set()
    assert codes(judge(adapter, servers=["peft"] if one.served else [])) == warned
    assert lines(judge(base)) == []
    assert codes(judge(adapter, base=base)) == warned
    if one.refused is not None:
        with pytest.raises(LoraToolError, match=one.refused):
            merge_with_ours(base, adapter, tmp_path / "ours", "peft")
        return
    theirs = require_pefts(base, adapter, lambda: one.load(base))
    ours, peft = adapter.parent / "ours", adapter.parent / "theirs"
    proven(verify(ours))
    proven(verify(ours, level=Level.SAMPLE))
    proven(verify(peft, base=base, adapters=[adapter]))
    if one.task == "causal-lm" and (one.summed or one.dtype is BF16):
        require_our_own_arithmetic_near(one, base, adapter, theirs)


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, types in IN_OTHER_TYPES.items() for dtype in types.split()]
)
def test_the_merge_is_pefts_in_other_types(name: str, dtype: str, tmp_path: Path) -> None:
    base, adapter = FEATURES[name].write(tmp_path, DTYPES[dtype])
    theirs = require_pefts(base, adapter, lambda: FEATURES[name].load(base))
    proven(verify(tmp_path / "ours"))
    proven(verify(tmp_path / "theirs", base=base, adapters=[adapter], level=Level.SAMPLE))
    if name == "linear":
        require_our_own_arithmetic_near(FEATURES[name], base, adapter, theirs)


class Convolutions(torch.nn.Module):
    """Two convolutions, one of them grouped, and a linear layer: the shapes of LoRA outside transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3)
        self.grouped = torch.nn.Conv2d(8, 8, 3, groups=2)
        self.line = torch.nn.Conv1d(8, 4, 5)
        self.attention = torch.nn.MultiheadAttention(16, 2)
        self.out = torch.nn.Linear(4, 6)


@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": ["stem", "grouped", "line", "attention", "out"]},
        {"target_modules": ["stem", "out"], "use_dora": True},
    ],
    ids=["plain", "dora"],
)
def test_no_rule_complains_of_layers_outside_transformers(lora: dict[str, Any], tmp_path: Path) -> None:
    adapted: Any = get_peft_model(Convolutions(), LoraConfig(r=4, **lora))
    randomise(adapted)
    adapted.save_pretrained(str(tmp_path))
    assert lines(judge(tmp_path, servers=["peft"])) == []


def require_our_own_arithmetic_near(one: Case, base: Path, adapter: Path, theirs: Table) -> None:
    """Within a bound of summation and one ulp of 16 bits; what has no such bound within one ulp."""
    for precision in ("float32", "float64"):
        if precision == "float64" and one.lora.get("init_lora_weights") in ("pissa", "olora"):
            with pytest.raises(UnsupportedAdapter, match="depend on the machine"):
                merge_with_ours(base, adapter, base.parent / precision, precision)
            continue
        folder = merge_with_ours(base, adapter, base.parent / precision, precision)
        ours = saved_tensors(folder)
        assert layout(ours) == layout(theirs)
        if one.summed:
            require_within_the_bound(ours, theirs, exact_inputs(base, adapter))
        elif one.lora.get("r", 4) < 32 and not (one.experts or one.lora.get("target_parameters")):
            require_within_an_ulp(ours, theirs, one.lora.get("target_modules", ()))
        proven(verify(folder))


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
    require_tensors(ours, theirs)
    assert len({tensor.dtype for tensor in ours.values()}) == 3


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_float64_base_keeps_its_digits(precision: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.float64)
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora, dtype=torch.float32)
    theirs = saved_tensors(merge_with_peft(base, adapter, tmp_path / "peft", "causal-lm"))
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", precision))
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=1e-13, atol=1e-15), name


@pytest.mark.parametrize(("dtype", "rslora"), [("bf16", True), ("fp16", False), ("fp32", True)])
def test_float64_rounds_the_exact_sum_once(dtype: str, rslora: bool, tmp_path: Path) -> None:
    one = case(r=3, use_rslora=rslora, target_modules=["q_proj", "down_proj"])
    base, adapter = one.write(tmp_path, DTYPES[dtype])
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", "float64"))
    steps = exact_inputs(base, adapter)
    assert len(steps) == 4
    for name, (weight, a, b, scaling) in steps.items():
        exact = exact_sum(weight, a, b, scaling)
        flat = ours[name].reshape(-1)
        assert [round_exactly(value, DTYPES[dtype]) for value in exact] == flat.double().tolist(), name


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
