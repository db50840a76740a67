"""LT324: names in a model's config that transformers does not know, and missing fields that a name requires."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import TypeAlias

from lora_tool.core.choices import suggestion
from lora_tool.core.report import Severity
from lora_tool.formats.fields import shown
from lora_tool.models.model_tensors import prefixes_of
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import ModelSubject

ACTIVATIONS = frozenset(
    """
    gelu gelu_10 gelu_accurate gelu_fast gelu_new gelu_python gelu_python_tanh gelu_pytorch_tanh hardswish laplace
    leaky_relu linear mish prelu quick_gelu relu relu2 relu6 sigmoid silu sqrtsoftplus swish tanh xielu
    """.split()  # noqa: SIM905 - a table
)
"""Those of transformers' ACT2FN, the same for all models."""
ROPE_TYPES = frozenset("default dynamic linear llama3 longrope proportional yarn".split())  # noqa: SIM905
"""Those of transformers' ROPE_INIT_FUNCTIONS, and that of no scaling."""
ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
"""What transformers requires beside a type; it has defaults for the rest."""
ATTENTIONS = frozenset("eager flash_attention_2 flash_attention_3 flash_attention_4 flex_attention sdpa".split())  # noqa: SIM905
"""Those of transformers; `paged|` may stand before one, and `owner/name` is a kernel of the Hub."""
LAYERS: Mapping[str, frozenset[str]] = {
    "layer_types": frozenset(
        """
        attention chunked_attention compressed_sparse_attention conv deepseek_sparse_attention full_attention
        heavily_compressed_attention hybrid hybrid_sliding indexed_attention linear_attention mamba minimax_m3_sparse moe
        qwen_sparse_attention reference_sliding_attention sliding_attention window_attention
        """.split()  # noqa: SIM905 - a table
    ),
    "mlp_layer_types": frozenset({"dense", "sparse"}),
}
"""The kinds of layers that transformers knows, with the older names that it translates."""
OWN_ACTIVATION = frozenset({"gpt_oss", "inkling2_text", "minimax_m3_vl_text"})
"""Model types whose classes do not look their activation up."""
OWN_ROPES = frozenset(
    """
    blt cohere_compass_text gemma3_text gemma3n_text granitemoehybrid lfm3 olmo3 recurrent_gemma zamba2
    """.split()  # noqa: SIM905 - a table
)
"""Model types whose classes do not look the type of their one set of rope parameters up."""
OWN_LAYERS = frozenset({"deepseek_v4", "nemotron_h", "neomme", "resnet"})
"""Model types whose classes have kinds of layers of their own."""
_NOT_MODELS = frozenset({"quantization_config", "generation_config"})
"""Objects in a config that are the config of no model."""
_Table: TypeAlias = Mapping[str, object]
_DEEPEST = 8
_OF_SOME_MODELS = frozenset({"axial", "mrope", "su", "xdrope"})
"""Types that the configs of some models have of their own, or translate."""
_NUMBERS = frozenset({"factor", "low_freq_factor", "high_freq_factor", "rope_theta"})


@rule("LT324", Severity.ERROR, on=ModelSubject, needs=frozenset({Need.CONFIG}))
def unknown_function(subject: ModelSubject) -> Iterator[Fault]:
    """The config names something that transformers does not have.

    What it does: Looks up, in `config.json` and in the configs in it (`text_config`), `hidden_act` (`hidden_activation`,
    `activation_function`), the `rope_type` of `rope_parameters` or `rope_scaling`, the entries of `layer_types` and
    `attn_implementation` among the names of transformers 5, and what a rope type requires.
    Why it matters: transformers does not load the model, some faults with a bare `KeyError: 'swilu'`.
    Example: `"hidden_act": "swilu"`; `"rope_type": "linear"` without `factor`.
    What to do: Copy the field from the `config.json` of the model that this one was trained from.
    """
    config = subject.checkpoint.config
    if config is None or config.custom_code:
        return
    for context, table in _configs("", config.raw, _DEEPEST):
        model_type = table.get("model_type")
        model_type = model_type if isinstance(model_type, str) else ""
        faults = (_activations(table, model_type), _ropes(table, model_type), _layers(table, model_type))
        for name, message in (*chain(*faults), *(() if context else _of_the_outermost(table))):
            yield Fault(subject=f"{context}{name}", message=message, path=config.path)


def _configs(context: str, table: _Table, deepest: int) -> Iterator[tuple[str, _Table]]:
    """Yield the config and those inside it, each with what stands before its fields."""
    yield context, table
    for name, inner in table.items() if deepest else ():
        if name.endswith("_config") and name not in _NOT_MODELS and isinstance(inner, Mapping):
            yield from _configs(f"{context}{name}.", inner, deepest - 1)


def _no_such(value: str, known: Iterable[str]) -> str:
    return f"transformers has no {shown(value)}. {suggestion(value, sorted(known))}".rstrip()


def _activations(table: _Table, model_type: str) -> Iterator[tuple[str, str]]:
    """Yield the activations that transformers does not have."""
    for name in ("hidden_act", "hidden_activation", "activation_function") if model_type not in OWN_ACTIVATION else ():
        value = table.get(name)
        if isinstance(value, str) and value not in ACTIVATIONS | _OF_SOME_MODELS:
            yield name, _no_such(value, ACTIVATIONS)


def _ropes(table: _Table, model_type: str) -> Iterator[tuple[str, str]]:
    """Yield the faults of each set of rope parameters, also those of kinds of layers."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = table.get(name)
        if not isinstance(rope, Mapping):
            continue
        if model_type not in OWN_ROPES:
            yield from _rope_faults(f"{name}.", rope)
        for kind, inner in rope.items():
            if isinstance(inner, Mapping):
                yield from _rope_faults(f"{name}.{kind}.", inner)


def _rope_faults(name: str, rope: _Table) -> Iterator[tuple[str, str]]:
    """Yield an unknown type, the fields that the type requires and that are missing, and those that are not numbers."""
    found = rope.get("rope_type", rope.get("type", "default"))
    kind = found if isinstance(found, str) else "default"
    if kind not in ROPE_TYPES | _OF_SOME_MODELS:
        yield f"{name}{'rope_type' if 'rope_type' in rope else 'type'}", _no_such(kind, ROPE_TYPES)
    for key in ROPE_KEYS.get(kind, ()):
        if key not in rope:
            yield f"{name}{key}", f"is missing: transformers requires it for {shown(kind)}"
    for key, value in rope.items():
        if key in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
            yield f"{name}{key}", f"expected a number, found {shown(value)}: transformers does not load the model"


def _layers(table: _Table, model_type: str) -> Iterator[tuple[str, str]]:
    """Yield the kinds of layers that transformers does not know, and lists that are not as long as the model is deep.

    Nearly every new model type has a new kind of layer, so types that lora-tool has no table of are not judged.
    """
    if model_type in OWN_LAYERS or LAYERS.keys().isdisjoint(table) or not prefixes_of(model_type):
        return
    depth = table.get("num_hidden_layers")
    for name, known in LAYERS.items():
        kinds = table.get(name)
        if kinds is None:
            continue
        if not isinstance(kinds, list):
            yield name, f"expected a list, found {shown(kinds)}: transformers does not load the model"
            return
        for kind in dict.fromkeys(kind for kind in kinds if isinstance(kind, str) and kind not in known):
            yield name, _no_such(kind, known)
        if type(depth) is int and depth != len(kinds):
            why = f"but `num_hidden_layers` is {depth}: transformers does not load the model"
            yield name, f"has {len(kinds)} entries, {why}"


def _of_the_outermost(table: _Table) -> Iterator[tuple[str, str]]:
    """Yield faults that only the outermost config can have: unknown attention, unnamed code, codes without a method."""
    for name in ("attn_implementation", "_attn_implementation"):
        value = table.get(name)
        if value is not None and not isinstance(value, str | dict):
            yield name, f"expected a string, found {shown(value)}: transformers does not load the model"
        elif isinstance(value, str) and "/" not in value and value.removeprefix("paged|") not in ATTENTIONS:
            yield name, _no_such(value, ATTENTIONS)
    if table.get("auto_map", {}) is None:
        yield "auto_map", "expected an object or no such field, found null: transformers does not load the model"
    quantised = table.get("quantization_config")
    if quantised is not None and not (isinstance(quantised, dict) and quantised):
        message = (
            f"expected an object with `quant_method`, found {shown(quantised)}: transformers does not load the model"
        )
        yield "quantization_config", message
