"""What the layers of a model say of one another, for model types of which no table knows the tensors.

A stack is a list of layers, as ``model.layers``. A layer of another kind (of experts, of another attention) differs
from its neighbours in much; one that a tensor was lost from, or cut in, differs from them in that alone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from lora_tool.formats.model_config import ModelConfig
from lora_tool.models.ends import is_end
from lora_tool.models.model_tensors import lists_layers

_Shape = tuple[int, ...]
_Shapes = Mapping[str, _Shape]
OddTensor = tuple[str, _Shape, int]
"""A tensor's name, its shape in another layer, and that layer's number."""

_LAYER = re.compile(r"(?P<stack>(?:.*?\.)?(?:layers|layer|h|blocks|block))\.(?P<number>\d{1,6})\.(?P<rest>.+)")
_EXPERT = re.compile(r"(?P<stack>.*\.experts)\.(?P<number>\d{1,6})\.(?P<rest>.+)")
_OTHER_PARTS = re.compile(
    r"vision|visual|image|audio|speech|qformer|mtp|predictor|projector|_encoder|_decoder|_module|^mit\."
)
"""What a stack is called that has a length of its own: `mit` is X-CLIP's transformer over frames."""
_MTP = re.compile(r"(?:^|\.)mtp(?:_\w+)?\.")
_FURTHER_LAYERS = re.compile(r"num.*(?:nextn|mtp)|mtp.*num")
"""`num_nextn_predict_layers` (DeepSeek), `num_mtp_layers` (transformers 5), `mtp_num_hidden_layers` (Qwen3.5) and the like."""
_MOST_LOST = 4
"""A layer that lacks more than these of another's tensors is of another kind."""
_MOST_KINDS = 64
_IN_THE_FIRST_LAYER = "relative_attention_bias"
"""What T5 and its like have in their first layer alone."""
_NORM = re.compile(r"norm|(?:^|[._])ln(?:[._]|$)", re.IGNORECASE)
_TOGETHER = (
    (("q_proj", "k_proj", "v_proj"), {"q_proj", "k_proj", "v_proj"}),
    (("query", "key", "value"), {"query", "key", "value"}),
    (("gate_proj", "up_proj", "down_proj"), {"up_proj", "down_proj"}),
)
"""Projections of one module that come together, and those of them that are never absent where the others are."""
_UNGATED = frozenset({"timesfm"})
"""Model types whose MLP is not gated, although its first matrix is called `gate_proj`."""
_LENGTHS = {
    "decoder": ("decoder_layers", "num_decoder_layers"),
    "encoder": ("encoder_layers", "num_encoder_layers"),
    "blocks": ("num_blocks",),
}


def is_regular(config: ModelConfig) -> bool:
    """Return whether layers may be compared: their code is transformers' own, and the config lists none as special."""
    text = config.raw.get("text_config")
    listed = lists_layers(config.raw) or (isinstance(text, dict) and lists_layers(text))
    return not (config.custom_code or config.quantization or listed)


def stacks(tensors: _Shapes, of: re.Pattern[str] = _LAYER) -> dict[str, dict[int, dict[str, _Shape]]]:
    """Return the shapes of the tensors of each layer, by stack and number."""
    found: dict[str, dict[int, dict[str, _Shape]]] = {}
    for name, shape in tensors.items():
        match = of.fullmatch(name)
        if match and "lora_" not in name:
            found.setdefault(match["stack"], {}).setdefault(int(match["number"]), {})[match["rest"]] = shape
    return found


def length(config: ModelConfig, stack: str, layers: Mapping[int, _Shapes]) -> int | None:
    """Return how many layers the config gives a stack; None for one that is not the text model's."""
    deep = any(rest.count(".") > 1 for layer in layers.values() for rest in layer)
    return _length(config, stack) if deep else None


def is_beyond(config: ModelConfig, module: str) -> bool:
    """Return whether a module is in a layer beyond those of the config, which are for multi-token prediction."""
    match = _LAYER.match(f"{module}.")
    size = None if match is None else _length(config, match["stack"])
    return match is not None and size is not None and int(match["number"]) >= size


def of_further_tokens(config: ModelConfig, name: str) -> bool:
    """Return whether a tensor is of the layers for multi-token prediction that the config counts.

    They follow the model's own layers (DeepSeek, GLM) or have a name of their own (``mtp.``, ``model.mtp_layers.``). A
    config that has no field for their number, as Qwen3-Next's, counts all that are called so.
    """
    counts = [*_counts_of_further_layers(config.raw)]
    if _MTP.search(name):
        return not counts or max(counts) > 0
    layer, own = _LAYER.match(name), config.num_hidden_layers
    if layer is None or own is None or _OTHER_PARTS.search(layer["stack"]):
        return False
    return own <= int(layer["number"]) < own + max(counts, default=0)


def _counts_of_further_layers(fields: Mapping[str, Any]) -> Iterator[int]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _counts_of_further_layers(value)
        elif type(value) is int and _FURTHER_LAYERS.search(name):
            yield value


def _length(config: ModelConfig, stack: str) -> int | None:
    if _OTHER_PARTS.search(stack) or (stack == "blocks" and "vision_config" in config.raw):
        return None
    text: Any = config.raw.get("text_config", config.raw)
    for part, fields in _LENGTHS.items():
        if part in stack and isinstance(text, dict):
            own = [text[name] for name in fields if type(text.get(name)) is int]
            return own[0] if own else config.num_hidden_layers
    return config.num_hidden_layers


def odd_tensors(config: ModelConfig, tensors: _Shapes) -> Iterator[OddTensor]:
    """Yield the tensors that one layer lacks, or has in another shape than a layer that is otherwise like it.

    Layers beyond those of the config, as DeepSeek's and GLM's for multi-token prediction, have more than the others.
    """
    if any("lora_" in name or ".base_layer." in name for name in tensors):
        return  # an adapter that lies beside the weights is in some layers alone
    for stack, every in (*stacks(tensors).items(), *stacks(tensors, _EXPERT).items()):
        size = None if _EXPERT.match(f"{stack}.0.") else length(config, stack, every)
        layers = {number: layer for number, layer in every.items() if size is None or number < size}
        kinds: dict[frozenset[tuple[str, _Shape]], list[int]] = defaultdict(list)
        for number, layer in sorted(layers.items()):
            kinds[frozenset(layer.items())].append(number)
        alone = [numbers[0] for numbers in kinds.values() if len(numbers) == 1]
        for number in alone if len(kinds) <= _MOST_KINDS else ():
            others = sorted((numbers for numbers in kinds.values() if number not in numbers), key=len, reverse=True)
            for other in others:
                odd = _odd(layers[number], layers[other[0]], first=number == min(layers))
                if odd and (len(odd.keys() - layers[number].keys()) or len(other) > 1 or number > other[0]):
                    yield from ((f"{stack}.{number}.{rest}", shape, other[0]) for rest, shape in odd.items())
                    break


def _odd(layer: _Shapes, other: _Shapes, *, first: bool) -> _Shapes:
    """Return what `layer` lacks of `other`, or the one tensor that has another shape there; nothing where they differ
    in more. The first layer may be without a norm or a bias.
    """
    if not layer.keys() <= other.keys():
        return {}
    differ = {rest: shape for rest, shape in other.items() if layer.get(rest, shape) != shape}
    lost = {rest: shape for rest, shape in other.items() if rest not in layer}
    if any(_IN_THE_FIRST_LAYER in rest or (first and len(shape) == 1) for rest, shape in lost.items()):
        return {}
    if differ:
        return differ if len(differ) == 1 and not lost and not any(map(_is_convolution, differ)) else {}
    return lost if len(lost) <= _MOST_LOST else {}


def _is_convolution(rest: str) -> bool:
    """Return whether a tensor is a convolution's, by its name: the first and the last of a stack have other channels."""
    return "conv" in rest.rpartition(".")[0].rpartition(".")[2]


def lost_end(config: ModelConfig, tensors: _Shapes) -> str | None:
    """Return what says that a causal LM lacks its embeddings or its output layer; None where nothing does."""
    size = config.vocab_size
    if size is None or not "".join(config.architectures[:1]).endswith("ForCausalLM"):
        return None
    outside = [name for name in tensors if not _LAYER.fullmatch(name)]
    ends = [name for name in outside if len(tensors[name]) == 2 and tensors[name][0] >= size]  # noqa: PLR2004
    if not ends and not any(is_end(name.rpartition(".")[0]) for name in outside):
        return f"no matrix has a row for each of the {size:,} tokens: the embeddings are missing"
    if config.tie_word_embeddings is False and len(ends) == 1 and tensors[ends[0]][0] == size:
        only = f"`{ends[0]}` is the only matrix with a row per token"
        return f"{only}, and `tie_word_embeddings` is false: the input embedding or the output layer is missing"
    return None


def lost_everywhere(config: ModelConfig, tensors: _Shapes) -> Iterator[str]:
    """Yield what says that a tensor is lost of which no layer tells: the last norm of a causal LM, or a projection that
    every layer lacks beside those that go with it.
    """
    norms = [name for name in tensors if _NORM.search(name)]
    causal = "".join(config.architectures[:1]).endswith("ForCausalLM")
    if causal and norms and all(_LAYER.fullmatch(name) for name in norms):
        yield "every norm lies in a layer: the final norm after the layers is missing"
    for stack, layers in stacks(tensors).items():
        modules: dict[str, set[str]] = defaultdict(set)
        for module, _, leaf in (rest.rpartition(".")[0].rpartition(".") for layer in layers.values() for rest in layer):
            modules[module].add(leaf)
        for module, held in modules.items():
            for together, needed in _TOGETHER:
                if "gate_proj" in together and config.model_type in _UNGATED:
                    continue
                lost = [name for name in together if not any(leaf.startswith(name) for leaf in held)]
                whole = held.issuperset(set(together).difference(lost))  # `query_layernorm` is no `query`
                if whole and len(lost) == 1 and lost[0] in needed and ".experts." not in f".{module}.":
                    beside = " and ".join(f"`{name}`" for name in together if name not in lost)
                    yield f"no layer of `{stack}` has a `{lost[0]}` in its `{module}`, which has {beside}: the projection is missing"


# Layers that servers fuse into one, because they read the same input: all of them are quantised, or none is.


_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("query", "key", "value"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_qkvz", "in_proj_ba"),
)
EXPERTS = re.compile(r"(?P<experts>.*\.experts)\.")


def together(names: Collection[str], quantised: Iterable[str]) -> frozenset[str]:
    """Return `names` with all `quantised` weights that are fused with one of them, or are experts of the same layer."""
    sets = {key for name in names for key in fused_sets(name)}
    return frozenset(names) | {name for name in quantised if not sets.isdisjoint(fused_sets(name))}


def fused_sets(name: str) -> set[str]:
    """Return names for the sets that a weight is fused in."""
    experts = EXPERTS.match(name)
    if experts:
        return {experts["experts"]}
    module = name.removesuffix(".weight")
    above, _, leaf = module.rpartition(".")
    return {f"{above}.{' '.join(fused)}" for fused in _FUSED if leaf in fused}
