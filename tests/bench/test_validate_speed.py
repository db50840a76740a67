"""How long `validate` takes: `pytest -m bench -s tests/bench/test_validate_speed.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from lora_tool.core.tensors import DType, TensorSpec
from lora_tool.formats.safetensors import build_header
from tests.bench.processes import run

pytestmark = pytest.mark.bench

HIDDEN, KEYS, FEED_FORWARD = 8192, 1024, 28672
MODULES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
    "mlp.up_proj": (FEED_FORWARD, HIDDEN),
    "mlp.down_proj": (HIDDEN, FEED_FORWARD),
}


def adapter_of_70b(root: Path, dtype: DType, *, rank: int = 16, layers: int = 80) -> int:
    """Write an adapter on all linear layers of a 70B Llama, its values as training leaves them; return its bytes."""
    root.mkdir()
    specs = [
        TensorSpec(name=f"base_model.model.model.layers.{layer}.{module}.lora_{part}.weight", dtype=dtype, shape=shape)
        for layer in range(layers)
        for module, (rows, columns) in MODULES.items()
        for part, shape in (("A", (rank, columns)), ("B", (rows, rank)))
    ]
    values = np.random.default_rng(0).standard_normal(1 << 20, dtype=np.float32) * np.float32(0.02)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype is DType.BF16 else values.astype(np.float16)
    block = values.tobytes() if dtype is DType.F32 else bits.tobytes()
    with (root / "adapter_model.safetensors").open("wb") as file:
        file.write(build_header(specs, {"format": "pt"}))
        left = nbytes = sum(spec.nbytes for spec in specs)
        while left:
            left -= file.write(block[:left])
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 32,
        "base_model_name_or_path": "o/m",
    }
    names = [module.rpartition(".")[2] for module in MODULES]
    (root / "adapter_config.json").write_text(json.dumps({**config, "target_modules": names}))
    return nbytes


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32])
def test_validate_speed(dtype: DType, tmp_path: Path) -> None:
    rank = 64 if dtype is not DType.F32 else 32
    nbytes = adapter_of_70b(tmp_path / "adapter", dtype, rank=rank)
    (tmp_path / "adapter" / "adapter_model.safetensors").read_bytes()  # into the page cache
    best = {}
    for name, option in (("headers", "--headers-only"), ("deep", "--deep")):
        command = [sys.executable, "-m", "lora_tool", "validate", str(tmp_path / "adapter"), option]
        runs = [run(command, env={"HF_HUB_OFFLINE": "1"}) for _ in range(5)]
        best[name] = min(one.wall for one in runs), min(one.cpu for one in runs)
    wall, cpu = (nbytes / 1e9 / (deep - headers) for headers, deep in zip(best["headers"], best["deep"], strict=True))
    print(f"\n{dtype.value}, {nbytes / 1e9:.2f} GB: wall and CPU s of headers {best['headers']}, deep {best['deep']}")
    print(f"GB/s beyond the headers: {wall:.1f} by the clock, {cpu:.1f} of CPU")
