"""Random headers, adapter names, plans and folders: every one valid, many of them odd."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from lora_tool.core.tensors import FLOAT_NAMES, DType, TensorSpec
from lora_tool.execution.kernels import STORAGE
from lora_tool.formats.safetensors import build_header

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda n: n != "__metadata__")
WHOLE_BYTE = [dtype for dtype in DType if dtype.bits >= 8]
SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
FLOATS = [DType.BF16, DType.F16, DType.F32, DType.F64]
STORED = [DType.BF16, DType.F16, DType.F32]


@st.composite
def specs(draw: st.DrawFn, dtypes: list[DType] = WHOLE_BYTE) -> list[TensorSpec]:
    """Return a list of tensors with different names, some of them empty."""
    names = draw(st.lists(NAMES, max_size=6, unique=True))
    return [TensorSpec(name=name, dtype=draw(st.sampled_from(dtypes)), shape=draw(SHAPES)) for name in names]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A base model and an adapter, as numbers: what a merge is made from."""

    base: dict[str, np.ndarray[Any, Any]]
    adapter: dict[str, np.ndarray[Any, Any]]
    config: dict[str, Any]
    shards: int
    tied: bool

    def write(self, root: Path) -> tuple[Path, Path]:
        """Write the two folders and return them."""
        base, adapter = root / "base", root / "adapter"
        base.mkdir()
        adapter.mkdir()
        model = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": self.tied}
        (base / "config.json").write_text(json.dumps(model))
        (adapter / "adapter_config.json").write_text(json.dumps(self.config))
        write_weights(adapter / "adapter_model.safetensors", self.adapter)
        names = list(self.base)
        parts = [names[at :: self.shards] for at in range(self.shards)]
        files = [f"model-{at + 1:05d}-of-{self.shards:05d}.safetensors" for at in range(self.shards)]
        for file, part in zip(files, parts, strict=True):
            write_weights(base / file, {name: self.base[name] for name in part})
        weight_map = {name: file for file, part in zip(files, parts, strict=True) for name in part}
        total = sum(array.nbytes for array in self.base.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (base / "model.safetensors.index.json").write_text(json.dumps(index))
        return base, adapter


def write_weights(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    dtypes = {STORAGE[dtype]: dtype for dtype in FLOAT_NAMES}
    header = build_header(
        (TensorSpec(name=name, dtype=dtypes[array.dtype], shape=array.shape) for name, array in arrays.items()),
        {"format": "pt"},
    )
    path.write_bytes(header + b"".join(array.tobytes() for array in arrays.values()))


@st.composite
def inputs(draw: st.DrawFn) -> Inputs:
    """Return a small llama-shaped base with any number of layers and shards, and an adapter on some of its modules."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype, factor_dtype = draw(st.sampled_from(STORED)), draw(st.sampled_from(STORED))
    width, height = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    layers, tied = draw(st.integers(1, 3)), draw(st.booleans())

    def numbers(shape: tuple[int, ...], kind: DType) -> np.ndarray[Any, Any]:
        return rng.standard_normal(shape).astype(STORAGE[kind])

    base = {"model.embed_tokens.weight": numbers((7, width), dtype)}
    for layer in range(layers):
        for name in ("q_proj", "v_proj"):
            base[f"model.layers.{layer}.self_attn.{name}.weight"] = numbers((height, width), dtype)
            base[f"model.layers.{layer}.self_attn.{name}.bias"] = numbers((height,), dtype)
        base[f"model.layers.{layer}.input_layernorm.weight"] = numbers((width,), DType.F32)
    base["model.norm.weight"] = numbers((width,), dtype)
    if not tied:
        base["lm_head.weight"] = numbers((7, width), dtype)

    rank, biased = draw(st.integers(1, 9)), draw(st.booleans())
    targets = draw(st.sampled_from([["q_proj"], ["v_proj"], ["q_proj", "v_proj"]]))
    saved = draw(st.booleans())
    adapter = {}
    for layer in range(layers):
        for name in targets:
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            adapter[f"{stem}.lora_A.weight"] = numbers((rank, width), factor_dtype)
            adapter[f"{stem}.lora_B.weight"] = numbers((height, rank), factor_dtype)
            if biased:
                adapter[f"{stem}.lora_B.bias"] = numbers((height,), factor_dtype)
    if saved:
        adapter["base_model.model.model.norm.weight"] = numbers((width,), factor_dtype)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": draw(st.sampled_from([1, 3, 8, 16, 0.5])),
        "use_rslora": draw(st.booleans()),
        "lora_bias": biased,
        "target_modules": targets,
        "modules_to_save": ["model.norm"] if saved else None,
    }
    return Inputs(base=base, adapter=adapter, config=config, shards=draw(st.integers(1, 3)), tied=tied)
