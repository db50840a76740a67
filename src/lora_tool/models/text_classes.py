"""Multimodal checkpoints of which `AutoModelForCausalLM` makes a text model, whose names are other than those on disk.

The table is of transformers 5.23, for checkpoints whose experts are stored fused or that have none;
`tests/contract/test_architectures.py` checks every row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from msgspec import Struct, field

from lora_tool.models.ends import head_of
from lora_tool.models.table import Architecture

_OUTPUT = "lm_head.weight"


class TextClass(Struct, frozen=True, kw_only=True):
    """The text class of a model type: on disk its names have `add` in place of their beginning `strip`.

    Where they have that beginning: with `strip` the output layer has the same name in both.
    """

    architecture: Architecture
    strip: str
    add: str
    whole: Mapping[str, str] = field(default_factory=dict)
    """What begins names on disk → what begins them in memory, in the whole model's own class; the first that fits."""

    def holds(self, name: str) -> bool:
        """Return whether the tensor on disk is the text model's."""
        return name.startswith(self.add) or name in self.architecture.causal_only

    def path(self, module: str) -> str:
        """Return a module's path in the whole model; a new head has the same in both."""
        if head_of(module) or not module.startswith(self.strip):
            return module
        return self.add + module.removeprefix(self.strip)

    def in_whole(self, module: str) -> str:
        """Return the path that a module on disk has in the whole model's own class."""
        old = next((old for old in self.whole if module.startswith(old)), None)
        return module if old is None else self.whole[old] + module.removeprefix(old)


def _row(
    model_type: str,
    class_name: str,
    strip: str,
    add: str,
    classifier: str | None = None,
    whole: Mapping[str, str] = MappingProxyType({}),
) -> TextClass:
    return TextClass(
        architecture=Architecture(
            model_type=model_type,
            causal_lm=class_name,
            sequence_classification=classifier,
            head="score" if classifier else None,
            causal_only=(_OUTPUT if strip else f"{add}{_OUTPUT}",),
            conv1d=frozenset(),
        ),
        strip=strip,
        add=add,
        whole=whole,
    )


_QWEN = ("model.", "model.language_model.")
_WRAPPED = ("", "language_model.")
_MLLAMA = {"language_model.model.": "model.language_model.", "language_model.lm_head": "lm_head", "": "model."}
_ROWS = (
    _row("llama4", "Llama4ForCausalLM", *_WRAPPED),
    _row("mllama", "MllamaForCausalLM", *_WRAPPED, whole=_MLLAMA),
    _row("qwen3_5", "Qwen3_5ForCausalLM", *_QWEN, "Qwen3_5TextForSequenceClassification"),
    _row("qwen3_5_moe", "Qwen3_5MoeForCausalLM", *_QWEN),
    _row("qwen4_exp", "Qwen4ExpForCausalLM", *_QWEN),
)
TEXT_CLASSES: Mapping[str, TextClass] = MappingProxyType({row.architecture.model_type: row for row in _ROWS})
"""By the `model_type` of the whole checkpoint."""


def text_class_of(model_type: str, names: Iterable[str], modules: Iterable[str]) -> TextClass | None:
    """Return the text class that an adapter was trained on, of a checkpoint that has these tensor `names`.

    None where the checkpoint has no fewer of the adapter's `modules` under their own paths than under the whole model's.
    """
    text = TEXT_CLASSES.get(model_type)
    if text is None:
        return None
    held = {module for name in names for module in _modules(name)}
    wanted = [module for module in modules if head_of(module) is None]
    moved, whole = sum(text.path(module) in held for module in wanted), set(map(text.in_whole, held))
    return text if moved > sum(module in whole for module in wanted) else None


def _modules(name: str) -> Iterator[str]:
    """Yield the module of a tensor, and the experts that it is one of: they are one module in memory."""
    module = name.rpartition(".")[0]
    yield module
    before, experts, _ = module.partition(".experts.")
    if experts:
        yield f"{before}.experts"
