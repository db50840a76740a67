"""The LoRA of Megatron's modules under the names and in the rows that transformers' modules have.

Megatron fuses what transformers keeps apart. A `linear_qkv` has its rows by query group (Megatron-Bridge,
`models/conversion/param_mapping.py::split_qkv_weights`); a `linear_fc1` has the gate's rows, then those of the up
projection, as mcore's `apply_swiglu_sharded_factory` saves it; Megatron-SWIFT saves its B without that, each tensor
parallel rank's gate and up one after the other. One A serves all projections of a fused module. Alike layers are one
tensor with the layer as first dimension, experts one with the expert as the next; LoRA that all experts share, and
that Megatron-Bridge saved once, has none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct

from lora_tool.core.errors import UnsupportedCheckpoint
from lora_tool.core.keys import PREFIX
from lora_tool_megatron.model import EXPORT, GIVE, MOST_MATRICES, MegatronModel, Rows

_BRIDGE = re.compile(r".*\.adapter\.(?:.*\.)?linear_(?:in|out)\.weight\Z", re.DOTALL)
_SWIFT = re.compile(r"(?:.*\.)?decoder\.layers\..*\.linear_(?:qkv|proj|fc[12])\.lora_[AB]\.", re.DOTALL)
_TRAINED = re.compile(r".*\.(?:adapter|lora_[^.]+|modules_to_save)\.", re.DOTALL)
"""A part of an adapter, of whatever module."""
_MODULE = (
    r"(?:(?:base_model|model|module)\.)*decoder\.layers\.(?:(?P<layer>\d{1,5})\.)?"
    r"(?:self_attention\.linear_(?P<attention>qkv|proj)"
    r"|mlp\.(?:(?P<kind>experts|shared_experts)\.(?:(?:local_)?experts\.)?(?:(?P<expert>\d{1,5})\.)?)?linear_(?P<mlp>fc[12]))"
)
_FACTOR = re.compile(
    _MODULE
    + r"\.(?:adapter\.(?:adapter_(?P<part>q|k|v|gate|up)\.)?linear_(?P<side>in|out)|lora_(?P<swift>[AB])(?:\.[^.]+)?)"
    r"\.weight\Z"
)
_UNREAD = (
    (r"weight_magnitude", "DoRA, whose magnitudes Megatron fuses as it does B"),
    (r"modules_to_save", "a module that was trained whole"),
    (r"vision_model|vision_projection|language_model", "a model of images and text"),
    (r"mixer\.", "LoRA on Mamba's mixer, whose in_proj is five projections in one"),
    (r"router", "LoRA on a router"),
    (r"linear_(q|kv)_(down|up)_proj|linear_q_proj", "LoRA on multi-latent attention"),
    (r"self_attention\.(in|out)_proj", "LoRA on linear attention"),
    (r"cross_attention|cross_attn", "LoRA on cross attention"),
    (r"output_layer|word_embeddings", "LoRA on an end of the model, whose vocabulary Megatron pads"),
    (r"(^|\.)mtp\.", "LoRA on a layer that predicts further tokens"),
)
"""What is known and not read, by parts of its names."""
_PARTS = {"qkv": ("q", "k", "v"), "fc1": ("gate", "up")}
_MATRIX = 2


class ModulePlace(Struct, frozen=True, kw_only=True):
    """Where a tensor of the adapter is: in which of Megatron's, from which row, and in which rows from there."""

    source: str
    first: int
    """Of the source as one matrix, in which layers and experts lie one below the other."""
    rows: Rows
    shape: tuple[int, int]


def is_megatron(names: Mapping[str, Any]) -> bool:
    """Return whether some of the names are those of LoRA on Megatron's modules."""
    return any(_BRIDGE.match(name) or _SWIFT.match(name) for name in names)


def places(
    shapes: Mapping[str, tuple[int, ...]], model: MegatronModel, cuts: Mapping[str, int] | None = None
) -> dict[str, ModulePlace]:
    """Return PEFT's name → place of every LoRA tensor among `shapes`, which are by Megatron's names.

    `cuts` are the numbers of ranges of rows in which tensors were saved, each by one rank, 1 for those that it lacks.
    Raises `UnsupportedCheckpoint` for LoRA on modules that are not known, for tensors that were trained whole beside
    it, and for shapes that are not the model's.
    """
    adapter = {name: shape for name, shape in shapes.items() if _TRAINED.match(name)}
    _require_nothing_else(shapes, adapter)
    found: dict[str, ModulePlace] = {}
    for name, shape in adapter.items():
        for new, place in _places(name, shape, model, (cuts or {}).get(name, 1)):
            if new in found:
                raise UnsupportedCheckpoint(f"`{name}` and `{found[new].source}` would be one tensor of the adapter")
            found[new] = place
    return found


def _require_nothing_else(own: Mapping[str, Any], adapter: Mapping[str, Any]) -> None:
    """Raise `UnsupportedCheckpoint` for tensors that are not LoRA where the base was not saved: they were trained."""
    other = next((name for name in own if name not in adapter), None)
    if other is not None and not any(re.fullmatch(rf"{_MODULE}(?:\.base_layer)?\.weight\d*", name) for name in own):
        text = f"`{other}` was trained whole beside the LoRA, and lora-tool does not know transformers' name of it"
        raise UnsupportedCheckpoint(text, hint=EXPORT)


def _places(name: str, shape: tuple[int, ...], model: MegatronModel, cuts: int) -> Iterator[tuple[str, ModulePlace]]:
    match = _FACTOR.match(name)
    if match is None:
        what = next(
            (what for pattern, what in _UNREAD if re.search(pattern, name)),
            "a module that the layers of text models do not have",
        )
        raise UnsupportedCheckpoint(f"`{name}` is of {what}, which lora-tool does not read", hint=EXPORT)
    stack, rows, columns = _stack(name, shape, match, model)
    side = "lora_A" if match["swift"] == "A" or match["side"] == "in" else "lora_B"
    for index, layer, expert in stack:
        for path, runs in _projections(name, match, rows, model, expert, fused=side == "lora_B", cuts=cuts):
            place = ModulePlace(
                source=name, first=index * rows, rows=runs, shape=(sum(count for _, count in runs), columns)
            )
            yield f"{PREFIX}model.layers.{layer}.{path}.{side}.weight", place


def _stack(
    name: str, shape: tuple[int, ...], match: re.Match[str], model: MegatronModel
) -> tuple[list[tuple[int, int, int | None]], int, int]:
    """Return the matrices in a tensor, each with its number, layer and expert, and how many rows and columns they have.

    A matrix that all experts share is there once for each.
    """
    *dims, rows, columns = (0, *shape) if len(shape) < _MATRIX else shape
    for_each = model.experts if match["kind"] == "experts" and len(dims) == (not match["layer"]) else 1
    if math.prod(dims) * max(1, for_each) > MOST_MATRICES:
        raise UnsupportedCheckpoint(f"`{name}` has the shape {list(shape)}: more matrices than any model has")
    layers = [int(match["layer"])] if match["layer"] else list(range(dims.pop(0))) if dims else []
    experts: list[int | None] = [None]
    shared = False
    if match["kind"] == "experts":
        shared = not dims and match["expert"] is None
        count = model.experts if shared else dims.pop(0) if dims else 0
        if not count and match["expert"] is None:
            raise UnsupportedCheckpoint(
                f"`{name}` is for all experts, and no file says how many experts there are", hint=GIVE
            )
        if count and model.experts not in (0, count):
            text = f"`{name}` is for {count} experts, but the model has {model.experts}"
            raise UnsupportedCheckpoint(text, hint=GIVE)
        experts = [int(match["expert"])] if match["expert"] is not None else list(range(count))
    if dims or not layers or len(shape) < _MATRIX:
        raise UnsupportedCheckpoint(f"`{name}` has the shape {list(shape)}: expected a matrix for each layer")
    each = 1 if shared else len(experts)
    numbered = [
        (at * each + (0 if shared else number), layer, expert)
        for at, layer in enumerate(layers)
        for number, expert in enumerate(experts)
    ]
    return numbered, rows, columns


def _projections(
    name: str, match: re.Match[str], rows: int, model: MegatronModel, expert: int | None, *, fused: bool, cuts: int
) -> Iterator[tuple[str, Rows]]:
    """Yield transformers' modules that one of Megatron's is, each with its rows of a B; A is of all of them."""
    whole = ((0, rows),)
    linear = match["attention"] or match["mlp"]
    block = "self_attn" if match["attention"] else model.names.block(match["kind"], expert)
    if block is None:
        raise UnsupportedCheckpoint(f"`{name}` cannot be read: transformers' model has no such modules", hint=EXPORT)
    if match["kind"] and match["kind"] == model.names.unloadable:
        raise UnsupportedCheckpoint(
            f"`{name}` cannot be read: PEFT does not load LoRA on these experts of such a model",
            hint=f"merge it with Megatron-Bridge, or train again without LoRA on {match['kind']}",
        )
    gate, up, down = model.names.inner
    called = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "gate": gate, "up": up}
    part = match["part"]
    if linear not in _PARTS:
        yield f"{block}.{'o_proj' if linear == 'proj' else down}", whole
    elif part is not None:  # canonical LoRA: each projection has factors of its own
        _require_part(name, part, linear, rows, model, fused=fused)
        yield f"{block}.{called[part]}", whole
    elif linear == "qkv":
        geometry = model.geometry
        if fused and rows != geometry.qkv_rows:
            gated = ", with a gate," if geometry.gated else ""
            needed = f"{geometry.heads} heads{gated} in {geometry.groups} groups need {geometry.qkv_rows}"
            text = f"`{name}` has {rows} rows, but {needed}"
            raise UnsupportedCheckpoint(text, hint=GIVE)
        for key in _PARTS[linear]:
            yield f"{block}.{called[key]}", geometry.rows(key) if fused else whole
    else:
        halves = cuts if match["swift"] else 1
        half, left = divmod(rows, 2 * halves)
        if fused and left:
            raise UnsupportedCheckpoint(f"`{name}` has {rows} rows, which are not those of a gate and an up projection")
        for at, key in enumerate(_PARTS[linear]):
            runs = tuple(((2 * cut + at) * half, half) for cut in range(halves))
            yield f"{block}.{called[key]}", runs if fused else whole


def _require_part(name: str, part: str, linear: str, rows: int, model: MegatronModel, *, fused: bool) -> None:
    """Raise `UnsupportedCheckpoint` unless a projection with factors of its own is one of the module, with its rows."""
    if part not in _PARTS[linear]:
        raise UnsupportedCheckpoint(f"`{name}`: `linear_{linear}` has no part `{part}`")
    if fused and linear == "qkv" and rows != model.geometry.count(part):
        text = f"`{name}` has {rows} rows, but the projection of the model has {model.geometry.count(part)}"
        raise UnsupportedCheckpoint(text, hint=GIVE)
