"""LT324: functions that a model's config names and values that it has, which transformers does not take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from lora_tool.architectures.config_fields import TypedConfig, typed_configs
from lora_tool.choices import suggestion
from lora_tool.formats.fields import shown
from lora_tool.report import Severity
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
_OF_SOME_MODELS = frozenset({"axial", "mrope", "su", "xdrope"})
"""Types that the configs of some models have of their own, or translate."""
_NUMBERS = frozenset({"factor", "low_freq_factor", "high_freq_factor", "rope_theta"})


@rule("LT324", Severity.ERROR, on=ModelSubject, needs=frozenset({Need.CONFIG}))
def unknown_function(subject: ModelSubject) -> Iterator[Fault]:
    """The config names an unknown function or has an unusable value.

    What it does: Compares each field of `config.json`, and of the configs in it (`text_config`), with what the class of
    its model type takes in transformers 5: a number, a name, true or false, null. It looks `hidden_act`
    (`hidden_activation`, `activation_function`), the `rope_type` of `rope_parameters` or `rope_scaling`, the entries of
    `layer_types` and `attn_implementation` up among the names of transformers, and for what a rope type requires.

    Why it matters: transformers does not load the model, some faults with a bare `KeyError: 'swilu'`.

    Example: `"hidden_act": "swilu"`; `"rope_type": "linear"` without `factor`; `"tie_word_embeddings": null`.

    What to do: Copy the field from the `config.json` of the model that this one was trained from.
    """
    config = subject.checkpoint.config
    if config is None or config.custom_code:
        return
    for each in typed_configs(config.raw):
        faults = (_of_another_type(each), _unknown_names(each), _rope_faults(each), _layer_faults(each))
        for name, message in (*(fault for some in faults for fault in some), *_outer_faults(each)):
            yield Fault(subject=f"{each.context}{name}", message=message, path=str(config.path))


def _of_another_type(config: TypedConfig) -> Iterator[tuple[str, str]]:
    for name, taken in config.misfits():
        found = shown(config.table[name])
        yield name, f"expected {taken}, found {found}: transformers does not load the model"


def _unknown_names(config: TypedConfig) -> Iterator[tuple[str, str]]:
    """Yield the names that transformers does not have."""
    for name, value, known in _named(config):
        if isinstance(value, str) and value not in known | _OF_SOME_MODELS:
            yield name, _no_such(value, known)


def _no_such(value: str, known: Iterable[str]) -> str:
    return f"transformers has no {shown(value)}. {suggestion(value, sorted(known))}".rstrip()


def _rope_faults(config: TypedConfig) -> Iterator[tuple[str, str]]:
    """Yield what a rope type requires and does not have, and what is no number."""
    for name, kind, rope in _ropes(config):
        for key in ROPE_KEYS.get(kind, ()):
            if key not in rope:
                yield f"{name}{key}", f"is missing: transformers requires it for {shown(kind)}"
        for key, value in rope.items():
            if key in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
                yield f"{name}{key}", f"expected a number, found {shown(value)}: transformers does not load the model"


def _layer_faults(config: TypedConfig) -> Iterator[tuple[str, str]]:
    """Yield the kinds of layers that transformers does not know, and lists that are not as long as the model is deep."""
    field, depth = config.depth or ("", None)
    for name, known in LAYERS.items() if field else ():
        kinds = config.table.get(name)
        if kinds is not None and not isinstance(kinds, list) and not config.has(name):
            yield name, f"expected a list, found {shown(kinds)}: transformers does not load the model"
        if not isinstance(kinds, list):
            return  # transformers stops here, too
        for kind in dict.fromkeys(kind for kind in kinds if isinstance(kind, str) and kind not in known):
            yield name, _no_such(kind, known)
        if type(depth) is int and depth != len(kinds):
            yield name, f"has {len(kinds)} entries beside `{field}` {depth}: transformers does not load the model"


def _outer_faults(config: TypedConfig) -> Iterator[tuple[str, str]]:
    """Yield what is wrong in the outermost config alone: attention that transformers does not have, code by no name, codes of
    no method.
    """
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


def _named(config: TypedConfig) -> Iterator[tuple[str, object, frozenset[str]]]:
    """Yield field, value and the names that there are, for the config of one model."""
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        if config.has(name) and config.model_type not in OWN_ACTIVATION:
            yield name, config.table.get(name), ACTIVATIONS
    for name, kind, rope in _ropes(config):
        yield f"{name}{'rope_type' if 'rope_type' in rope else 'type'}", kind, ROPE_TYPES


def _ropes(config: TypedConfig) -> Iterator[tuple[str, str, Mapping[str, object]]]:
    """Yield each set of rope parameters, also those of kinds of layers, with what is before its keys, and its type."""
    for name in ("rope_parameters", "rope_scaling") if config.has("rope_parameters") else ():
        rope = config.table.get(name)
        if isinstance(rope, Mapping):
            whole = () if config.model_type in OWN_ROPES else ((f"{name}.", rope),)
            for inside, each in (*whole, *((f"{name}.{kind}.", of) for kind, of in rope.items())):
                if isinstance(each, Mapping):
                    kind = each.get("rope_type", each.get("type", "default"))
                    yield inside, kind if isinstance(kind, str) else "default", each
