"""LT324: functions that a model's config names and values that it has, which transformers does not take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lora_tool.architectures import architecture_of
from lora_tool.choices import suggestion
from lora_tool.formats.fields import shown
from lora_tool.formats.model_config import NUMBERS
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
TYPED: Mapping[str, type] = {
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), str),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), float),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_cache"), bool),
    **dict.fromkeys(("rope_parameters", "rope_scaling"), dict),
}
"""Fields that transformers 5 takes as one type alone, in every class that has them."""
NEVER_NULL = frozenset({"hidden_act", "hidden_activation", "rms_norm_eps", "attention_bias", "mlp_bias"})
_OF_SOME_MODELS = frozenset({"axial", "mrope", "su", "xdrope"})
"""Types that the configs of some models have of their own, or translate."""
_NUMBERS = frozenset({"factor", "low_freq_factor", "high_freq_factor", "rope_theta"})
_AS_JSON: Mapping[type, str] = {
    str: "a name",
    float: "a number with a decimal point",
    bool: "true or false",
    dict: "an object",
}


@rule("LT324", Severity.ERROR, on=ModelSubject, needs=frozenset({Need.CONFIG}))
def unknown_function(subject: ModelSubject) -> Iterator[Fault]:
    """The config names an unknown function or has an unusable value.

    What it does: Looks up `hidden_act` (`hidden_activation`, `activation_function`) and the `rope_type` of
    `rope_parameters` or `rope_scaling` in the `config.json` of a model type that lora-tool knows, also in its
    `text_config`, among the names of transformers. It looks for what a rope type requires, and checks fields that have
    one type in every such class: epsilons of norms, biases, `use_cache`.

    Why it matters: transformers fails with a bare `KeyError: 'swilu'` when it builds the model.

    Example: `"hidden_act": "swilu"`; `"rope_type": "linear"` without `factor`; `"rms_norm_eps": null`.

    What to do: Copy the field from the `config.json` of the model that this one was trained from.
    """
    config = subject.checkpoint.config
    if config is None or config.custom_code:
        return
    for context, table in (("", config.raw), *_inner(config.raw)):
        if architecture_of(str(table.get("model_type"))) is None:
            continue
        for name, message in (*_of_another_type(table), *_unknown_names(table), *_rope_faults(table)):
            yield Fault(subject=f"{context}{name}", message=message, path=str(config.path))


def _of_another_type(table: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for name, kind in TYPED.items():
        value = table.get(name)
        told = isinstance(value, str) and name in NUMBERS  # by the config itself
        wrong = type(value) is not kind if value is not None else name in table and name in NEVER_NULL
        if wrong and not told:
            yield name, f"expected {_AS_JSON[kind]}, found {shown(value)}: transformers does not load the model"


def _unknown_names(table: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the names that transformers does not have."""
    for name, value, known in _named(table):
        if isinstance(value, str) and value not in known | _OF_SOME_MODELS:
            yield name, f"transformers has no {shown(value)}. {suggestion(value, sorted(known))}".rstrip()


def _rope_faults(table: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield what a rope type requires and does not have, and what is no number."""
    for name, kind, rope in _ropes(table):
        for key in ROPE_KEYS.get(kind, ()):
            if key not in rope:
                yield f"{name}{key}", f"is missing: transformers requires it for {shown(kind)}"
        for key, value in rope.items():
            if key in _NUMBERS and (isinstance(value, bool) or not isinstance(value, int | float)):
                yield f"{name}{key}", f"expected a number, found {shown(value)}: transformers does not load the model"


def _inner(table: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    for name, value in table.items():
        if name.endswith("_config") and isinstance(value, Mapping):
            yield f"{name}.", value


def _named(table: Mapping[str, object]) -> Iterator[tuple[str, object, frozenset[str]]]:
    """Yield field, value and the names that there are, for the config of one model."""
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        yield name, table.get(name), ACTIVATIONS
    for name, kind, rope in _ropes(table):
        yield f"{name}{'rope_type' if 'rope_type' in rope else 'type'}", kind, ROPE_TYPES


def _ropes(table: Mapping[str, object]) -> Iterator[tuple[str, str, Mapping[str, object]]]:
    """Yield each set of rope parameters, also those of kinds of layers, with what is before its keys, and its type."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = table.get(name)
        if isinstance(rope, Mapping):
            for inside, each in ((f"{name}.", rope), *((f"{name}.{kind}.", of) for kind, of in rope.items())):
                if isinstance(each, Mapping):
                    kind = each.get("rope_type", each.get("type", "default"))
                    yield inside, kind if isinstance(kind, str) else "default", each
