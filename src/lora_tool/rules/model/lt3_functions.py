"""LT324: functions that a model's config names and transformers does not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lora_tool.architectures import architecture_of
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
_OF_SOME_MODELS = frozenset({"axial", "mrope", "su", "xdrope"})
"""Types that the configs of some models have of their own, or translate."""


@rule("LT324", Severity.ERROR, on=ModelSubject, needs=frozenset({Need.CONFIG}))
def unknown_function(subject: ModelSubject) -> Iterator[Fault]:
    """The config names an unknown activation or rope type.

    What it does: Looks up `hidden_act` (`hidden_activation`, `activation_function`) and the `rope_type` of
    `rope_parameters` or `rope_scaling` in the `config.json` of a model type that lora-tool knows, also in its
    `text_config`, among the names of transformers.

    Why it matters: transformers fails with a bare `KeyError: 'swilu'` when it builds the model.

    Example: `"hidden_act": "swilu"`.

    What to do: Copy the field from the `config.json` of the model that this one was trained from.
    """
    config = subject.checkpoint.config
    if config is None or config.custom_code:
        return
    for context, table in (("", config.raw), *_inner(config.raw)):
        for name, value, known in _named(table):
            if isinstance(value, str) and value not in known | _OF_SOME_MODELS:
                message = f"transformers has no {shown(value)}. {suggestion(value, sorted(known))}".rstrip()
                yield Fault(subject=f"{context}{name}", message=message, path=str(config.path))


def _inner(table: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    for name, value in table.items():
        if name.endswith("_config") and isinstance(value, Mapping):
            yield f"{name}.", value


def _named(table: Mapping[str, object]) -> Iterator[tuple[str, object, frozenset[str]]]:
    """Yield field, value and the names that there are, for the config of one model."""
    if architecture_of(str(table.get("model_type"))) is None:
        return
    for name in ("hidden_act", "hidden_activation", "activation_function"):
        yield name, table.get(name), ACTIVATIONS
    for name in ("rope_parameters", "rope_scaling"):
        rope = table.get(name)
        if isinstance(rope, Mapping):
            for inside, each in ((f"{name}.", rope), *((f"{name}.{kind}.", of) for kind, of in rope.items())):
                if isinstance(each, Mapping):
                    key = "rope_type" if "rope_type" in each else "type"
                    yield f"{inside}{key}", each.get(key), ROPE_TYPES
