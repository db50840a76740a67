"""Merging into quantised bases against `cp` of what is written: `pytest -m bench -s tests/bench/test_quantised_speed.py`.

The base is a Llama of `GIGABYTES` in FP8 with a scale for each 128 by 128 weights, as DeepSeek's and Qwen's are; the
merged model in bfloat16 is twice as large. The copy is synced because our output is.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from lora_tool.checkpoints import open_model
from lora_tool.core.tensors import DType, TensorSpec
from lora_tool.formats.safetensors import build_header
from tests.bench.models import SMALL, make_adapter, make_base
from tests.bench.processes import interleaved, table

GIGABYTES = float(os.environ.get("BENCH_GIGABYTES", "1.5"))
ROUNDS = 5
TILE = 128

pytestmark = pytest.mark.bench


def make_fp8(folder: Path, *, layers: int) -> None:
    """Write the base of `make_base` with its linear layers in FP8."""
    make_base(folder, layers=layers, shards=1)
    random = np.random.default_rng(layers)
    noise = random.integers(0, 127, 1 << 24, dtype=np.uint8) | (random.integers(0, 2, 1 << 24, dtype=np.uint8) << 7)
    kept = [spec.spec for spec in open_model(folder).tensors.values() if not spec.name.endswith("_proj.weight")]
    specs = list(kept)
    for layer in range(layers):
        for module, (rows, columns) in SMALL.linear.items():
            name = f"model.layers.{layer}.{module}.weight"
            specs.append(TensorSpec(name=name, dtype=DType.F8_E4M3, shape=(rows, columns)))
            grid = (-(-rows // TILE), -(-columns // TILE))
            specs.append(TensorSpec(name=f"{name}_scale_inv", dtype=DType.F32, shape=grid))
    for old in folder.glob("model*"):
        old.unlink()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(build_header(specs, {"format": "pt"}))
        for spec in specs:
            if spec.dtype is DType.F8_E4M3:
                file.write(np.resize(noise, spec.numel).tobytes())
            elif spec.dtype is DType.F32:
                file.write((1e-4 * (1 + random.random(spec.numel))).astype(np.float32).tobytes())
            else:
                file.write((np.resize(noise, spec.numel).astype(np.uint16) + 0x3C00).tobytes())
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [TILE, TILE], "fmt": "e4m3"}
    (folder / "config.json").write_text(json.dumps(config))


def copy(of: Path, out: Path) -> list[str]:
    return ["sh", "-c", f"cp -r {of} {out} && sync {out}/* {out}"]


def merge(folder: Path, adapter: str, *options: str, out: Path, base: str = "base") -> list[str]:
    places = [str(folder / adapter), "--base", str(folder / base), "-o", str(out)]
    return [sys.executable, "-m", "lora_tool", "merge", *places, "-q", *options]


def test_fp8_against_cp(tmp_path: Path) -> None:
    """Print the merge to bfloat16 against a copy of what it writes, and against the same merge of a bfloat16 base."""
    layers = max(1, round((GIGABYTES - 0.26) / 0.0445))
    make_fp8(tmp_path / "base", layers=layers)
    make_base(tmp_path / "plain", layers=layers, shards=1)
    make_adapter(tmp_path / "all", layers=layers, rank=16)
    make_adapter(tmp_path / "attention", layers=layers, rank=16, targets=("self_attn.q_proj", "self_attn.v_proj"))
    out, whole = tmp_path / "out", tmp_path / "whole"
    interleaved({"once": merge(tmp_path, "all", out=whole)}, out=out, rounds=1)
    commands = {
        "cp -r; sync of the bf16": copy(whole, out),
        "merge all to bf16": merge(tmp_path, "all", out=out),
        "merge q, v to bf16": merge(tmp_path, "attention", out=out),
        "merge all, base in bf16": merge(tmp_path, "all", out=out, base="plain"),
        "merge all in numpy": ["env", "LORA_TOOL_KERNEL=off", *merge(tmp_path, "all", out=out)],
    }
    runs = interleaved(commands, out=out, rounds=ROUNDS)
    print(
        f"\n{open_model(tmp_path / 'base').weights.nbytes / 1e9:.2f} GB of FP8\n"
        + table(runs, against="cp -r; sync of the bf16")
    )


def test_fp8_again_against_cp(tmp_path: Path) -> None:
    """Print the merge that stores FP8 again against a copy of what it writes."""
    layers = max(1, round((GIGABYTES - 0.26) / 0.0445))
    make_fp8(tmp_path / "base", layers=layers)
    make_adapter(tmp_path / "all", layers=layers, rank=16)
    out, again = tmp_path / "out", ("--store", "as-base", "--allow-loss")
    commands = {
        "cp -r; sync of the fp8": copy(tmp_path / "base", out),
        "merge all as-base": merge(tmp_path, "all", *again, out=out),
        "the same, numpy": ["env", "LORA_TOOL_KERNEL=off", *merge(tmp_path, "all", *again, out=out)],
    }
    runs = interleaved(commands, out=out, rounds=ROUNDS)
    print(
        f"\n{open_model(tmp_path / 'base').weights.nbytes / 1e9:.2f} GB of FP8\n"
        + table(runs, against="cp -r; sync of the fp8")
    )
