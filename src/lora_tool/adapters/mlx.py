"""Adapters of MLX-LM: `adapters.safetensors` and a config of its own, read as the PEFT adapter that they stand for.

MLX-LM multiplies from the left (`mlx_lm/tuner/lora.py`, 0.32): a linear layer's `lora_a` is [in, r], its `lora_b`
[r, out], the transposed of PEFT's; LoRA on stacked experts has [experts, r, in] and [experts, out, r], which are PEFT's
factors of one expert after the other. One `scale` multiplies all products, where PEFT has alpha / r. DoRA's `m` is
PEFT's magnitude vector.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.adapters.experts import PROJECTIONS
from lora_tool.checkpoints import AdapterDir
from lora_tool.checkpoints.adapters import ADAPTER, ADAPTER_PICKLE, ADAPTER_WEIGHTS
from lora_tool.checkpoints.folders import Folder, read_folder
from lora_tool.core import keys
from lora_tool.core.errors import BadConfig, Defect, UnsupportedAdapter
from lora_tool.core.keys import PREFIX, Part, split_layer
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.adapter_config import FILE_NAME, adapter_config
from lora_tool.formats.fields import is_number
from lora_tool.formats.files import read_object
from lora_tool.formats.stored import transposed
from lora_tool.formats.weights import Weights, read_single
from lora_tool.models.ends import MATRIX, is_input

MLX_WEIGHTS = "adapters.safetensors"
_STACK = 3
_NAME = re.compile(r"(?P<module>.+)\.(?P<part>lora_a|lora_b|m)")
_STACKED = re.compile(r"(?P<before>.+)\.switch_mlp\.(?P<projection>gate_proj|up_proj|down_proj)")
EXPERTS = tuple(dict(zip(PROJECTIONS[0], theirs, strict=True)) for theirs in PROJECTIONS)
"""MLX-LM's names of an expert's three matrices → those that checkpoints have."""


class MlxAdapter(Struct, frozen=True, kw_only=True):
    """An adapter of MLX-LM."""

    adapter: AdapterDir
    """The PEFT adapter that it stands for: under PEFT's names the tensors of the file, transposed or cut, whose own
    names are those in the file.
    """
    fields: Mapping[str, Any]
    """Those of the `adapter_config.json` that PEFT needs."""
    stored: Weights
    """The tensors as the file has them."""


def is_mlx(folder: Folder) -> bool:
    """Return whether the folder holds an adapter of MLX-LM, and none of PEFT's."""
    return MLX_WEIGHTS in folder.files and not {ADAPTER_WEIGHTS, ADAPTER_PICKLE} & {*folder.files}


def read_mlx(root: Path, base_tensors: Mapping[str, StoredTensor] | None = None) -> MlxAdapter:
    """Return the adapter in the folder `root`; `base_tensors` are its base's, which name its experts.

    Problems of the files are in the adapter's `problems`. Raises `BrokenFile` for a config that cannot be read,
    `UnsupportedAdapter`, with the name, for a feature that PEFT has no form for.
    """
    folder = read_folder(root)
    path = root / FILE_NAME
    raw = read_object(path)
    stored = read_single(root / MLX_WEIGHTS)
    rank, scale = _parameters(raw, path)
    table = dict(_renamed(stored, rank, path, base_tensors))
    parsed = {name: keys.parse(name) for name in table}
    modules = [key.module for key in parsed.values() if key.part in (Part.LORA_A, Part.EMBEDDING_A)]
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": raw.get("model") if isinstance(raw.get("model"), str) else None,
        "r": rank,
        "lora_alpha": _alpha(scale, rank),
        "lora_dropout": raw["lora_parameters"].get("dropout", 0.0),
        "bias": "none",
        "use_dora": raw.get("fine_tune_type") == "dora",
        "init_lora_weights": True,
        "inference_mode": True,
        **_targets(modules),
    }
    adapter = AdapterDir(
        kind=ADAPTER,
        folder=folder,
        config=adapter_config(fields, path),
        weights=replace(stored, tensors=table),
        keys=parsed,
        problems=(*folder.problems, *stored.problems),
    )
    return MlxAdapter(adapter=adapter, fields=fields, stored=stored)


def _parameters(raw: Mapping[str, Any], path: Path) -> tuple[int, float]:
    """Return rank and scale; MLX-LM has one of each for all modules."""
    kind = raw.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise UnsupportedAdapter(
            f"{path}: `fine_tune_type` {kind!r}: MLX-LM trained whole layers here, not LoRA",
            hint="fuse it with the program that made it: mlx_lm.fuse --model MODEL --adapter-path FOLDER",
        )
    inner = raw.get("lora_parameters")
    if not isinstance(inner, dict):
        raise BadConfig.of(path, Defect.BAD_FIELD, "expected an object with `rank` and `scale`", "lora_parameters")
    rank, scale = inner.get("rank"), inner.get("scale")
    if type(rank) is not int or rank < 1:
        raise BadConfig.of(
            path, Defect.BAD_FIELD, f"expected an int of at least 1, found {rank!r}", "lora_parameters.rank"
        )
    if not is_number(scale):
        raise BadConfig.of(path, Defect.BAD_FIELD, f"expected a number, found {scale!r}", "lora_parameters.scale")
    return rank, float(scale)


def _alpha(scale: float, rank: int) -> float:
    """Return the alpha that over the rank gives the scale, as an int where it is one."""
    alpha = scale * rank
    return int(alpha) if alpha.is_integer() else alpha


def _renamed(
    stored: Weights, rank: int, path: Path, base: Mapping[str, StoredTensor] | None
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield PEFT's names and factors, in the order of the file."""
    for name, tensor in stored.tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise UnsupportedAdapter(
                f"{tensor.path}: `{name}` is not a tensor of MLX-LM's LoRA: expected lora_a, lora_b or m"
            )
        module, part = _in_base(match["module"], base), match["part"]
        if part == "m":
            if is_input(module):
                raise UnsupportedAdapter(
                    f"{tensor.path}: `{name}`: DoRA on an embedding, which PEFT scales differently"
                )
            yield f"{PREFIX}{module}.lora_magnitude_vector", tensor
            continue
        stacked = len(tensor.shape) == _STACK
        at = (1 if part == "lora_a" else 2) if stacked else (1 if part == "lora_a" else 0)
        if len(tensor.shape) not in (MATRIX, _STACK) or tensor.shape[at] != rank:
            raise UnsupportedAdapter(
                f"{tensor.path}: `{name}` is {list(tensor.shape)}, and {path.name} says rank {rank}: MLX-LM does not load it",
                hint="give the adapters.safetensors and the adapter_config.json of one training",
            )
        if stacked:
            yield from _of_experts(tensor, module, part, base)
        elif is_input(module):
            yield (
                f"{PREFIX}{module}.{'lora_embedding_A' if part == 'lora_a' else 'lora_embedding_B'}",
                transposed(tensor),
            )
        else:
            yield f"{PREFIX}{module}.{'lora_A' if part == 'lora_a' else 'lora_B'}.weight", transposed(tensor)


def _in_base(module: str, base: Mapping[str, StoredTensor] | None) -> str:
    """Return a module's path in the base where that calls its list of layers otherwise, as GPT-NeoX's does."""
    number, path = split_layer(module)
    if base is None or number is None or f"{module}.weight" in base:
        return module
    layers, _, rest = path.partition(".*.")
    own, end = layers.rpartition(".")[2], f".{number}.{rest}.weight"
    places = [name.removesuffix(end) for name in base if name.endswith(end)]
    if len(places) != 1 or places[0].rpartition(".")[2] == own:
        return module
    return f"{places[0]}.{number}.{rest}"


def _of_experts(
    tensor: StoredTensor, module: str, part: str, base: Mapping[str, StoredTensor] | None
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield a stacked factor expert by expert, under the names that the base's checkpoint gives the experts."""
    match = _STACKED.fullmatch(module)
    if match is None:
        raise UnsupportedAdapter(
            f"{tensor.path}: `{tensor.name}` is LoRA on stacked experts that are not called switch_mlp"
        )
    if base is None:
        raise UnsupportedAdapter(
            f"{tensor.path}: `{tensor.name}` is LoRA on MLX-LM's stacked experts, and only the base has their names",
            hint="give the model that it was trained on: `base=MODEL`",
        )
    before, projection = match["before"], match["projection"]
    named = next((each for each in EXPERTS if f"{before}.experts.0.{each[projection]}.weight" in base), None)
    if named is None:
        raise UnsupportedAdapter(
            f"{tensor.path}: `{module}`: the base has no `{before}.experts.0.gate_proj` or `.w1`",
            hint="give the model that it was trained on, in transformers' format: `base=MODEL`",
        )
    count, *shape = tensor.shape
    each = tensor.nbytes // count if count else 0
    own = "lora_A" if part == "lora_a" else "lora_B"
    for expert in range(count):
        spec = replace(tensor.spec, shape=tuple(shape))
        spans = tuple(tensor.part(expert * each, each))
        yield (
            f"{PREFIX}{before}.experts.{expert}.{named[projection]}.{own}.weight",
            StoredTensor(spec=spec, spans=spans),
        )


def _targets(modules: list[str]) -> dict[str, Any]:
    """Return how PEFT finds these modules: by the ends of their names in some of the layers, else by their whole paths.

    The ends are as short as possible: the base may have other prefixes before its layers.
    """
    inside = {(layer, path) for layer, path in map(split_layer, modules) if layer is not None}
    layers = {layer for layer, _ in inside}
    every = layers == set(range(len(layers)))
    for before in (".", ".*."):
        ends = {(layer, path.rpartition(before)[2]) for layer, path in inside}
        names = {name for _, name in ends}
        numbered = any("*" in name for name in names)
        if modules and not numbered and len(modules) == len(ends) == len(layers) * len(names):
            return {"target_modules": sorted(names), "layers_to_transform": None if every else sorted(layers)}
    return {"target_modules": sorted(set(modules))}
