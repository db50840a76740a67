"""LT324: names in a model's config that transformers does not know, and missing fields that a name requires."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

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
    for each in _configs("", config.raw, _DEEPEST):
        faults = (_unknown_names(each), _rope_faults(each), _layer_faults(each), _outer_faults(each))
        for name, message in (fault for some in faults for fault in some):
            yield Fault(subject=f"{each.context}{name}", message=message, path=config.path)


class _Config(Struct, frozen=True, kw_only=True):
    """A config, or one inside it; `context` stands before its fields."""

    context: str
    table: Mapping[str, object]

    @property
    def model_type(self) -> str:
        found = self.table.get("model_type")
        return found if isinstance(found, str) else ""


def _configs(context: str, table: Mapping[str, object], deepest: int) -> Iterator[_Config]:
    """Yield the config and those inside it."""
    yield _Config(context=context, table=table)
    for name, inner in table.items() if deepest else ():
        if name.endswith("_config") and name not in _NOT_MODELS and isinstance(inner, Mapping):
            yield from _configs(f"{context}{name}.", inner, deepest - 1)


def _unknown_names(config: _Config) -> Iterator[tuple[str, str]]:
    """Yield the names that transformers does not have."""
    for name, value, known in _named(config):
        if isinstance(value, str) and value not in known | _OF_SOME_MODELS:
            yield name, _no_such(value, known)


def _no_such(value: str, known: Iterable[str]) -> str:
    return f"transformers has no {shown(value)}. {suggestion(value, sorted(known))}".rstrip()


def _rope_faults(config: _Config) -> Iterator[tuple[str, str]]:
    """Yield fields that a rope type requires and that are missing, and those that are not numbers."""
    for name, kind, rope in _ropes(config):
        for key in ROPE_KEYS.get(kind, ()):
            if key not in rope:
                yield f"{name}{key}", f"is missing: transformers requires it for {shown(kind)}"
        for key, value in rope.items():
            if key in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
                yield f"{name}{key}", f"expected a number, found {shown(value)}: transformers does not load the model"


def _layer_faults(config: _Config) -> Iterator[tuple[str, str]]:
    """Yield the kinds of layers that transformers does not know, and lists that are not as long as the model is deep.

    Nearly every new model type has a new kind of layer, so types that lora-tool has no table of are not judged.
    """
    if config.model_type in OWN_LAYERS or not prefixes_of(config.model_type):
        return
    depth = config.table.get("num_hidden_layers")
    for name, known in LAYERS.items():
        kinds = config.table.get(name)
        if kinds is None:
            continue
        if not isinstance(kinds, list):
            yield name, f"expected a list, found {shown(kinds)}: transformers does not load the model"
            return
        for kind in dict.fromkeys(kind for kind in kinds if isinstance(kind, str) and kind not in known):
            yield name, _no_such(kind, known)
        if type(depth) is int and depth != len(kinds):
            yield (
                name,
                f"has {len(kinds)} entries, but `num_hidden_layers` is {depth}: transformers does not load the model",
            )


def _outer_faults(config: _Config) -> Iterator[tuple[str, str]]:
    """Yield faults that only the outermost config can have: unknown attention, unnamed code, codes without a method."""
    if config.context:
        return
    for name in ("attn_implementation", "_attn_implementation"):
        value = config.table.get(name)
        if value is not None and not isinstance(value, str | dict):
            yield name, f"expected a string, found {shown(value)}: transformers does not load the model"
        elif isinstance(value, str) and "/" not in value and value.removeprefix("paged|") not in ATTENTIONS:
            yield name, _no_such(value, ATTENTIONS)
    if config.table.get("auto_map", {}) is None:
        yield "auto_map", "expected an object or no such field, found null: transformers does not load the model"
    quantised = config.table.get("quantization_config")
    if quantised is not None and not (isinstance(quantised, dict) and quantised):
        message = (
            f"expected an object with `quant_method`, found {shown(quantised)}: transformers does not load the model"
        )
        yield "quantization_config", message


def _named(config: _Config) -> Iterator[tuple[str, object, frozenset[str]]]:
    """Yield field, value and the names that there are, for the config of one model."""
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        if config.model_type not in OWN_ACTIVATION:
            yield name, config.table.get(name), ACTIVATIONS
    for name, kind, rope in _ropes(config):
        yield f"{name}{'rope_type' if 'rope_type' in rope else 'type'}", kind, ROPE_TYPES


def _ropes(config: _Config) -> Iterator[tuple[str, str, Mapping[str, object]]]:
    """Yield each set of rope parameters, also those of kinds of layers, with the prefix of its keys, and its type."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.table.get(name)
        if isinstance(rope, Mapping):
            whole = () if config.model_type in OWN_ROPES else ((f"{name}.", rope),)
            for inside, each in (*whole, *((f"{name}.{kind}.", of) for kind, of in rope.items())):
                if isinstance(each, Mapping):
                    kind = each.get("rope_type", each.get("type", "default"))
                    yield inside, kind if isinstance(kind, str) else "default", each
