"""Merges into the 16-bit original of a base of bitsandbytes, quantised afresh: every tensor as the library would save it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_tool.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.execution import quantised, units
from lora_tool.formats.quantised.four_bits import _FP4_SIZES, _NF4
from lora_tool.formats.quantised.rounded_as import dynamic_levels
from lora_tool.plan.merge.plan_merge import plan_merge
from lora_tool.verification.verifying import verify
from tests.oracle.peft_merge import different, merge_with_ours, save_adapter, save_base, saved_tensors

BF16 = torch.bfloat16
SIZES = {"hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 1, "head_dim": 16}
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj", "down_proj"]}
CHANGED = ("q_proj", "o_proj", "down_proj")
FP4 = torch.tensor([0.0, *(_FP4_SIZES[at] for at in (0, 5, 6, 3, 4, 1, 2))])
MAPS = {"nf4": torch.tensor(_NF4), "fp4": torch.cat([FP4, 0 - FP4])}
Table = dict[str, torch.Tensor]
FORMS: dict[str, dict[str, Any]] = {
    "nf4": {"kind": "nf4"},
    "nf4-double": {"kind": "nf4", "nested": True},
    "fp4-double-128": {"kind": "fp4", "nested": True, "block": 128},
    "nf4-as-bfloat16": {"kind": "nf4", "nested": True, "storage": BF16},
}


def near(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Return the codes of the levels that are nearest, of which fp4 has two for zero."""
    order = torch.argsort(levels, stable=True)
    bounds = (levels[order][1:] + levels[order][:-1]) / 2
    return order[torch.bucketize(values, bounds)].to(torch.uint8)


def four_bits(
    weight: torch.Tensor, kind: str, *, nested: bool = False, block: int = 64, storage: torch.dtype = torch.uint8
) -> Table:
    """Return what bitsandbytes 0.50 saves of a weight, in as few words as torch has for it."""
    flat = weight.reshape(-1).float()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % block)).reshape(-1, block)
    largest = padded.abs().amax(1)
    scaled = padded * (1 / largest)[:, None]
    if len(flat) % block:
        scaled[-1] = padded[-1] / largest[-1]
    codes = near(scaled.reshape(-1)[: len(flat)].clamp(-1, 1), MAPS[kind])
    said: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": block,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "shape": list(weight.shape),
    }
    made = {"weight": ((codes[0::2] << 4) | codes[1::2]).view(storage).unsqueeze(1), "weight.quant_map": MAPS[kind]}
    made["weight.absmax"] = largest
    if nested:
        levels, mean = torch.tensor(dynamic_levels()), largest.mean()
        moved = torch.nn.functional.pad(largest - mean, (0, -len(largest) % 256)).reshape(-1, 256)
        outer = moved.abs().amax(1)
        place = (((moved * (1 / outer)[:, None]).clamp(-1, 1) + 1) * 0.5 * 65535 + 0.5).to(torch.int32)  # of a table
        made["weight.absmax"] = near((place / 65535 * 2 - 1).reshape(-1)[: len(largest)], levels)
        made |= {"weight.nested_absmax": outer, "weight.nested_quant_map": levels}
        said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": mean.item()}
    state = torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8)
    return {**made, f"weight.quant_state.bitsandbytes__{kind}": state}


def eight_bits(weight: torch.Tensor) -> Table:
    """Return what bitsandbytes saves of a weight of LLM.int8()."""
    halves = weight.half()
    largest = halves.abs().amax(1).float()
    codes = torch.round(halves * (127 / largest[:, None])).to(torch.int8)
    return {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}


def stored(form: str, weight: torch.Tensor) -> Table:
    return eight_bits(weight) if form == "int8" else four_bits(weight, **FORMS[form])


def quantise(original: Path, out: Path, form: str) -> Path:
    """Write the original with its linear layers as bitsandbytes saves them."""
    out.mkdir()
    table: Table = {}
    for name, tensor in saved_tensors(original).items():
        module = name.removesuffix(".weight")
        parts = stored(form, tensor) if module.endswith("_proj") else {"": tensor}
        table |= {f"{module}.{part}" if part else name: each.clone() for part, each in parts.items()}
    save_file(table, out / "model.safetensors", {"format": "pt"})
    said = {"load_in_8bit": True} if form == "int8" else {"load_in_4bit": True, "bnb_4bit_quant_type": form[:3]}
    config = json.loads((original / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", **said}
    (out / "config.json").write_text(json.dumps(config, indent=2))
    return out


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("original") / "original", "qwen3", "causal-lm", BF16, **SIZES)


@pytest.fixture(scope="module")
def adapter(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapter") / "adapter", original, "causal-lm", LORA)


@pytest.fixture(scope="module")
def base(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(form: str) -> Path:
        if form not in made:
            made[form] = quantise(original, tmp_path_factory.mktemp("base") / form, form)
        return made[form]

    return of


def bits(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes, without the spaces after a JSON object."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()).rstrip(b" ")


@pytest.mark.parametrize("form", [*FORMS, "int8"])
def test_every_tensor_is_what_bitsandbytes_saves_of_the_merged_original(
    form: str, original: Path, adapter: Path, base: Callable[[str], Path], tmp_path: Path
) -> None:
    merged = merge_with_ours(base(form), adapter, tmp_path / "merged", "float32", store="as-base", original=original)
    wide = saved_tensors(merge_with_ours(original, adapter, tmp_path / "wide", "float32"))
    before, after = saved_tensors(base(form)), saved_tensors(merged)
    assert list(after) == list(before)
    expected = dict(before)
    for name, tensor in wide.items():
        module = name.removesuffix(".weight")
        if module.endswith(CHANGED):
            expected |= {f"{module}.{part}": each for part, each in stored(form, tensor).items()}
    assert {name: (each.dtype, bits(each)) for name, each in after.items()} == {
        name: (each.dtype, bits(each)) for name, each in expected.items()
    }
    assert {name for name in before if bits(before[name]) != bits(after[name])} >= {
        f"model.layers.0.{module}.weight" for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
    }
    assert (merged / "config.json").read_bytes() == (base(form) / "config.json").read_bytes()
    record = json.loads((merged / "lora_tool.json").read_text())
    assert record["requantised"]["kept"] == pytest.approx(1, abs=0.25)
    assert record["inputs"]["original"]["path"] == str(original)
    found = verify(merged)
    assert not found.report.findings
    assert 0.4 < max(each.ulps or 0 for each in found.evidence.values()) < 1


def test_blocks_of_any_size_give_the_same_bytes(
    original: Path, adapter: Path, base: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {"store": "as-base", "original": original}
    whole = merge_with_ours(base("nf4-double"), adapter, tmp_path / "whole", "float32", **asked)
    monkeypatch.setattr(quantised, "_AT_ONCE", 3 * 64)
    monkeypatch.setattr(units, "UNIT_WEIGHTS", 20 * 64)
    parts = merge_with_ours(base("nf4-double"), adapter, tmp_path / "parts", "float32", **asked)
    assert not different(saved_tensors(whole), saved_tensors(parts))


def test_four_bits_without_the_original_keep_what_they_can_of_a_large_change(
    original: Path, adapter: Path, base: Callable[[str], Path], tmp_path: Path
) -> None:
    faint = save_adapter(tmp_path / "faint", original, "causal-lm", LORA | {"lora_alpha": 0.02})
    with pytest.raises(UnsupportedAdapter, match=r"would keep only \S+% of ΔW: below 10%") as refused:
        plan_merge(base("nf4-double"), faint, store="as-base")
    assert "`original=MODEL` quantises W + ΔW" in (refused.value.hint or "")
    merged = merge_with_ours(base("nf4"), faint, tmp_path / "lost", "float32", store="as-base", allow_loss=True)
    assert not verify(merged).report.findings
    merged = merge_with_ours(base("nf4-double"), adapter, tmp_path / "merged", "float32", store="as-base")
    wide = saved_tensors(merge_with_ours(base("nf4-double"), adapter, tmp_path / "wide", "float32"))
    after, expected = saved_tensors(merged), dict(saved_tensors(base("nf4-double")))
    for name in wide:
        module = name.removesuffix(".weight")
        if module.endswith(CHANGED):
            expected |= {f"{module}.{part}": each for part, each in stored("nf4-double", wide[name]).items()}
    assert {name: bits(each) for name, each in after.items()} == {name: bits(each) for name, each in expected.items()}
    assert not verify(merged).report.findings


def test_what_the_adapter_saved_whole_and_dora_are_quantised_too(
    original: Path, base: Callable[[str], Path], tmp_path: Path
) -> None:
    lora = {"r": 4, "use_dora": True, "target_modules": ["q_proj"], "modules_to_save": ["up_proj"]}
    adapter = save_adapter(tmp_path / "adapter", original, "causal-lm", lora)
    asked: dict[str, Any] = {"store": "as-base", "original": original}
    after = saved_tensors(merge_with_ours(base("nf4-double"), adapter, tmp_path / "merged", "float32", **asked))
    wide = saved_tensors(merge_with_ours(original, adapter, tmp_path / "wide", "float32"))
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"):
        for part, each in stored("nf4-double", wide[f"{module}.weight"]).items():
            assert bits(after[f"{module}.{part}"]) == bits(each)
    assert not verify(tmp_path / "merged").report.findings


def other(original: Path, folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Path:
    """Write the original with other tensors; None leaves one out."""
    folder.mkdir()
    made = {name: change(name, tensor) for name, tensor in saved_tensors(original).items()}
    save_file({name: each for name, each in made.items() if each is not None}, folder / "model.safetensors")
    shutil.copy(original / "config.json", folder)
    return folder


QUERY = "model.layers.0.self_attn.q_proj.weight"


def test_an_outlier_that_makes_the_scales_of_other_blocks_coarse(original: Path, adapter: Path, tmp_path: Path) -> None:
    def outlier(name: str, each: torch.Tensor) -> torch.Tensor:
        return (
            each.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(8, dtype=BF16)) if name == QUERY else each
        )

    wide = other(original, tmp_path / "original", outlier)
    asked: dict[str, Any] = {"store": "as-base", "original": wide}
    quantised_base = quantise(wide, tmp_path / "base", "nf4-double")
    assert not verify(merge_with_ours(quantised_base, adapter, tmp_path / "merged", "float32", **asked)).report.findings


@pytest.mark.parametrize(
    ("form", "change", "words"),
    [
        ("nf4-double", lambda _, each: each + 0.02 * each.std() * torch.randn_like(each), r"is \S+% away from that of"),
        ("int8", lambda _, each: each + 0.02 * each.std() * torch.randn_like(each), r"is \S+% away from that of"),
        ("nf4", lambda name, each: None if name == QUERY else each, r"q_proj.weight` is not there, but the quantised"),
        ("nf4", lambda name, each: each[:16] if name == QUERY else each, r"q_proj.weight` is BF16 \[16, 64\], but"),
    ],
)
def test_another_model_than_the_original_is_refused(
    form: str,
    change: Callable[[str, torch.Tensor], torch.Tensor | None],
    words: str,
    original: Path,
    adapter: Path,
    base: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    wrong = other(original, tmp_path / "other", change)
    with pytest.raises(IncompatibleBase, match=words):
        plan_merge(base(form), adapter, store="as-base", original=wrong)


def test_an_original_that_has_no_use_is_refused(
    original: Path, adapter: Path, base: Callable[[str], Path], tmp_path: Path
) -> None:
    norms = save_adapter(tmp_path / "head", original, "causal-lm", {"r": 2, "target_modules": ["embed_tokens"]})
    refused: list[tuple[Path, Path, dict[str, Any], str]] = [
        (original, adapter, {}, "is not quantised, so that it has no original"),
        (base("nf4"), adapter, {}, "with another storage"),
        (base("nf4"), norms, {"store": "as-base"}, "because the adapter changes no quantised weight"),
    ]
    for quantised_base, lora, choices, words in refused:
        with pytest.raises(UnsupportedAdapter, match=words):
            plan_merge(quantised_base, lora, original=original, **choices)
    with pytest.raises(IncompatibleBase, match="the original is quantised, too"):
        plan_merge(base("nf4"), adapter, store="as-base", original=base("nf4-double"))


@pytest.mark.parametrize("part", ["weight", "weight.absmax", "weight.nested_absmax", "state"])
def test_a_part_that_is_another_is_found(
    part: str, original: Path, adapter: Path, base: Callable[[str], Path], tmp_path: Path
) -> None:
    asked: dict[str, Any] = {"store": "as-base", "original": original}
    merged = merge_with_ours(base("nf4-double"), adapter, tmp_path / "merged", "float32", **asked)
    (file,) = merged.glob("*.safetensors")
    tensors = load_file(file)
    module = QUERY.removesuffix(".weight")
    if part == "state":
        name = f"{QUERY}.quant_state.bitsandbytes__nf4"
        said = json.loads(bits(tensors[name]))
        said["nested_offset"] *= 1.1
        tensors[name] = torch.tensor(list(json.dumps(said).encode().ljust(len(tensors[name]))), dtype=torch.uint8)
    elif part == "weight.nested_absmax":
        tensors[f"{module}.{part}"] *= 1.05
    else:
        tensors[f"{module}.{part}"].reshape(-1)[5] += 48
    save_file(tensors, file, {"format": "pt"})
    found = verify(merged).report.findings
    assert {each.code for each in found} <= {"LT605", "LT608"}
    assert f"{module}.{part}" in {each.subject for each in found} or part == "state"
    assert found


def test_transformers_loads_what_was_quantised_afresh(
    original: Path, adapter: Path, base: Callable[[str], Path], tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    from transformers import AutoModelForCausalLM

    asked: dict[str, Any] = {"store": "as-base", "original": original}
    for form in (*FORMS, "int8"):
        merged = merge_with_ours(base(form), adapter, tmp_path / form, "float32", **asked)
        model, info = AutoModelForCausalLM.from_pretrained(merged, output_loading_info=True, device_map="cpu")
        assert not any(info.values())
        ours, theirs = saved_tensors(merged), model.state_dict()
        assert {name: bits(each) for name, each in theirs.items()} == {name: bits(ours[name]) for name in theirs}
        assert len(theirs) >= len(ours) - 7  # LLM.int8() has no format of each weight in memory
