"""The base as every later step of a merge reads it: the decisions about its model, and its tensors as in memory.

`DirectBase` is a base that is stored so, `ConvertedBase` one that transformers translates; `read_base` decides which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.actions import TensorAction
from lora_tool.architectures import Architecture, is_computed
from lora_tool.architectures.heads import LAST_LAYERS
from lora_tool.checkpoint import AdapterDir, ModelDir
from lora_tool.formats.model_config import ModelConfig
from lora_tool.plan.adapter.modules import AdapterModules
from lora_tool.plan.base.task import Task
from lora_tool.plan.core.ops import Precision
from lora_tool.plan.core.steps import InputRecord, Step
from lora_tool.plan.core.terms import LoraTerm
from lora_tool.rules.engine.subjects import BaseMatch

if TYPE_CHECKING:
    from lora_tool.names.model import ModelFacts

PerExpert = Mapping[str, tuple[LoraTerm, ...]]
"""Tensor on disk → the deltas that it alone has, as a part of a fused parameter."""


class BaseView(Protocol):
    """A base and the adapters in the names that parameters have in memory, which are those that adapters use."""

    @property
    def base(self) -> ModelDir:
        """The base with the parameters of its model, by their names in memory."""

    @property
    def adapters(self) -> Sequence[AdapterDir]:
        """The adapters, with the module paths of the same names."""

    @property
    def arch(self) -> Architecture:
        """The classes that the model may be, and their heads."""

    @property
    def task(self) -> Task:
        """What the merged model is for, which with `arch` or `facts` says its class; never `Task.AUTO`."""

    @property
    def facts(self) -> ModelFacts | None:
        """What transformers says of the class, where it was asked."""

    @property
    def missing_keys(self) -> frozenset[str]:
        """Parameters of the class for which the base has no tensor."""

    @property
    def tied_by_config(self) -> Mapping[str, str]:
        """Parameter → the one that it is tied to for as long as the config says `tie_word_embeddings`."""

    @property
    def leftovers(self) -> tuple[InputRecord, ...]:
        """Tensors of the base that the model has no place for."""

    @property
    def of_no_class(self) -> frozenset[str]:
        """Those of them that are weights all the same, which servers may use: layers that predict further tokens, say."""

    def parameter_of(self, name: str) -> str:
        """Return the parameter in memory that a tensor of this name on disk is, or is a part of."""

    def in_memory(self) -> BaseMatch | None:
        """Return the base with every parameter of its class, for rules that read headers alone; None where it is so on
        disk.
        """

    def parts_of_fused(self, modules: AdapterModules, precision: Precision) -> tuple[AdapterModules, PerExpert]:
        """Return the modules that are layers in memory, and the deltas on parts of fused parameters."""

    def on_disk(self, steps: Sequence[Step], per_expert: PerExpert) -> tuple[Step, ...]:
        """Return the steps on parameters as steps on the tensors that `save_pretrained` writes."""


class DirectBase(Struct, frozen=True, kw_only=True):
    """The inputs as they are: the `BaseView` with nothing to translate."""

    base: ModelDir
    adapters: Sequence[AdapterDir]
    arch: Architecture
    task: Task
    leftovers: tuple[InputRecord, ...] = ()
    of_no_class: frozenset[str] = frozenset()
    facts: None = None
    missing_keys: frozenset[str] = frozenset()

    @property
    def tied_by_config(self) -> Mapping[str, str]:
        """The second bias of BERT's kin, `X.decoder.bias`, which is `X.bias`."""
        ends = [name for name in self.arch.causal_only if name.endswith(".decoder.bias")]
        return {name: f"{name.removesuffix('.decoder.bias')}.bias" for name in ends}

    def parameter_of(self, name: str) -> str:
        """Return the name."""
        return name

    def in_memory(self) -> None:
        """Return nothing: its names on disk are those in memory."""

    def parts_of_fused(self, modules: AdapterModules, precision: Precision) -> tuple[AdapterModules, PerExpert]:
        """Return the modules, and none that are a part of a fused parameter, in any precision."""
        del precision
        return modules, {}

    def on_disk(self, steps: Sequence[Step], per_expert: PerExpert) -> tuple[Step, ...]:
        """Return the steps."""
        if per_expert:
            raise AssertionError("a plainly stored model has no fused parameters")
        return tuple(steps)


def class_row(config: ModelConfig, generator: ModelFacts | None, classifier: ModelFacts | None) -> Architecture:
    """Return the classes of a model type that were looked at, in the words of the table of plainly stored ones."""
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


def direct_base(base: ModelDir, adapters: Sequence[AdapterDir], arch: Architecture, task: Task) -> DirectBase:
    """Return the view of a plainly stored base, without the buffers of old checkpoints, which transformers computes."""
    reason = "a buffer that transformers computes and never loads"
    leftovers = tuple(
        InputRecord(path=tensor.path, name=name, action=TensorAction.DROPPED, reason=reason)
        for name, tensor in base.tensors.items()
        if is_computed(name)
    )
    tensors = {name: tensor for name, tensor in base.tensors.items() if not is_computed(name)}
    return DirectBase(
        base=replace(base, weights=replace(base.weights, tensors=tensors)) if leftovers else base,
        adapters=adapters,
        arch=arch,
        task=task,
        leftovers=leftovers,
    )
