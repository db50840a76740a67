"""The plan of a merge into 671 B parameters, from headers alone: `pytest -m bench -s tests/bench/test_plan_speed.py`.

The base has DeepSeek-V3's names, shapes and number of files, all sparse: no weight is on the disk, and none is read.
Tried on the way: row numbers as Python lists made the plan 97 s; as numpy ranges 12 s. On a busy 2.5 GHz Xeon, CPU of
the whole dry run: 30 s; with one conversion per form of layer, spans found by bisection and JSON a line per step 18 s.
Of a sampled 15.7 s: importing torch and transformers 3.7, reading headers 2.6, steps on disk 2.7, printing 2.2.
Then, with sizes worked out once, one home per module, one name per form of names, no collector at the end: 0.7 of that
CPU, run by turns with the older code on a busy machine (20.4 s → 14.8 s). Of these 14.8 s, importing takes 5.7, reading
headers 2.4, steps on disk 2.0, printing 1.6, the collector 0.8: what is left is the making of some million objects.
A view of the adapter made once, not five times: 22 s → 19 s, by turns at a load of 15, the adapter's values not looked at.
Looking at them took a third of all CPU; 90,000 factors handed out some MB at a time, in one buffer, take half of that.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.processes import run

LAYERS, DENSE, EXPERTS, HIDDEN, FEED_FORWARD, MOE, VOCABULARY = 61, 3, 256, 7168, 18432, 2048, 129280
HEADS, Q_RANK, KV_RANK, NOPE, ROPE, VALUE = 128, 1536, 512, 128, 64, 128
RANK = 16
FILES = 163
OF_VALUES = "LT208,LT209,LT219,LT220,LT227,LT311"
"""The rules that read the adapter's values."""

pytestmark = pytest.mark.bench


def attention() -> dict[str, tuple[int, ...]]:
    return {
        "q_a_proj": (Q_RANK, HIDDEN),
        "q_b_proj": (HEADS * (NOPE + ROPE), Q_RANK),
        "kv_a_proj_with_mqa": (KV_RANK + ROPE, HIDDEN),
        "kv_b_proj": (HEADS * (NOPE + VALUE), KV_RANK),
        "o_proj": (HIDDEN, HEADS * VALUE),
    }


def feed_forward(width: int) -> dict[str, tuple[int, ...]]:
    return {"gate_proj": (width, HIDDEN), "up_proj": (width, HIDDEN), "down_proj": (HIDDEN, width)}


def linear_layers() -> Iterator[tuple[str, tuple[int, ...]]]:
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield from ((f"{prefix}.self_attn.{name}", shape) for name, shape in attention().items())
        if layer < DENSE:
            yield from ((f"{prefix}.mlp.{name}", shape) for name, shape in feed_forward(FEED_FORWARD).items())
            continue
        yield from ((f"{prefix}.mlp.shared_experts.{name}", shape) for name, shape in feed_forward(MOE).items())
        for expert in range(EXPERTS):
            yield from ((f"{prefix}.mlp.experts.{expert}.{name}", shape) for name, shape in feed_forward(MOE).items())


def tensors() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    yield from ((f"{name}.weight", shape) for name, shape in linear_layers())
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.self_attn.q_a_layernorm.weight", (Q_RANK,)
        yield f"{prefix}.self_attn.kv_a_layernorm.weight", (KV_RANK,)
        yield f"{prefix}.input_layernorm.weight", (HIDDEN,)
        yield f"{prefix}.post_attention_layernorm.weight", (HIDDEN,)
        if layer >= DENSE:
            yield f"{prefix}.mlp.gate.weight", (EXPERTS, HIDDEN)
            yield f"{prefix}.mlp.gate.e_score_correction_bias", (EXPERTS,)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def write_sparse(path: Path, held: dict[str, tuple[int, ...]], *, dtype: str, width: int) -> int:
    header, at = {}, 0
    for name, shape in held.items():
        nbytes = width
        for side in shape:
            nbytes *= side
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return at


def make_base(root: Path) -> int:
    from transformers import DeepseekV3Config

    root.mkdir()
    DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"], dtype="bfloat16").save_pretrained(root)
    listed = list(tensors())
    per_file = -(-len(listed) // FILES)
    weight_map: dict[str, str] = {}
    total = 0
    for number in range(FILES):
        name = f"model-{number + 1:05}-of-{FILES:05}.safetensors"
        held = dict(listed[number * per_file : (number + 1) * per_file])
        total += write_sparse(root / name, held, dtype="BF16", width=2)
        weight_map |= dict.fromkeys(held, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return len(listed)


def make_adapter(root: Path) -> None:
    root.mkdir()
    fields = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 2 * RANK}
    names = sorted({name.rpartition(".")[2] for name, _ in linear_layers()})
    (root / "adapter_config.json").write_text(json.dumps({**fields, "target_modules": names, "bias": "none"}))
    held: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in linear_layers():
        held[f"base_model.model.{name}.lora_A.weight"] = (RANK, columns)
        held[f"base_model.model.{name}.lora_B.weight"] = (rows, RANK)
    write_sparse(root / "adapter_model.safetensors", held, dtype="BF16", width=2)


def test_671_billion_parameters_are_planned_from_headers(tmp_path: Path) -> None:
    count = make_base(tmp_path / "base")
    make_adapter(tmp_path / "adapter")
    command = ["merge", str(tmp_path / "adapter"), "--base", str(tmp_path / "base"), "-o", str(tmp_path / "out")]
    # the adapter is as sparse as the base, and so all zeros, which is a finding
    for what, ignored in (
        ("from headers alone", OF_VALUES),
        ("and every value of the adapter, 13 GB, looked at", "LT208"),
    ):
        done = run([sys.executable, "-m", "lora_tool", *command, "--ignore", ignored, "--dry-run", "--json"])
        print(f"\n{count} tensors, {what}: {done.wall:.1f} s wall, {done.cpu:.1f} s CPU, {done.rss:.0f} MB (aim 5 s)")
