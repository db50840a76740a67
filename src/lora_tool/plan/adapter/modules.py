"""An adapter's tensors, grouped by the module that they belong to, every one accounted for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from lora_tool.adapter.support import ALLOW_IN_MEMORY
from lora_tool.checkpoint import AdapterDir
from lora_tool.errors import OnlyInMemory, UnsupportedAdapter
from lora_tool.formats.adapter_config import INITS_RECOMPUTED, AdapterConfig, ExpertLayout
from lora_tool.formats.stored import same_values
from lora_tool.keys import AdapterKey, Part
from lora_tool.names.model import ModelFacts
from lora_tool.plan.adapter.target_parameters import parameter_term, targeted_parameters
from lora_tool.plan.core.terms import BiasTerm, LoraTerm
from lora_tool.tensors import StoredTensor, TensorTable


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterModules:
    """What an adapter does, by module path (LoRA) and by the model's own tensor name (whole tensors)."""

    lora: Mapping[str, tuple[LoraTerm, ...]]
    """One term of each adapter that has LoRA on the module."""
    lora_bias: Mapping[str, tuple[BiasTerm, ...]]
    magnitudes: Mapping[str, StoredTensor]
    """DoRA's magnitude vectors, by module path."""
    saved: Mapping[str, StoredTensor]
    """Tensors that replace the base's, or are added to it: `modules_to_save`, the head."""
    frozen_base: Mapping[str, StoredTensor]
    """`X.base_layer.weight`: the frozen tensor under the LoRA of X, where the adapter carries it."""
    embeddings: frozenset[str]
    """Modules whose LoRA is an embedding's: A is [r, rows], B is [columns, r]."""
    tokens: Mapping[str, StoredTensor]
    """Rows trained by themselves, by module path."""
    parameters: Mapping[str, tuple[LoraTerm, ...]] = field(default_factory=dict)
    """LoRA on bare parameters, by their names."""
    dropped: Mapping[str, str] = field(default_factory=dict)
    """Adapter tensor → why it takes no part: frozen originals that PEFT, too, leaves aside, and repeats."""

    def without(self, tensors: Collection[StoredTensor]) -> AdapterModules:
        """Return the same without these whole tensors."""

        def kept(table: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
            return {name: tensor for name, tensor in table.items() if tensor not in tensors}

        return replace(self, saved=kept(self.saved), frozen_base=kept(self.frozen_base), tokens=kept(self.tokens))


_LAYER_PARTS = frozenset({Part.LORA_A, Part.LORA_B, Part.EMBEDDING_A, Part.EMBEDDING_B, Part.MAGNITUDE})
_EMBEDDINGS = ("embed_tokens", "lm_head")
"""What PEFT takes for embeddings by their names alone (`EMBEDDING_LAYER_NAMES`)."""


def adapter_modules(
    adapter: AdapterDir,
    config: AdapterConfig,
    *,
    base: TensorTable,
    facts: ModelFacts | None = None,
    expert_layout: ExpertLayout | None = None,
    ends: frozenset[str] = frozenset(),
) -> AdapterModules:
    """Return the adapter's tensors by what they do.

    `facts` tell which parameter a LoRA on bare parameters belongs to; `expert_layout` is what the user says of a fused
    lora_B. `ends` are the base's tensors with a row per token, which PEFT saves by itself after the vocabulary was
    resized, and loads over the base's; `base` are all of its tensors, some of which an adapter may repeat. Every tensor
    is in the result once. Rules judged the adapter before. Raises `UnsupportedAdapter` for a tensor that the config does
    not explain and for parts that are not merged here.
    """
    parts = _by_part(adapter, config, ends, base)
    layers = parts.layers
    wrapped = targeted_parameters(config, facts) if facts else {}
    parameters = {
        name: (parameter_term(adapter, config, name, facts, layers.pop(module, {}), expert_layout),)
        for module, name in wrapped.items()
        if facts
    }
    return AdapterModules(
        lora={module: (_lora_term(adapter, config, module, held),) for module, held in layers.items()},
        lora_bias={
            module: (BiasTerm(bias=held[Part.LORA_B, "bias"], scaling=config.scaling(module)),)
            for module, held in layers.items()
            if (Part.LORA_B, "bias") in held
        },
        magnitudes={
            module: tensor
            for module, held in layers.items()
            for (part, _), tensor in held.items()
            if part is Part.MAGNITUDE
        },
        saved=parts.saved,
        frozen_base=parts.frozen,
        embeddings=frozenset(module for module, held in layers.items() if (Part.EMBEDDING_A, None) in held),
        tokens=parts.tokens,
        parameters=parameters,
        dropped=parts.dropped,
    )


@dataclass(slots=True)
class _ByPart:
    """An adapter's tensors while they are sorted: by module what belongs to a LoRA layer, by name what is whole."""

    layers: dict[str, dict[tuple[Part, str | None], StoredTensor]] = field(default_factory=lambda: defaultdict(dict))
    saved: dict[str, StoredTensor] = field(default_factory=dict)
    frozen: dict[str, StoredTensor] = field(default_factory=dict)
    tokens: dict[str, StoredTensor] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)


def _by_part(adapter: AdapterDir, config: AdapterConfig, ends: frozenset[str], base: TensorTable) -> _ByPart:
    found = _ByPart()
    copies: list[AdapterKey] = []
    for name, key in adapter.keys.items():
        tensor = adapter.tensors[name]
        if key.part in _LAYER_PARTS:
            found.dropped |= _in_layer(adapter, key, tensor, found.layers[key.module])
        elif key.part is Part.PLAIN and _repeats(key, tensor, base, config, ends):
            found.dropped[name] = "the base's own, which is there already"
        elif key.part is Part.PLAIN:
            found.saved[_plain(adapter, config, key, ends, base)] = tensor
        elif key.part is Part.BASE_LAYER:
            trained = key.leaf == "bias" and config.bias in ("all", "lora_only")
            (found.saved if trained else found.frozen)[f"{key.module}.{key.leaf}"] = tensor
        elif key.part is Part.TOKENS_DELTA:
            found.tokens[key.module] = tensor
        elif key.part is Part.TOKENS_BASE:
            found.frozen[f"{key.module}.{key.leaf}"] = tensor
        elif key.part is Part.SAVED_MODULE:
            copies.append(key)
        else:
            found.dropped[name] = "the frozen original of a saved module; PEFT does not load it either"
    found.dropped |= _without_copies(adapter, config, copies, found.saved)
    return found


def _in_layer(
    adapter: AdapterDir, key: AdapterKey, tensor: StoredTensor, layer: dict[tuple[Part, str | None], StoredTensor]
) -> dict[str, str]:
    """Put the tensor into its layer; return it as dropped where it is there already.

    DoRA's magnitude is a module in memory, and PEFT saves an embedding's under both names.
    """
    at = (key.part, None if key.part is Part.MAGNITUDE else key.leaf)
    first = layer.setdefault(at, tensor)
    if first is tensor:
        return {}
    if key.part is not Part.MAGNITUDE or not same_values(first, tensor):
        raise _refuse(adapter, key.text, f"is there twice: another name for `{key.canonical}` is in the file too")
    return {key.text: f"a copy of {first.name}, which is in the file too"}


def _without_copies(
    adapter: AdapterDir, config: AdapterConfig, copies: Collection[AdapterKey], saved: dict[str, StoredTensor]
) -> dict[str, str]:
    """Put saved modules under their model's names into `saved`; return those dropped, because they are there already.

    PEFT loads the plain name, and writes both after a vocabulary was resized. Raises `UnsupportedAdapter` where the
    two differ.
    """
    dropped = {}
    for key in copies:
        copy = adapter.tensors[key.text]
        tensor = saved.setdefault(_plain(adapter, config, key, frozenset(), {}), copy)
        if tensor is copy:
            continue
        if not same_values(copy, tensor):
            raise _refuse(adapter, copy.name, f"has other values than `{tensor.name}`, and both are the same module's")
        dropped[key.text] = f"a copy of {key.tensor}, which is in the file too"
    return dropped


def _plain(adapter: AdapterDir, config: AdapterConfig, key: AdapterKey, ends: frozenset[str], base: TensorTable) -> str:
    if not _is_explained(config, key, ends):
        then = "PEFT would load it over the base's" if key.tensor in base else "PEFT would drop it"
        raise UnsupportedAdapter(
            f"{adapter.tensors[key.text].path}: `{key.text}`: belongs to no target and to none of `modules_to_save`; "
            f"{then}",
            hint=f'if it was trained, put it into adapter_config.json: "modules_to_save": ["{key.module}"]',
        )
    return key.tensor


def _is_explained(config: AdapterConfig, key: AdapterKey, ends: frozenset[str]) -> bool:
    trained_bias = key.leaf == "bias" and (
        config.bias == "all" or (config.bias == "lora_only" and config.targets(key.module))
    )
    resized = key.tensor in ends or (key.leaf == "weight" and key.module.endswith(_EMBEDDINGS))
    return trained_bias or resized or config.saves(key.module) or config.saves(key.tensor)


def _repeats(
    key: AdapterKey, tensor: StoredTensor, base: TensorTable, config: AdapterConfig, ends: frozenset[str]
) -> bool:
    """Return whether an unexplained tensor is the base's: PEFT saves whatever the first layer holds with embeddings."""
    held = base.get(key.tensor) or base.get(key.tensor.replace(".base_layer.", "."))
    return held is not None and not _is_explained(config, key, ends) and same_values(held, tensor)


def _lora_term(
    adapter: AdapterDir,
    config: AdapterConfig,
    module: str,
    parts: Mapping[tuple[Part, str | None], StoredTensor],
) -> LoraTerm:
    a = parts.get((Part.LORA_A, "weight"), parts.get((Part.EMBEDDING_A, None)))
    b = parts.get((Part.LORA_B, "weight"), parts.get((Part.EMBEDDING_B, None)))
    if a is None or b is None:
        have, lack = ("lora_A", "lora_B") if b is None else ("lora_B", "lora_A")
        present = next(iter(parts.values()))
        raise _refuse(adapter, present.name, f"has a {have}, but its {lack} is missing")
    _require_shapes(adapter, config, module, a, b, is_embedding=(Part.EMBEDDING_A, None) in parts)
    return LoraTerm(a=a, b=b, scaling=config.scaling(module))


def _require_shapes(
    adapter: AdapterDir, config: AdapterConfig, module: str, a: StoredTensor, b: StoredTensor, *, is_embedding: bool
) -> None:
    if len(a.shape) != 2 or len(b.shape) != 2:  # noqa: PLR2004 - matrices
        odd = a if len(a.shape) != 2 else b  # noqa: PLR2004
        message = f"{odd.path}: `{odd.name}`: has shape {list(odd.shape)}: LoRA on convolutions is not merged here"
        raise OnlyInMemory(message, hint=ALLOW_IN_MEMORY)
    rank = config.rank(module)
    if config.init_lora_weights in INITS_RECOMPUTED and not is_embedding:
        # factors of a matrix, which has no more than its smaller side
        rank = min(rank, a.shape[1], b.shape[0])
    if a.shape[0] != rank or b.shape[1] != rank:
        shapes = f"lora_A {list(a.shape)} and lora_B {list(b.shape)}"
        raise _refuse(adapter, a.name, f"{shapes} do not have the rank {rank} that the config gives this module")


def _refuse(adapter: AdapterDir, name: str, message: str) -> UnsupportedAdapter:
    return UnsupportedAdapter(
        f"{adapter.tensors[name].path}: `{name}`: {message}", hint=f"lora-tool validate {adapter.root}"
    )
