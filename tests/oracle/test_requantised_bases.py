"""Merged weights stored in the base's own format of eight bits again: codes and scales against torch's, and what is refused."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from lora_tool import plan_merge, verify
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.tensors import TensorAction
from lora_tool.execution import kernels, requantised, units
from lora_tool.execution.backends.native_backend import NativeBackend
from lora_tool.formats.quantised.encodings import PackedIntegers, dequantised
from lora_tool.formats.quantised.requantising import Rounding
from lora_tool.native import quantised
from lora_tool.plans.core.ops import Copy
from lora_tool.plans.core.requantise import QuantisedPart, Requantise
from lora_tool.plans.core.steps import Step
from lora_tool.plans.merge.quantised.requantised import coded_steps
from lora_tool.plans.merge.quantised.samples import extremes_of
from tests.oracle.peft_merge import different, merge_with_ours, save_adapter, save_base, saved_tensors
from tests.oracle.quantised_bases import ATTENTION, BF16, KINDS, Made, delta
from tests.oracle.test_quantised_bases import ON_STACKS, is_experts, is_linear, raw
from tests.quantised_models import TILE, quantise
from tests.unit.test_quantised_weights import encoding_in

RAGGED = "qwen3-ragged"
"""A model with tiles that are cut off."""
SIZES = KINDS[RAGGED]
TARGETS = ["q_proj", "o_proj", "down_proj"]
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 0.15, "target_modules": TARGETS}
OFFSET = ["int8-offset", "int8-packed-offset", "int8-packed-tensor-offset"]
TILES = ["fp8-block", "fp8-block-bf16", "fp8-powers"]
CHANNELS = ["fp8-channel", "fp8-tensor", "bnb-int8", "torchao-int8", "int8-channel", "int8-tensor"]
FORMS = [*TILES, *CHANNELS, "int8-packed", "int8-packed-tensor", *OFFSET]


@pytest.fixture(scope="module")
def plain(made: Made) -> Path:
    return made.plain(RAGGED)


@pytest.fixture(scope="module")
def adapter(made: Made) -> Path:
    return made.adapter(RAGGED, LORA)


def again(made: Made, form: str) -> tuple[Path, Path]:
    """Return the base in this form, and what is merged into it and stored as it is."""
    _, base, _ = made.base(RAGGED, form, is_linear)

    def merge(folder: Path) -> Path:
        return merge_with_ours(base, made.adapter(RAGGED, LORA), folder / "merged", "float32", store="as-base")

    return base, made.once(("again", form), merge)


def exactly(plain: Path, values: dict[str, torch.Tensor], folder: Path) -> Path:
    """Return the model whose weights are these numbers, in float32."""
    shutil.copytree(plain, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(saved_tensors(plain) | values, folder / "model.safetensors", {"format": "pt"})
    return folder


def stored_again(form: str, name: str, merged: torch.Tensor, base: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return codes and scales of a merged float32 weight, a tile at a time."""
    module = name.removesuffix(".weight")
    ends = (".weight_scale_inv", ".weight_scale", ".SCB", "._weight_scale")
    of_codes = next(each for each in (name, f"{module}._weight_qdata", f"{module}.weight_packed") if each in base)
    scale_name = next(f"{module}{end}" for end in ends if f"{module}{end}" in base)
    scales, in_words = base[scale_name], "packed" in form
    of_type = torch.int8 if in_words else base[of_codes].dtype
    tall, wide = tile_of(form, merged.shape)
    least, most = (-128.0, 127.0) if of_type is torch.int8 else (-448.0, 448.0)
    codes = torch.empty(merged.shape, dtype=of_type)
    new = scales.clone().reshape(-(-merged.shape[0] // tall), -(-merged.shape[1] // wide))
    zeros = _zeros(base[f"{module}.weight_zero_point"], len(new)) if form in OFFSET else None
    for at, across in itertools.product(*map(range, new.shape)):
        part = slice(at * tall, (at + 1) * tall), slice(across * wide, (across + 1) * wide)
        values, scale = merged[part], new[at, across].float()
        if zeros is not None:
            new[at, across], zeros[at, across], codes[part] = _about(values, new[at, across], zeros[at, across])
        elif form == "bnb-int8":
            if values.abs().max() > (scale * 127) * torch.tensor(1 / 127):
                new[at, across] = values.abs().max()
            codes[part] = (values * (127 / new[at, across])).round().clamp(-127, 127).to(of_type)
        else:
            if values.max() > most * scale or values.min() < least * scale:
                needed = torch.maximum(values.max() / most, values.min() / least)
                new[at, across] = needed.log2().ceil().exp2() if form == "fp8-powers" else needed
            divided = (values / new[at, across].float()).clamp(least, most)
            codes[part] = (divided.round() if of_type is torch.int8 else divided).to(of_type)
    found = {of_codes: _words(codes) if in_words else codes, scale_name: new.reshape(scales.shape)}
    if zeros is not None:
        packed = base[f"{module}.weight_zero_point"].dtype is torch.int32
        found[f"{module}.weight_zero_point"] = _words(zeros.to(torch.int8).T).T if packed else zeros.to(torch.int8)
    return found


def tile_of(form: str, shape: torch.Size) -> tuple[int, int]:
    """Return the rows and columns that have one scale."""
    if form in TILES:
        return TILE, TILE
    if form in ("int8-packed", "int8-packed-offset"):
        return 1, 8
    return shape[0] if "tensor" in form else 1, shape[1]


def _about(
    values: torch.Tensor, stored: torch.Tensor, zero: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scale, zero point and codes of a tile."""
    scale = stored.float()
    if values.max() > (127.5 - zero) * scale or values.min() < (-128.5 - zero) * scale:
        low = values.min().clamp(max=0)
        needed = (values.max().clamp(min=0) - low) / 255
        if needed > scale:
            nearest = needed.to(stored.dtype)
            stored = nearest if nearest >= needed else nearest.nextafter(torch.ones_like(nearest))
        zero = (-128 - low / stored.float()).clamp(-128, 127).round()
    return stored, zero, (values / stored.float() + zero).clamp(-128, 127).round().to(torch.int8)


def _words(codes: torch.Tensor) -> torch.Tensor:
    return (codes.short() + 128).to(torch.uint8).contiguous().view(torch.int32)


def _zeros(stored: torch.Tensor, rows: int) -> torch.Tensor:
    if stored.dtype is torch.int8:
        return stored.float().reshape(-1, 1)
    return stored.T.contiguous().view(torch.uint8).T[:rows].float() - 128


@pytest.mark.parametrize("form", FORMS)
def test_codes_and_scales_are_those_of_torch(form: str, made: Made, tmp_path: Path) -> None:
    plain, _, values = made.base(RAGGED, form, is_linear)
    base, merged = again(made, form)
    exact = exactly(plain, values, tmp_path / "exact")
    wide = merge_with_ours(exact, made.adapter(RAGGED, LORA), tmp_path / "wide", "float32")
    before, after, numbers = saved_tensors(base), saved_tensors(merged), saved_tensors(wide)
    assert list(after) == list(before)
    expected = dict(before)
    for name in (name for name in values if name.split(".")[-2] in TARGETS):
        expected |= stored_again(form, name, numbers[name], before)
    assert not [name for name, tensor in expected.items() if not torch.equal(raw(tensor), raw(after[name]))]
    raised = {name.rpartition(".")[2] for name in different(before, after)}
    of_scales = {"SCB", "weight_scale", "weight_scale_inv", "_weight_scale"}
    assert form in ("int8-tensor", "int8-packed-tensor", "int8-packed-tensor-offset") or raised & of_scales
    assert ("weight_zero_point" in raised) == (form in OFFSET)
    assert (merged / "config.json").read_bytes() == (base / "config.json").read_bytes()
    found = verify(merged)
    assert not found.report.findings
    assert max(each.ulps or 0 for each in found.evidence.values()) == pytest.approx(0.5, abs=0.02)
    record = json.loads((merged / "lora_tool.json").read_text())
    assert 0.1 < record["requantised"]["kept"] < 1.1
    assert record["requantised"]["kept"] == pytest.approx(record["fidelity"]["kept"], abs=0.1)


def test_transformers_loads_what_was_stored_again(made: Made, tmp_path: Path) -> None:
    _, base, values = made.base("qwen3", "fp8-block", is_linear)
    lora = made.adapter("qwen3", ATTENTION | {"lora_alpha": 60})
    merged = merge_with_ours(base, lora, tmp_path / "merged", "float32", store="as-base")
    model, info = AutoModelForCausalLM.from_pretrained(merged, dtype=BF16, output_loading_info=True)
    assert not any(info.values())
    module = "model.layers.0.self_attn.q_proj"
    exact = values[f"{module}.weight"].double() + delta(lora, module)
    weight = model.state_dict()[f"{module}.weight"].double()
    assert float((weight - exact).abs().max() / exact.abs().max()) < 2**-4


@pytest.mark.parametrize("form", ["fp8-block", "fp8-powers", "bnb-int8", "int8-packed", *OFFSET])
def test_blocks_of_any_size_in_one_call_or_in_steps_give_the_same_bytes(
    form: str, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, whole = again(made, form)
    monkeypatch.setattr(quantised, "_CACHED", 0)
    monkeypatch.setattr(requantised, "_BLOCK_WEIGHTS", 20 * 64)
    monkeypatch.setattr(requantised, "_LARGEST", 1 << 11)
    monkeypatch.setattr(units, "UNIT_WEIGHTS", 40 * 64)
    parts = merge_with_ours(base, made.adapter(RAGGED, LORA), tmp_path / "parts", "float32", store="as-base")
    assert not different(saved_tensors(whole), saved_tensors(parts))


@pytest.mark.parametrize("form", ["fp8-block", "bnb-int8"])
def test_what_goes_from_file_to_file_is_the_same(
    form: str, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, whole = again(made, form)
    passed = []

    def counted(*arguments: Any) -> Any:
        passed.append(found := passed_again(*arguments))
        return found

    passed_again = NativeBackend.passed_again
    monkeypatch.setattr(NativeBackend, "passed_again", counted)
    monkeypatch.setattr(kernels, "CACHE_BLOCK", 1)
    parts = merge_with_ours(base, made.adapter(RAGGED, LORA), tmp_path / "parts", "float32", store="as-base")
    assert all(found is not None for found in passed)
    assert len(passed) >= len(TARGETS)
    assert not different(saved_tensors(whole), saved_tensors(parts))


def test_scales_in_another_file_than_their_codes_are_the_same(made: Made, adapter: Path, tmp_path: Path) -> None:
    base, together = again(made, "fp8-block")
    apart = merge_with_ours(base, adapter, tmp_path / "apart", "float32", store="as-base", max_shard_size=6000)
    places = json.loads((apart / "model.safetensors.index.json").read_text())["weight_map"]
    assert any(places[name] != places.get(f"{name}_scale_inv", places[name]) for name in places)
    assert not different(saved_tensors(apart), saved_tensors(together))


def test_what_would_be_lost_is_refused_unless_that_is_allowed(made: Made, tmp_path: Path) -> None:
    _, base, _ = made.base(RAGGED, "bnb-int8", is_linear)
    faint = made.adapter(RAGGED, LORA | {"lora_alpha": 1e-4})
    with pytest.raises(
        UnsupportedAdapter, match=r"would keep only \S+% of ΔW: below 10% the merged model behaves like the base"
    ) as refused:
        merge_with_ours(base, faint, tmp_path / "merged", "float32", store="as-base")
    assert "allow_loss=True" in (refused.value.hint or "")
    merged = merge_with_ours(base, faint, tmp_path / "merged", "float32", store="as-base", allow_loss=True)
    assert {found.code for found in verify(merged).report.findings} <= {"LT607", "LT619"}
    assert plan_merge(base, faint, store="as-base", allow_loss=True).to_json()["requantised"]["kept"] < 0.1


def test_an_outlier_that_makes_all_codes_coarser_is_seen_before_anything_is_written(
    made: Made, adapter: Path, tmp_path: Path
) -> None:
    plain, base, values = made.base(RAGGED, "int8-tensor", is_linear)
    kept = plan_merge(base, adapter, store="as-base").to_json()["requantised"]["kept"]
    assert kept > 0.9
    outlier = shutil.copytree(adapter, tmp_path / "outlier")
    tensors = load_file(outlier / "adapter_model.safetensors")
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensor[3] *= 3000  # no row of the sample
    save_file(tensors, outlier / "adapter_model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedAdapter, match=r"would add \d+ times as much noise as ΔW \(cosine 0.0"):
        plan_merge(base, outlier, store="as-base")
    exact = merge_with_ours(exactly(plain, values, tmp_path / "exact"), outlier, tmp_path / "wide", "float32")
    whole = saved_tensors(exact)
    for step in plan_merge(base, outlier, store="as-base", allow_loss=True).steps:
        if isinstance(step.op, Requantise) and step.op.part is QuantisedPart.CODES:
            low, high = (each.item() for each in extremes_of(step.op, 0, Rounding()))
            weight = whole[step.out.name]
            assert (low, high) == pytest.approx((weight.min().item(), weight.max().item()), rel=1e-6)


@pytest.mark.parametrize(
    ("form", "lora", "choices", "words"),
    [
        ("int4", {}, {}, r"stored as int4 in groups of 32: rounding to four bits"),
        ("nvfp4", {}, {}, r"stored as nvfp4: rounding to four bits"),
        ("nf4-double", {}, {}, r"stored as nf4-double of bitsandbytes: rounding to four bits"),
        ("stack-nvfp4", {}, {}, "four bits"),
        ("stack-fp8", {}, {}, "one scale for all of its matrices"),
        ("gptq", {}, {}, r"stored as gptq int4 in groups of 32: its codes were calibrated"),
        ("fp8-block", {}, {"precision": "peft"}, r"PEFT can round merged weights only to formats of bitsandbytes"),
        ("fp8-block", {}, {"dtype": "float16"}, r"weights that stay quantised keep their dtype"),
        ("fp8-block", {"modules_to_save": ["up_proj"]}, {}, r"up_proj.weight` cannot be quantised again as fp8 e4m3"),
        ("fp8-block", {"init_lora_weights": "olora"}, {}, r"cannot be quantised again as fp8 e4m3"),
    ],
)
def test_what_codes_cannot_hold_is_refused_by_name(
    form: str, lora: dict[str, Any], choices: dict[str, Any], words: str, made: Made
) -> None:
    stacks = form.startswith("stack")
    kind, chosen = ("llama4_text", is_experts) if stacks else ("qwen3-one", is_linear)
    adapter = made.adapter(kind, ON_STACKS if stacks else LORA | lora)
    with pytest.raises(UnsupportedAdapter, match=words):
        plan_merge(made.base(kind, form, chosen)[1], adapter, store="as-base", **choices)


def test_packed_integers_of_eight_bits_are_not_said_to_be_of_four() -> None:
    encoding = encoding_in("int8-packed")
    assert isinstance(encoding, PackedIntegers)
    encoding = replace(encoding, groups=encoding.record)
    step = Step(out=encoding.spec, op=Copy(source=dequantised(encoding)), action=TensorAction.MERGED, reason="")
    with pytest.raises(UnsupportedAdapter, match="integers of 8 bits in the order of activations"):
        list(coded_steps(step, encoding))


@pytest.mark.parametrize(
    ("form", "part", "injure"),
    [
        ("fp8-block", "weight", lambda codes: codes.view(torch.uint8)[5, 7].add_(2)),
        ("fp8-block", "weight_scale_inv", lambda scales: scales[1, 1].mul_(1.05)),
        ("fp8-block", "weight_scale_inv", lambda scales: scales[1, 1].mul_(0.9)),
        ("int8-packed", "weight_packed", lambda words: words.view(torch.uint8)[5, 7].add_(2)),
        ("int8-offset", "weight_zero_point", lambda zeros: zeros[5].add_(1)),
        ("int8-packed-offset", "weight_zero_point", lambda words: words[1, 2].add_(1)),
    ],
)
def test_a_code_a_scale_or_a_zero_point_that_is_another_is_found(
    form: str, part: str, injure: Any, made: Made, tmp_path: Path
) -> None:
    merged = shutil.copytree(again(made, form)[1], tmp_path / "merged")
    name = f"model.layers.0.self_attn.o_proj.{part}"
    for file in merged.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            injure(tensors[name])
            save_file(tensors, file, {"format": "pt"})
    assert "LT608" in {found.code for found in verify(merged).report.findings}


def test_the_quantised_copy_of_a_tied_end_is_written_where_the_ends_part(tmp_path: Path) -> None:
    tied = save_base(tmp_path / "tied", "qwen3", "causal-lm", BF16, **SIZES, tie_word_embeddings=True)
    both = {"lm_head.weight": saved_tensors(tied)["model.embed_tokens.weight"]}
    ends = [name.removesuffix(".weight") for name in (*both, "model.embed_tokens.weight")]
    base, _ = quantise(exactly(tied, both, tmp_path / "both"), tmp_path / "base", "int8-channel", ends.__contains__)
    lora = save_adapter(tmp_path / "adapter", tied, "causal-lm", {"r": 2, "target_modules": ["o_proj"]})
    merged = merge_with_ours(base, lora, tmp_path / "merged", "float32", store="as-base", untie=True)
    before, after = saved_tensors(base), saved_tensors(merged)
    assert after.keys() == before.keys()
    assert not different({name: after[name] for name in both}, {name: before[name] for name in both})
    assert not verify(merged).report.findings


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
def test_int8_that_another_tool_stored_again_is_verified(
    dtype: torch.dtype, made: Made, adapter: Path, tmp_path: Path
) -> None:
    """Bitsandbytes rounds to float16 first, and scales each row anew; PEFT hands it the sum in the adapter's type."""
    _, base, values = made.base(RAGGED, "bnb-int8", is_linear)
    table = saved_tensors(base)
    for name, weight in values.items():
        module = name.removesuffix(".weight")
        change = delta(adapter, module) if module.rpartition(".")[2] in TARGETS else torch.zeros(())
        summed = (weight.to(dtype) + change.to(dtype)).half()
        largest = summed.abs().amax(1).float()
        table[name] = (summed * (127 / largest[:, None])).round().to(torch.int8)
        table[f"{module}.SCB"] = largest
    merged = tmp_path / "merged"
    shutil.copytree(base, merged, ignore=shutil.ignore_patterns("*.safetensors*"))

    def codes_of(found: dict[str, torch.Tensor]) -> set[str]:
        save_file(found, merged / "model.safetensors", {"format": "pt"})
        return {finding.code for finding in verify(merged, base=base, adapters=[adapter]).report.findings}

    module = "model.layers.0.mlp.down_proj"
    codes, largest = table[f"{module}.weight"], table[f"{module}.SCB"]
    assert codes_of(table) == set()
    for wrong in (1.05, 0.95):
        assert codes_of(table | {f"{module}.SCB": wrong * largest}) == {"LT608"}
    assert codes_of(table | {f"{module}.weight": codes - 2 * codes.sign()}) & {"LT605", "LT608"}
    assert codes_of(table | {f"{module}.{name}": saved_tensors(base)[f"{module}.{name}"] for name in ("weight", "SCB")})
