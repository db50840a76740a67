"""Tiny bases and adapters, a few hundred bytes each, and the draft that a merge of them is planned on: no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lora_tool.checkpoints import AdapterDir, ModelDir, open_adapter, open_model
from lora_tool.core.tensors import DType
from lora_tool.models.mapping.model import ModelFacts
from lora_tool.plans.base.task import Task
from lora_tool.plans.merge.draft import Draft, MergeInputs, Model
from lora_tool.plans.merge.model.reading import read_model
from lora_tool.plans.merge.options import PlanOptions
from lora_tool.plans.merge.passes.deltas import with_deltas
from lora_tool.plans.merge.passes.ends import with_ends
from lora_tool.plans.merge.passes.head import with_head
from tests.property.strategies import write_weights

Array = np.ndarray[Any, Any]
EMBED, OUTPUT, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
Q = "model.layers.0.self_attn.q_proj"
VOCABULARY, HIDDEN, RANK = 6, 4, 2


def numbers(*shape: int, seed: int = 0) -> Array:
    """Return float32 numbers that are those of no other shape or seed."""
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def llama(**changes: Array | None) -> dict[str, Array]:
    """Return a one-layer llama with tied embeddings: enough of it to be planned on. None leaves a tensor out."""
    tensors = {EMBED: numbers(VOCABULARY, HIDDEN), f"{Q}.weight": numbers(HIDDEN, HIDDEN), NORM: numbers(HIDDEN)}
    return {name: array for name, array in (tensors | changes).items() if array is not None}


def lora(module: str, *, rows: int = HIDDEN, columns: int = HIDDEN, seed: int = 1) -> dict[str, Array]:
    """Return the factors of a linear module of shape [rows, columns]."""
    return {
        f"{module}.lora_A.weight": numbers(RANK, columns, seed=seed),
        f"{module}.lora_B.weight": numbers(rows, RANK, seed=seed),
    }


def embedding_lora(module: str, *, rows: int = VOCABULARY, columns: int = HIDDEN) -> dict[str, Array]:
    return {f"{module}.lora_embedding_A": numbers(RANK, rows), f"{module}.lora_embedding_B": numbers(columns, RANK)}


def save_base(folder: Path, tensors: Mapping[str, Array], **config: Any) -> ModelDir:
    folder.mkdir(parents=True)
    known = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": OUTPUT not in tensors}
    known |= {"vocab_size": VOCABULARY, "num_hidden_layers": 1, **config}
    (folder / "config.json").write_text(json.dumps(known))
    write_weights(folder / "model.safetensors", dict(tensors))
    return open_model(folder)


def save_adapter(folder: Path, tensors: Mapping[str, Array], **config: Any) -> AdapterDir:
    """Write the tensors under PEFT's names; the modules with factors are the targets where `config` names none."""
    folder.mkdir()
    targets = sorted({name.partition(".lora_")[0] for name in tensors if ".lora_" in name})
    known = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK, "target_modules": targets}
    (folder / "adapter_config.json").write_text(json.dumps(known | config))
    prefixed = {f"base_model.model.{name}": array for name, array in tensors.items()}
    write_weights(folder / "adapter_model.safetensors", prefixed)
    return open_adapter(folder)


def drafted(
    base: ModelDir | Model,
    *adapters: AdapterDir,
    asked: Task = Task.AUTO,
    num_labels: int | None = None,
    dtype: DType | None = None,
    untie: bool = False,
) -> Draft:
    """Return the draft of the merge before its steps; a model that was read already is taken as it is."""
    model = read_model(base, adapters, asked) if isinstance(base, ModelDir) else base
    options = PlanOptions(num_labels=num_labels, untie=untie)
    weights = (1.0,) * len(model.adapters)
    inputs = MergeInputs(stored=model.base, base=model.base, adapters=model.adapters, weights=weights)
    draft = Draft(inputs=inputs, model=model, base=model.base, dtype=dtype)
    return with_ends(with_head(with_deltas(draft, options), options), options)


def facts(shapes: Mapping[str, tuple[int, ...]], **more: Any) -> ModelFacts:
    """Return a class with these parameters, whose modules with a matrix are its layers."""
    modules = frozenset(name.rpartition(".")[0] for name in shapes)
    known: dict[str, Any] = {
        "class_name": "TinyForCausalLM",
        "shapes": shapes,
        "buffers": frozenset(),
        "modules": modules,
        "layers": frozenset(module for module in modules if len(shapes.get(f"{module}.weight", ())) > 1),
        "conv1d": frozenset(),
        "transposed": frozenset(),
        "tied": {},
        "output": "lm_head",
        "tokens_of_both": None,
        "head": None,
        "unsaved": frozenset(),
        "keep_in_fp32": frozenset(),
    }
    return ModelFacts(**known | more)
