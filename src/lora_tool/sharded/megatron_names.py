"""The LoRA of Megatron's modules under the names and in the rows that transformers' modules have.

Megatron fuses what transformers keeps apart. A `linear_qkv` has its rows by query group, the queries of the group, then
its key, then its value (Megatron-Bridge, `models/conversion/param_mapping.py::split_qkv_weights`); a gated `linear_fc1`
has the gate's rows, then those of the up projection, as mcore's `apply_swiglu_sharded_factory` saves it. One A serves
all projections of a fused module. Alike layers are one tensor with the layer as first dimension.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lora_tool.errors import UnsupportedCheckpoint
from lora_tool.keys import PREFIX

Rows = tuple[tuple[int, int], ...]
"""First row and number of rows of each run of them, in order."""

_ADAPTER = re.compile(r"(?!.*\boptimizer\.).*\.adapter\.", re.DOTALL)
"""Every tensor of an adapter, the optimizer's states of it aside."""
_FACTOR = re.compile(_ADAPTER.pattern + r"(?:.*\.)?linear_(?:in|out)\.weight\Z", re.DOTALL)
_KNOWN = re.compile(
    r"(?:.*\.)?decoder\.layers\.(?:(?P<layer>\d{1,5})\.)?(?P<module>self_attention\.linear_(?:qkv|proj)|mlp\.linear_fc[12])"
    r"\.adapter\.(?:adapter_(?P<part>q|k|v|gate|up)\.)?linear_(?P<side>in|out)\.weight\Z"
)
_WHOLE = {"self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj"}
_PARTS = {
    "self_attention.linear_qkv": ("self_attn", {"q": "q_proj", "k": "k_proj", "v": "v_proj"}),
    "mlp.linear_fc1": ("mlp", {"gate": "gate_proj", "up": "up_proj"}),
}
_LIKE_LLAMA = re.compile(
    r"(?:Llama(?!4)|CodeLlama|Mistral|Qwen25|Qwen2|Qwen3(?!5))(?!\w*(?:MoE|VL|Next|Omni))[A-Z]?[A-Za-z0-9]*Provider\w*\Z",
    re.IGNORECASE,
)
"""Providers of models that transformers calls as it calls Llama's."""
_LONGEST = 200
GIVE = "put the run_config.yaml of the run beside its files"


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What of a model decides where the rows of its fused modules belong."""

    heads: int
    groups: int
    head_dim: int

    def rows(self, part: str) -> Rows:
        """Return the rows of a `linear_qkv` that are those of the queries "q", the keys "k" or the values "v"."""
        each = self.heads // self.groups
        first, count = {"q": (0, each), "k": (each, 1), "v": (each + 1, 1)}[part]
        size, group = self.head_dim, (each + 2) * self.head_dim
        return tuple((number * group + first * size, count * size) for number in range(self.groups))

    @property
    def qkv_rows(self) -> int:
        """How many rows a `linear_qkv` has."""
        return (self.heads + 2 * self.groups) * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor of the adapter is: in which of Megatron's, in which layer of a stack, and in which rows."""

    source: str
    layer: int | None
    rows: Rows | None
    """None for all."""
    shape: tuple[int, int]


def is_megatron(names: Mapping[str, Any]) -> bool:
    """Return whether some of the names are those of LoRA on Megatron's modules."""
    return any(map(_FACTOR.match, names))


def geometry_of(config: Mapping[str, Any], path: object) -> Geometry:
    """Return the geometry that `run_config.yaml` gives the model. Raises `UnsupportedCheckpoint` for other models."""
    model = config.get("model")
    if not isinstance(model, dict):
        raise UnsupportedCheckpoint(f"{path} has no section `model`, which says how rows are fused", hint=GIVE)
    target = str(model.get("_target_") or "")[:_LONGEST]
    if not _LIKE_LLAMA.match(target.rpartition(".")[2]):
        raise UnsupportedCheckpoint(
            f"{path}: `model._target_` is {target or 'absent'}, for which lora-tool does not know transformers' module names",
            hint="export the adapter with Megatron-Bridge: AutoBridge.export_adapter_ckpt",
        )
    for name, wanted in (("attention_output_gate", False), ("gated_linear_unit", True)):
        if bool(model.get(name, wanted)) is not wanted:
            text = f"{path}: `model.{name}` is {str(not wanted).lower()}: lora-tool does not read rows that are fused that way"
            raise UnsupportedCheckpoint(
                text, hint="export the adapter with Megatron-Bridge: AutoBridge.export_adapter_ckpt"
            )
    heads, hidden = _count(model, "num_attention_heads"), _count(model, "hidden_size")
    groups = _count(model, "num_query_groups") or heads
    size = _count(model, "kv_channels") or (hidden // heads if heads else 0)
    if not heads or not groups or not size or heads % groups:
        text = f"{path}: heads {heads}, query groups {groups} and kv_channels {size} do not describe attention"
        raise UnsupportedCheckpoint(text, hint=GIVE)
    return Geometry(heads=heads, groups=groups, head_dim=size)


def _count(model: Mapping[str, Any], name: str) -> int:
    """Return a positive number of the config, 0 where it has none."""
    value = model.get(name)
    return value if type(value) is int and value > 0 else 0


def places(shapes: Mapping[str, tuple[int, ...]], geometry: Geometry) -> dict[str, Place]:
    """Return PEFT's name → place of every LoRA tensor among `shapes`, which are by Megatron's names.

    Raises `UnsupportedCheckpoint` for LoRA on modules that are not known, and shapes that are not the geometry's.
    """
    found: dict[str, Place] = {}
    for name, shape in shapes.items():
        if _ADAPTER.match(name):
            for new, place in _places(name, shape, geometry):
                if new in found:
                    raise UnsupportedCheckpoint(
                        f"`{name}` and `{found[new].source}` would be one tensor of the adapter"
                    )
                found[new] = place
    return found


def _places(name: str, shape: tuple[int, ...], geometry: Geometry) -> Iterator[tuple[str, Place]]:
    match = _KNOWN.match(name)
    if match is None:
        raise UnsupportedCheckpoint(
            f"`{name}` cannot be read: lora-tool reads no LoRA on experts, routers, Mamba's in_proj and embeddings, and no DoRA",
            hint="export the adapter with Megatron-Bridge: AutoBridge.export_adapter_ckpt",
        )
    stacked = match["layer"] is None
    dims = shape[1:] if stacked else shape
    if len(dims) != len(("rows", "columns")):
        raise UnsupportedCheckpoint(f"`{name}` has the shape {list(shape)}: expected a matrix for each layer")
    rows, columns = dims
    side = "lora_A" if match["side"] == "in" else "lora_B"
    for layer in range(shape[0]) if stacked else (None,):
        number = match["layer"] if layer is None else layer
        for path, taken in _projections(name, match["module"], match["part"], rows, geometry, fused=side == "lora_B"):
            count = rows if taken is None else sum(size for _, size in taken)
            place = Place(source=name, layer=layer, rows=taken, shape=(count, columns))
            yield f"{PREFIX}model.layers.{number}.{path}.{side}.weight", place


def _projections(
    name: str, module: str, part: str | None, rows: int, geometry: Geometry, *, fused: bool
) -> Iterator[tuple[str, Rows | None]]:
    """Yield transformers' modules that one of Megatron's is, each with its rows of a B; A is of all of them."""
    if module in _WHOLE:
        yield _WHOLE[module], None
        return
    block, names = _PARTS[module]
    if part is not None:  # canonical LoRA: each projection has factors of its own
        if part not in names:
            raise UnsupportedCheckpoint(f"`{name}`: `{module}` has no part `{part}`")
        yield f"{block}.{names[part]}", None
        return
    if fused and module.endswith("qkv") and rows != geometry.qkv_rows:
        text = (
            f"`{name}` has {rows} rows, but {geometry.heads} heads in {geometry.groups} groups need {geometry.qkv_rows}"
        )
        raise UnsupportedCheckpoint(text, hint=GIVE)
    if fused and module.endswith("fc1") and rows % len(names):
        raise UnsupportedCheckpoint(f"`{name}` has {rows} rows, which are not those of a gate and an up projection")
    for at, (key, projection) in enumerate(names.items()):
        half = rows // len(names)
        own = geometry.rows(key) if module.endswith("qkv") else ((at * half, half),)
        yield f"{block}.{projection}", own if fused else None
