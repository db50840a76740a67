"""The class that transformers would load a base as, and with it which tensors on disk make each parameter.

Of several classes, the merge takes the one that has a module for every tensor of the adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.adapters.support import WITH_PEFT
from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core.errors import LoraToolError, UnsupportedAdapter
from lora_tool.core.tensors import DType
from lora_tool.formats.model_config import ModelConfig
from lora_tool.models import Architecture
from lora_tool.models.mapping import meta
from lora_tool.models.mapping.text_class import WholeInTextNames
from lora_tool.models.mapping.weight_mapping import WeightMapping
from lora_tool.plans.base.task import CLASSIFIERS, Task, decide_task, declared_types, names_classifier, trained_class
from lora_tool.plans.merge.model.converted import class_row, lacks_layers, strangers

_WHOLE_CLASS = {"AutoModelForCausalLM": "AutoModelForImageTextToText"}
"""Auto class that may give a text model → the one that gives the whole; the others give the whole themselves."""


class ModelClass(Struct, frozen=True, kw_only=True):
    """What transformers loads the base as, for a task that is decided."""

    task: Task
    mapping: WeightMapping
    arch: Architecture
    """The classes that were tried, in the words of the table of plainly stored ones."""


def model_class(base: ModelDir, adapters: Sequence[AdapterDir], wanted: Task, task: Task | None) -> ModelClass:
    """Return the class of the merged model; `task` None is decided between a causal LM and a sequence classifier.

    Raises `UnsupportedAdapter` for a model that this transformers cannot build, or has no class for.
    """
    config = base.whole_config
    errors: list[LoraToolError] = []

    def of(auto_class: str) -> WeightMapping | None:
        name = meta.text_class(config, auto_class)
        whole = [each for each in meta.candidates(config, auto_class) if each != name]
        found = _fitting(base, adapters, whole, errors)
        return _text_model(base, adapters, (auto_class, name), found, errors) if name is not None else found

    generator, classifier = None, None
    if task is None:
        what = "neither a causal LM nor a sequence classifier"
        generator = of("AutoModelForCausalLM")
        if generator is None or _may_classify(base, adapters, wanted):
            classifier = of("AutoModelForSequenceClassification")
    elif task.auto_class is None:
        name = trained_class(adapters, base) or ""
        what = f"no {name or 'class'}"
        generator = _fitting(base, adapters, (name,) if meta.belongs(name, config) else (), errors)
    else:
        what, found = f"no {task.auto_class}", of(task.auto_class)
        generator, classifier = (None, found) if task in CLASSIFIERS else (found, None)
    if generator is None and classifier is None:
        raise errors[0] if errors else _unknown_type(config, what)
    arch = class_row(config, generator.facts if generator else None, classifier.facts if classifier else None)
    decided = task or decide_task(wanted, adapters, base, arch.head)
    mapping = classifier if decided in CLASSIFIERS else generator
    if mapping is None and decided is Task.CAUSAL_LM and wanted is Task.AUTO and declared_types(adapters) == {None}:
        # a FlaubertWithLMHeadModel is called like a causal LM, and is none
        return model_class(base, adapters, wanted, Task.AS_TRAINED)
    if mapping is None:
        kind = "sequence classifier" if decided in CLASSIFIERS else "causal LM"
        raise UnsupportedAdapter(
            f"{base.root}: transformers has no {kind} of model_type {config.model_type}", hint=WITH_PEFT
        )
    return ModelClass(task=decided, mapping=mapping, arch=arch)


def text_base(base: ModelDir) -> ModelDir:
    """Return a multimodal base with the config of its text model.

    Raises `UnsupportedAdapter` where transformers has no class for the text model.
    """
    config = meta.text_config(base.whole_config)
    if config is None:
        raise UnsupportedAdapter(
            f"{base.root}: transformers has no class for the text model of a {base.whole_config.model_type} alone",
            hint="leave out `text_only`",
        )
    return replace(base, config=config)


def _fitting(
    base: ModelDir, adapters: Sequence[AdapterDir], names: Iterable[str], errors: list[LoraToolError]
) -> WeightMapping | None:
    """Return the first of the classes that has a module for every tensor of the adapters, else the nearest to that.

    Why a class cannot be built goes into `errors`.
    """
    fitting: list[tuple[int, WeightMapping]] = []
    shapes = {name: tensor.shape for name, tensor in base.tensors.items()}
    for class_name in names:
        try:
            mapping = WeightMapping(base.whole_config, class_name, shapes, base.dtype or DType.F32)
        except LoraToolError as error:
            errors.append(error)
            continue
        fitting.append((sum(strangers(adapter, mapping) for adapter in adapters), mapping))
        if not fitting[-1][0]:
            break
    return min(fitting, key=lambda item: item[0])[1] if fitting else None


def _text_model(
    base: ModelDir,
    adapters: Sequence[AdapterDir],
    classes: tuple[str, str],
    whole: WeightMapping | None,
    errors: list[LoraToolError],
) -> WeightMapping | None:
    """Return the whole model in the names of its text class, where the adapters were trained on that; else `whole`.

    `classes` are the auto class and the text class that it gives. Raises `UnsupportedAdapter` where transformers
    re-initialises weights of the text class, or has no class for the whole.
    """
    auto_class, name = classes
    if whole is not None and not any(strangers(adapter, whole) or lacks_layers(adapter, whole) for adapter in adapters):
        return whole
    text = _fitting(base, adapters, (name,), errors)
    if text is None or any(strangers(adapter, text) for adapter in adapters):
        return whole
    # names that the whole model lacks too are a new head, which is the adapter's
    made_up = [each for each in text.missing if whole is None or each not in whole.missing]
    if whole is None and text.facts.head is not None:
        made_up = [each for each in made_up if not each.startswith(f"{text.facts.head}.")]
    if made_up:
        raise UnsupportedAdapter(
            f"{base.root}: the adapter was trained on a {name}, and the installed transformers cannot load one from it: "
            f"it re-initialises {len(made_up)} of its parameters, the first is `{made_up[0]}`, so the adapter was not trained "
            "on the weights of this base",
            hint=f"train it anew on the whole model: {_WHOLE_CLASS.get(auto_class, auto_class)}.from_pretrained(BASE)",
        )
    if whole is None:
        raise UnsupportedAdapter(
            f"{base.root}: the adapter was trained on a {name}, and transformers has no class with such a head for the "
            f"whole {base.whole_config.model_type}",
            hint="`text_only=True` writes only the text model",
        )
    return WholeInTextNames(text, whole)


def _may_classify(base: ModelDir, adapters: Sequence[AdapterDir], wanted: Task) -> bool:
    """Return whether the merged model may be a classifier; building a second class is slow, so skip it when the
    task is already declared.
    """
    classes = base.whole_config.architectures
    causal = declared_types(adapters) == {"CAUSAL_LM"} and wanted is Task.AUTO and not names_classifier(classes)
    return wanted is not Task.CAUSAL_LM and not causal


def _unknown_type(config: ModelConfig, what: str) -> UnsupportedAdapter:
    if config.custom_code:
        message = (
            f"{config.path}: a {config.model_type} is code in the checkpoint (`auto_map`), which lora-tool does not "
            f"run, and the installed transformers has {what} for it"
        )
        return UnsupportedAdapter(message, hint=WITH_PEFT)
    return UnsupportedAdapter(
        f"{config.path}: model_type {config.model_type}: the installed transformers has {what} for it",
        hint="install the release that has it: pip install -U transformers",
    )
