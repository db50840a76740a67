"""Where the modules of a base model are in memory, told from its config and the names of its tensors.

For the model types whose names on disk and in memory are known: a class with a head has the base model below a name of
its own, and a checkpoint of the base model alone (the published `gpt2`) has its tensors without it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec import Struct

from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.formats.model_config import ModelConfig
from lora_tool.models.model_tensors import prefixes_of
from lora_tool.models.table import architecture_of
from lora_tool.models.text_classes import TEXT_CLASSES

_WRITING = frozenset({"CAUSAL_LM", "SEQ_2_SEQ_LM"})
"""PEFT's task types of models that write text."""


class ModuleNames(Struct, frozen=True, kw_only=True):
    """The modules of a model type: of its classes with a head, and of the base model's own class."""

    prefix: str
    """What the classes with a head call the base model."""
    headed: frozenset[str]
    bare: frozenset[str]


def module_names(config: ModelConfig, held: frozenset[str], adapter: AdapterConfig) -> ModuleNames | None:
    """Return where the modules `held`, by their paths on disk, are in memory; None where no table knows.

    `config` is the base's. An `adapter` of an encoder and decoder that writes text is of a class that no table has, and
    some classes hold the parts of the base model themselves.
    """
    arch, text = architecture_of(config.model_type or ""), TEXT_CLASSES.get(config.model_type or "")
    if config.custom_code or (arch is None and text is None):
        return None
    if text is not None:
        inner = frozenset(text.strip + name.removeprefix(text.add) for name in held if name.startswith(text.add))
        whole = frozenset(map(text.in_whole, held))
        return ModuleNames(prefix="model", headed=inner | whole, bare=_below("model", inner))
    prefixes = prefixes_of(config.model_type or "")
    writes = adapter.task_type in _WRITING and (arch is None or arch.causal_lm is None)
    without = {name for name, prefix in prefixes.items() if not prefix}
    if writes or _is_one_of(without, adapter) or not prefixes.keys() & set(config.architectures[:1]):
        return None
    known = [prefix for prefix, _ in Counter(filter(None, prefixes.values())).most_common()]
    prefix = next((each for each in known if any(name.startswith(f"{each}.") for name in held)), None)
    if prefix is None:
        return ModuleNames(prefix=known[0], headed=frozenset(f"{known[0]}.{name}" for name in held), bare=held)
    return ModuleNames(prefix=prefix, headed=held, bare=_below(prefix, held))


def _is_one_of(classes: Iterable[str], adapter: AdapterConfig) -> bool:
    """Return whether an adapter is for one of the classes, by the class that it was trained on, else by its task."""
    if adapter.trained_class is not None:
        return adapter.trained_class in classes
    return adapter.task_type == "QUESTION_ANS" and any(name.endswith("ForQuestionAnswering") for name in classes)


def _below(prefix: str, modules: Iterable[str]) -> frozenset[str]:
    """Return the modules of the base model, without what the classes with a head call it."""
    return frozenset(name.removeprefix(f"{prefix}.") for name in modules if name.startswith(f"{prefix}."))
