"""Each format that a library made: decoded to its bits, merged and rounded once; each family loaded and run beside PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from lora_tool.actions import TensorAction
from lora_tool.checkpoint import open_model
from lora_tool.execution.kernels import round_to_odd
from lora_tool.execution.native.library import VARIABLE
from lora_tool.execution.reading import Sources
from lora_tool.execution.worker import Worker, batches_of
from lora_tool.formats.quantised.arrays import STORED
from lora_tool.formats.quantised.encodings import dequantised
from lora_tool.formats.quantised.layouts import read_quantised
from lora_tool.formats.safetensors import scan_file
from lora_tool.formats.stored import read_part
from lora_tool.plan.core.ops import LoraDelta, Precision
from lora_tool.plan.core.steps import Shard, Step
from lora_tool.plan.core.terms import LoraTerm
from lora_tool.tensors import DType, FileStamp, TensorSpec
from tests.oracle.peft_merge import merge_with_ours, save_adapter, save_base
from tests.quantised_models import EIGHT_BITS, FORMS, quantise
from tests.quantised_samples import KEPT
from tests.unit.test_quantised_weights import NAMES, encoding_in

BF16 = torch.bfloat16
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "o_proj", "up_proj", "down_proj"]}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_base(tmp_path_factory.mktemp("plain") / "base", "qwen3", "causal-lm", BF16, **SIZES)


@pytest.fixture(scope="module")
def adapter(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapter") / "adapter", plain, "causal-lm", LORA)


@pytest.mark.parametrize("kernel", ["auto", "off"])
def test_a_change_of_every_librarys_weight_is_rounded_once(
    kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table has the share of values that are the nearest in bfloat16, and how far the others are, in ulp."""
    monkeypatch.setenv(VARIABLE, kernel)
    random, shares = np.random.default_rng(3), {}
    for sample in NAMES:
        weight = dequantised(encoding_in(sample))
        rows, columns = weight.shape
        b, a = (random.standard_normal(shape, np.float32) / 8 for shape in ((rows, 4), (4, columns)))
        save_file({"a": a, "b": b}, tmp_path / "factors.safetensors")
        factors = scan_file(tmp_path / "factors.safetensors").tensors
        delta = LoraDelta(source=weight, terms=(LoraTerm(a=factors["a"], b=factors["b"], scaling=0.3),))
        out = TensorSpec(name="m.weight", dtype=DType.BF16, shape=weight.shape)
        step = Step(out=out, op=delta, action=TensorAction.MERGED, reason="")
        shard = Shard(filename="merged", steps=(step,))
        with Sources([FileStamp.of(path) for path in (KEPT, factors["a"].path)]) as sources:
            worker = Worker(sources, Precision.FLOAT32)
            with (tmp_path / "merged").open("wb+") as file:
                for unit in (unit for batch in batches_of(shard, Precision.FLOAT32) for unit in batch):
                    worker.write(unit, file.fileno())
                file.seek(len(shard.header))
                found = np.frombuffer(file.read(), np.int16)
        values = np.frombuffer(read_part(weight, 0, weight.nbytes), STORED[weight.dtype]).astype(np.float64)
        exact = values.reshape(weight.shape) + np.float64(np.float32(0.3)) * (b.astype(np.float64) @ a)
        nearest = round_to_odd(exact).astype(STORED[DType.BF16]).view(np.int16).reshape(-1)
        apart = np.abs(found.astype(np.int32) - nearest)
        shares[sample] = float((apart == 0).mean()), int(apart.max())
    listed = "".join(f"\n{name:<40}{share:>9.2%} nearest, {most} ulp" for name, (share, most) in shares.items())
    assert all(most <= 1 for _, most in shares.values()), listed
    assert min(share for share, _ in shares.values()) > 0.998, listed  # of a few thousand values
    assert sum(share for share, _ in shares.values()) / len(shares) > 0.9995, listed


@pytest.mark.parametrize("form", sorted(set(FORMS | EIGHT_BITS) - {"mxfp4"}))
def test_the_merged_model_answers_as_the_dequantised_base_with_the_adapter(
    form: str, plain: Path, adapter: Path, tmp_path: Path
) -> None:
    base, values = quantise(plain, tmp_path / "base", form, lambda module: module.endswith("_proj"))
    merged = merge_with_ours(base, adapter, tmp_path / "merged", "float32")
    ours, report = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values())
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    model.load_state_dict({**model.state_dict(), **values})
    theirs = PeftModel.from_pretrained(model, adapter).eval()
    ids = torch.arange(2, 34).reshape(2, 16) % ours.config.vocab_size
    with torch.no_grad():
        found, wanted = ours.eval()(input_ids=ids).logits, theirs(input_ids=ids).logits
        with theirs.disable_adapter():
            before = theirs(input_ids=ids).logits
    change, error = float((wanted - before).norm()), float((found - wanted).norm())
    assert error < 0.02 * change, (error, change)


@pytest.mark.parametrize("form", ["fp4", "fp8-block", "fp8-block-bf16", "fp8-powers"])
def test_transformers_decodes_to_the_same_bits(form: str, plain: Path, tmp_path: Path) -> None:
    base, values = quantise(plain, tmp_path / "base", form, lambda module: module.endswith("_proj"))
    model, report = AutoModelForCausalLM.from_pretrained(base, dtype=BF16, output_loading_info=True)
    assert not any(report.values())
    config = json.loads((base / "config.json").read_text())
    encodings = read_quantised(open_model(base).tensors, config["quantization_config"]).weights
    assert encodings.keys() == values.keys()
    loaded = model.state_dict()
    for name, encoding in encodings.items():
        raw = read_part(dequantised(encoding), 0, encoding.spec.nbytes)
        dtype = BF16 if encoding.spec.dtype is DType.BF16 else torch.float32
        ours = torch.frombuffer(bytearray(raw), dtype=dtype).reshape(encoding.spec.shape)
        assert torch.equal(loaded[name], ours.to(BF16))
