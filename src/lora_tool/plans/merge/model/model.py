"""A base and its adapters in the names that parameters have in memory, which are those that adapters use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core.tensors import StoredTensor, TensorAction, TensorTable
from lora_tool.formats.model_config import ModelConfig
from lora_tool.models import Architecture, is_computed
from lora_tool.models.ends import LAST_LAYERS
from lora_tool.plans.base.task import Task
from lora_tool.plans.core.steps import InputRecord

if TYPE_CHECKING:
    from lora_tool.models.mapping.model import ModelFacts, NamesOnDisk


class ParameterConversion(Struct, frozen=True, kw_only=True):
    """How the parameters in memory are made of tensors on disk, where the two differ."""

    mapping: NamesOnDisk
    disk: TensorTable
    copied_only: Mapping[str, StoredTensor] = field(default_factory=dict)
    """Parameters whose rows are not rows on disk → their whole tensor there; they can be copied only."""
    same_names: bool = False
    """Whether names on disk are those in memory, so that PEFT has nothing to translate."""
    partly_quantised: frozenset[str] = frozenset()
    """Parameters with quantised and plain rows on disk: they can only be left as they are."""


class Model(Struct, frozen=True, kw_only=True):
    """The decisions about the merged model, which every later pass reads."""

    base: ModelDir
    """The base with the parameters of its model, by their names in memory."""
    adapters: tuple[AdapterDir, ...]
    """The adapters, with the module paths of the same names."""
    arch: Architecture
    """The classes that the model may be, and their heads."""
    task: Task
    """The merged model's task, which with `arch` or `facts` gives its class; never `Task.AUTO`."""
    leftovers: tuple[InputRecord, ...] = ()
    """Tensors of the base that the model has no place for."""
    conversion: ParameterConversion | None = None
    """None where the base is stored as it is in memory."""

    @property
    def facts(self) -> ModelFacts | None:
        """What transformers, or a table, knows of the class; None where names on disk are enough."""
        return None if self.conversion is None else self.conversion.mapping.facts

    @property
    def missing_keys(self) -> frozenset[str]:
        """Parameters of the class for which the base has no tensor."""
        return frozenset() if self.conversion is None else frozenset(self.conversion.mapping.missing)

    @property
    def tied_by_config(self) -> Mapping[str, str]:
        """Parameter → the one that it is tied to for as long as the config says `tie_word_embeddings`."""
        if self.conversion is not None:
            return self.conversion.mapping.tied_by_config
        # the second bias of BERT's kin, `X.decoder.bias`, is `X.bias`
        ends = [name for name in self.arch.causal_only if name.endswith(".decoder.bias")]
        return {name: f"{name.removesuffix('.decoder.bias')}.bias" for name in ends}

    @property
    def of_no_class(self) -> frozenset[str]:
        """The weights among `leftovers`, which servers may use: layers that predict further tokens, say."""
        if self.conversion is None:
            return frozenset()
        return frozenset(name for name in self.conversion.mapping.unexpected if not is_computed(name))

    def parameter_of(self, name: str) -> str:
        """Return the parameter in memory that a tensor of this name on disk is, or is a part of."""
        return name if self.conversion is None else self.conversion.mapping.place(name)


def class_row(config: ModelConfig, generator: ModelFacts | None, classifier: ModelFacts | None) -> Architecture:
    """Return the classes that transformers has for a model type, as a row like those of the table of architectures."""
    head = classifier.head if classifier else None
    last = next((last for last in LAST_LAYERS if last and head and head.endswith(last)), "")
    output = generator.output if generator else None
    return Architecture(
        model_type=config.model_type or "",
        causal_lm=generator.class_name if generator else None,
        sequence_classification=classifier.class_name if classifier and head else None,
        head=head.removesuffix(last) if head else None,
        causal_only=tuple(f"{output}.{leaf}" for leaf in ("weight", "bias")) if output else (),
        conv1d=frozenset().union(*(each.conv1d for each in (generator, classifier) if each)),
    )


def as_stored(base: ModelDir, adapters: Sequence[AdapterDir], arch: Architecture, task: Task) -> Model:
    """Return the model of a base that is stored as it is in memory.

    It is without the buffers of old checkpoints, which transformers computes.
    """
    computed = [tensor for name, tensor in base.tensors.items() if is_computed(name)]
    if computed:
        tensors = {name: tensor for name, tensor in base.tensors.items() if not is_computed(name)}
        base = replace(base, weights=replace(base.weights, tensors=tensors))
    reason = "a buffer that transformers computes and never loads"
    return Model(
        base=base,
        adapters=tuple(adapters),
        arch=arch,
        task=task,
        leftovers=tuple(
            InputRecord(path=tensor.path, name=tensor.name, action=TensorAction.DROPPED, reason=reason)
            for tensor in computed
        ),
    )
