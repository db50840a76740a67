"""The model that a Megatron run trained: how Megatron fuses its modules, and what transformers calls them.

Megatron-Bridge writes the geometry into `run_config.yaml`; which model of transformers it is stands in that model's own
config.json, beside the run or where a file of the run names it, or in the name of an older provider class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from lora_tool.checkpoints.sources import resolve
from lora_tool.core.errors import CheckpointError, UnsupportedCheckpoint
from lora_tool.formats import model_config
from lora_tool.formats.files import is_file, read_object
from lora_tool.formats.lora_recipes import RUN_CONFIG, read_yaml, recipes_in
from lora_tool.models.model_tensors import has_tensors

Rows = tuple[tuple[int, int], ...]
"""First row and number of rows of each run of them, in order."""

EXPORT = "export the adapter with Megatron-Bridge: AutoBridge.export_adapter_ckpt"
GIVE = "put the run_config.yaml of the run beside its files, or the config.json of its model"
_GIVE_CONFIG = f"put the config.json of the model beside {RUN_CONFIG}"
_LONGEST = 200
_MOST = 1 << 20
"""More than any size of a real model that is counted here."""
MOST_MATRICES = 1 << 18
"""More than the layers of a real model have experts together."""


class Geometry(Struct, frozen=True, kw_only=True):
    """What of a model decides where the rows of its `linear_qkv` belong."""

    heads: int
    groups: int
    head_dim: int
    gated: bool = False
    """Whether the attention has an output gate: transformers has its rows in q_proj, behind those of each head."""

    def rows(self, part: str) -> Rows:
        """Return the rows of a `linear_qkv` that are those of the queries "q", the keys "k" or the values "v".

        A group has its queries, the gates of them all, its key and its value.
        """
        each, size = self.heads // self.groups, self.head_dim
        queries = each * (2 if self.gated else 1)
        group = queries + 2
        starts = range(0, self.groups * group, group)
        match part:
            case "q" if self.gated:
                return tuple(
                    ((at + head + half) * size, size) for at in starts for head in range(each) for half in (0, each)
                )
            case "q":
                return tuple((at * size, each * size) for at in starts)
            case _:
                return tuple(((at + queries + (part == "v")) * size, size) for at in starts)

    def count(self, part: str) -> int:
        """Return how many rows are the part's."""
        return sum(count for _, count in self.rows(part))

    @property
    def qkv_rows(self) -> int:
        """How many rows a `linear_qkv` has."""
        return sum(map(self.count, "qkv"))


class LayerNames(Struct, frozen=True, kw_only=True):
    """What transformers calls the linear modules of a layer."""

    gated: bool = False
    experts: str | None = None
    shared: str | None = None
    inner: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    unloadable: str | None = None
    """The experts, by Megatron's word, whose LoRA PEFT 0.21 cannot load: it takes all of one name as routed, or none."""

    def block(self, kind: str | None, expert: int | None) -> str | None:
        """Return the path of an MLP: the only one, the shared experts' or that of an `expert`; None for one it lacks."""
        if kind is None:
            return None if self.experts else "mlp"
        return self.shared if kind == "shared_experts" else self.experts and f"{self.experts}.{expert}"


_EXPERTS, _SHARED = "mlp.experts", "mlp.shared_expert"
_OTHERS: Mapping[str, LayerNames] = {
    "mixtral": LayerNames(experts="block_sparse_moe.experts", inner=("w1", "w3", "w2")),
    "olmoe": LayerNames(experts=_EXPERTS),
    "qwen2_moe": LayerNames(experts=_EXPERTS, shared=_SHARED, unloadable="experts"),
    "qwen3_moe": LayerNames(experts=_EXPERTS),
    "qwen3_next": LayerNames(gated=True, experts=_EXPERTS, shared=_SHARED, unloadable="shared_experts"),
    "qwen3_5_text": LayerNames(gated=True),
}
"""Model type → what its modules are called where that is not what Llama calls them."""
_LIKE_LLAMA = tuple(
    f"@layers.*.{module}.weight"
    for module in (
        *(f"self_attn.{part}_proj" for part in "qkvo"),
        *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    )
)
_PROVIDERS = (
    (re.compile(r"Qwen3MoE\w*Provider", re.IGNORECASE), "qwen3_moe"),
    (re.compile(r"Qwen3Next\w*Provider", re.IGNORECASE), "qwen3_next"),
    (re.compile(r"Mixtral\w*Provider", re.IGNORECASE), "mixtral"),
    (re.compile(r"OlMoE\w*Provider", re.IGNORECASE), "olmoe"),
    (
        re.compile(
            r"(?:Llama(?!4)|CodeLlama|Mistral|Qwen25|Qwen2|Qwen3(?!5))(?!\w*(?:MoE|VL|Next|Omni|Audio|Nemotron))\w*Provider\w*\Z",
            re.IGNORECASE,
        ),
        "llama",
    ),
)
"""Classes of older providers of Megatron-Bridge, each of models of one type, or called as that type's are."""


class MegatronModel(Struct, frozen=True, kw_only=True):
    """The model that was trained."""

    geometry: Geometry
    names: LayerNames
    layers: int
    """How many it has, 0 where no file says it."""
    experts: int
    """How many a layer has, 0 where no file says it."""

    def linear_modules(self) -> Iterator[str]:
        """Yield the paths of the linear modules that its layers may have; nothing where their number is not known."""
        experts = self.experts if self.names.experts else 0
        if self.layers * max(1, experts) > MOST_MATRICES:
            return iter(())
        attention = (f"self_attn.{part}_proj" for part in "qkvo")
        blocks = [
            self.names.block(None, None),
            self.names.shared,
            *(self.names.block("experts", number) for number in range(experts)),
        ]
        inside = (*attention, *(f"{block}.{name}" for block in blocks if block for name in self.names.inner))
        return (f"model.layers.{layer}.{module}" for layer in range(self.layers) for module in inside)


def model_of(near: tuple[Path, ...], folder: Path) -> MegatronModel:
    """Return the model of the run whose files lie in the folders `near`; `folder` has its pieces.

    Raises `UnsupportedCheckpoint` where no file tells how modules are fused or what transformers calls them, and for
    fusions that are not known; `CorruptFile` for a file that cannot be read.
    """
    path = next((place / RUN_CONFIG for place in near if is_file(place / RUN_CONFIG)), None)
    section = None if path is None else _section(path)
    config = _config(near)
    if section is None and config is None:
        message = (
            f"{folder} is a checkpoint of Megatron without {RUN_CONFIG}, which says how rows of its modules are fused"
        )
        raise UnsupportedCheckpoint(message, hint=GIVE)
    names = _names(section, config, path)
    table = _agreed(section or {}, _in_megatrons_words(config or {}), path)
    return MegatronModel(
        geometry=_geometry(table, names, path or folder),
        names=names,
        layers=_count(table, "num_layers"),
        experts=_count(table, "num_moe_experts"),
    )


def _section(path: Path) -> Mapping[str, Any]:
    """Return what `run_config.yaml` says of the model; newer ones have most of it in an inner section."""
    model = read_yaml(path).get("model")
    if not isinstance(model, Mapping):
        raise UnsupportedCheckpoint(f"{path} has no section `model`, which says how rows are fused", hint=GIVE)
    inner = model.get("transformer")
    return {**inner, **model} if isinstance(inner, Mapping) else model


def _config(near: tuple[Path, ...]) -> Mapping[str, Any] | None:
    """Return the model's config.json: near the run, or of the model that a file of the run names, on this disk."""
    for place in near:
        if is_file(place / model_config.FILE_NAME):
            return read_object(place / model_config.FILE_NAME)
    recipes = (recipe for place in near for recipe in recipes_in(place))
    for name in (recipe.fields.get("base_model_name_or_path") for recipe in recipes):
        if name:
            try:
                root = resolve(str(name), near=near[0]).path
            except CheckpointError:
                continue
            if is_file(root / model_config.FILE_NAME):
                return read_object(root / model_config.FILE_NAME)
    return None


def _names(section: Mapping[str, Any] | None, config: Mapping[str, Any] | None, path: Path | None) -> LayerNames:
    target = str((section or {}).get("_target_") or "")[:_LONGEST]
    of_class = next((kind for pattern, kind in _PROVIDERS if pattern.match(target.rpartition(".")[2])), None)
    kind = of_class if config is None else str(config.get("model_type"))[:_LONGEST]
    if kind is None:
        text = f"{path}: `model._target_` is {target or 'absent'}, for which lora-tool does not know transformers' module names"
        raise UnsupportedCheckpoint(text, hint=_GIVE_CONFIG)
    if kind in _OTHERS:
        return _OTHERS[kind]
    if has_tensors(kind, _LIKE_LLAMA):
        return LayerNames()
    text = f"the model is a {kind}, for which lora-tool does not know which of transformers' modules are Megatron's"
    raise UnsupportedCheckpoint(text, hint=EXPORT)


def _in_megatrons_words(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the model's config.json says as Megatron's config would."""
    words = {
        "num_attention_heads": ("num_attention_heads",),
        "hidden_size": ("hidden_size",),
        "num_query_groups": ("num_key_value_heads",),
        "kv_channels": ("head_dim",),
        "num_layers": ("num_hidden_layers",),
        "num_moe_experts": ("num_experts", "num_local_experts"),
    }
    return {name: next(filter(None, map(config.get, theirs)), None) for name, theirs in words.items()}


def _agreed(section: Mapping[str, Any], config: Mapping[str, Any], path: Path | None) -> Mapping[str, Any]:
    """Return what the run's file and the model's config.json say together."""
    for name, value in config.items():
        if value and section.get(name) and section[name] != value:
            text = f"{path}: `model.{name}` is {section[name]}, the config.json of the model says {value}"
            raise UnsupportedCheckpoint(text, hint="put the config.json of this run's model beside it")
    return {**config, **{name: value for name, value in section.items() if value is not None}}


def _geometry(table: Mapping[str, Any], names: LayerNames, path: Path) -> Geometry:
    for name, wanted in (("attention_output_gate", names.gated), ("gated_linear_unit", True)):
        if bool(table.get(name, wanted)) is not wanted:
            text = f"{path}: `model.{name}` is {str(not wanted).lower()}: lora-tool does not read rows that are fused that way"
            raise UnsupportedCheckpoint(text, hint=EXPORT)
    heads, hidden = _count(table, "num_attention_heads"), _count(table, "hidden_size")
    groups = _count(table, "num_query_groups") or heads
    size = _count(table, "kv_channels") or (hidden // heads if heads else 0)
    if not heads or not groups or not size or heads % groups or heads > MOST_MATRICES:
        text = f"{path}: heads {heads}, query groups {groups} and kv_channels {size} do not describe attention"
        raise UnsupportedCheckpoint(text, hint=GIVE)
    return Geometry(heads=heads, groups=groups, head_dim=size, gated=names.gated)


def _count(table: Mapping[str, Any], name: str) -> int:
    """Return a positive number of the config, 0 where it has none."""
    value = table.get(name)
    return value if type(value) is int and 0 < value < _MOST else 0
