"""What transformers would load a base as: the class, and with it which tensors on disk make each parameter.

Of several classes the one is taken that has a module for every tensor of the adapters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lora_tool.adapter.support import WITH_PEFT
from lora_tool.architectures import Architecture
from lora_tool.architectures.heads import LAST_LAYERS
from lora_tool.checkpoint import AdapterDir, ModelDir
from lora_tool.errors import LoraToolError, UnsupportedAdapter
from lora_tool.formats.model_config import ModelConfig
from lora_tool.names.weight_mapping import WeightMapping, candidates, own_class
from lora_tool.plan.base.side_files import config_of, model_dtype
from lora_tool.plan.base.task import CLASSIFIERS, Task, declared_types, is_classifier, trained_class
from lora_tool.plan.merge.homes import homes
from lora_tool.tensors import DType, TensorTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassCandidates:
    """What a base may be loaded as: a sequence classifier, a class without such a head, or either."""

    base: ModelDir
    generator: WeightMapping | None
    classifier: WeightMapping | None

    @property
    def architecture(self) -> Architecture:
        """The two classes in the words of the table of plainly stored ones."""
        generator = self.generator.facts if self.generator else None
        classifier = self.classifier.facts if self.classifier else None
        head = classifier.head if classifier else None
        last = next((last for last in LAST_LAYERS if last and head and head.endswith(last)), "")
        output = generator.output if generator else None
        return Architecture(
            model_type=self.base.config.model_type or "" if self.base.config else "",
            causal_lm=generator.class_name if generator else None,
            sequence_classification=classifier.class_name if classifier and head else None,
            head=head.removesuffix(last) if head else None,
            causal_only=tuple(f"{output}.{leaf}" for leaf in ("weight", "bias")) if output else (),
            conv1d=frozenset().union(*(facts.conv1d for facts in (generator, classifier) if facts)),
        )

    def mapping(self, task: Task) -> WeightMapping:
        """Return the class for the task. Raises `UnsupportedAdapter` where transformers has none."""
        found = self.classifier if task in CLASSIFIERS else self.generator
        if found is None:
            what = "sequence classifier" if task in CLASSIFIERS else "causal LM"
            raise UnsupportedAdapter(
                f"{self.base.root}: transformers has no {what} of model_type {self.architecture.model_type}",
                hint=WITH_PEFT,
            )
        return found


def class_candidates(base: ModelDir, adapters: Sequence[AdapterDir], asked: Task) -> ClassCandidates:
    """Return what transformers would load the base as, a causal LM or a sequence classifier. Imports torch and
    transformers.

    Raises `MissingDependency`, and `UnsupportedAdapter` for a model that this transformers cannot build.
    """
    config = config_of(base)
    errors: list[LoraToolError] = []
    generator = _fitting(base, adapters, candidates(config, "AutoModelForCausalLM"), errors)
    classifier = None
    if generator is None or _may_classify(base, adapters, asked):
        classifier = _fitting(base, adapters, candidates(config, "AutoModelForSequenceClassification"), errors)
    if generator is None and classifier is None:
        raise errors[0] if errors else _unknown_type(config, "neither a causal LM nor a sequence classifier")
    return ClassCandidates(base=base, generator=generator, classifier=classifier)


def class_for_task(base: ModelDir, adapters: Sequence[AdapterDir], task: Task) -> ClassCandidates:
    """Return what transformers would load the base as for a task that is decided. Raises as `class_candidates`."""
    config = config_of(base)
    if task.auto_class is not None:
        names, what = tuple(candidates(config, task.auto_class)), f"no {task.auto_class}"
    else:
        wanted = trained_class(adapters, base) or ""
        own = own_class(config, wanted)
        names, what = (own,) if own else (), f"no {wanted or 'class'}"
    errors: list[LoraToolError] = []
    found = _fitting(base, adapters, names, errors)
    if found is None:
        raise errors[0] if errors else _unknown_type(config, what)
    classifies = task in CLASSIFIERS
    return ClassCandidates(base=base, generator=None if classifies else found, classifier=found if classifies else None)


def _fitting(
    base: ModelDir, adapters: Sequence[AdapterDir], names: Iterable[str], errors: list[LoraToolError]
) -> WeightMapping | None:
    """Return the first of the classes that has a module for every tensor of the adapters, else the nearest to that.

    Why a class cannot be built goes into `errors`.
    """
    fitting: list[tuple[int, WeightMapping]] = []
    for class_name in names:
        try:
            mapping = WeightMapping(config_of(base), class_name, _shapes(base.tensors), model_dtype(base) or DType.F32)
        except LoraToolError as error:
            errors.append(error)
            continue
        fitting.append((sum(_strangers(adapter, mapping) for adapter in adapters), mapping))
        if not fitting[-1][0]:
            break
    return min(fitting, key=lambda item: item[0])[1] if fitting else None


def _may_classify(base: ModelDir, adapters: Sequence[AdapterDir], asked: Task) -> bool:
    """Return whether the merged model may be a classifier; building a second class is slow, so skip it when the
    task is already declared.
    """
    classes = base.config.architectures if base.config else ()
    causal = declared_types(adapters) == {"CAUSAL_LM"} and asked is Task.AUTO and not is_classifier(classes)
    return asked is not Task.CAUSAL_LM and not causal


def _unknown_type(config: ModelConfig, what: str) -> UnsupportedAdapter:
    return UnsupportedAdapter(
        f"{config.path}: model_type {config.model_type}: the installed transformers has {what} of it",
        hint="install the release that has it: pip install -U transformers",
    )


def _shapes(table: TensorTable) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in table.items()}


def _strangers(adapter: AdapterDir, mapping: WeightMapping) -> int:
    """Return how many of the adapter's tensors the class has no module for."""
    return sum(home is None for home in set(homes(adapter, mapping).values()))
