"""A merge in the making: what its passes have decided so far."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, field

from lora_tool.adapters.support import OTHER_BASE, require_mergeable, require_weightable
from lora_tool.adapters.view import view_of
from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.core.options import Options
from lora_tool.core.tensors import DType, StoredTensor, TensorTable
from lora_tool.models import Architecture
from lora_tool.models.ends import Vocabulary
from lora_tool.plans.adapter.combine import Adapted, AdapterModules
from lora_tool.plans.base.task import Task
from lora_tool.plans.core.operation import LoraTerm
from lora_tool.plans.core.ops import Precision
from lora_tool.plans.core.steps import InputRecord, Shard, SideFile, Step

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
    turned: frozenset[str] = frozenset()
    """Parameters whose matrices lie transposed on disk, as they do in the merged model."""
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
    further_layers: tuple[StoredTensor, ...] = ()
    """Tensors that the class has no place for and the merged model keeps: of the layers that predict further tokens."""
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

    def is_turned(self, name: str) -> bool:
        """Return whether the matrices of this parameter lie transposed on disk."""
        return self.conversion is not None and name in self.conversion.turned

    def parameter_of(self, name: str) -> str:
        """Return the parameter in memory that a tensor of this name on disk is, or is a part of."""
        return name if self.conversion is None else self.conversion.mapping.place(name)


class Head(Struct, frozen=True, kw_only=True):
    """The classification head of the merged model: the tensors that have no place in a causal LM."""

    module: str
    name: str
    """The model's name of the last layer's weight, whose rows are the labels."""
    weight: StoredTensor
    """That weight, where it is: by its name in the adapter's file, if it comes from there."""
    num_labels: int


class TiedEmbeddings(Struct, frozen=True, kw_only=True):
    """The shared matrix of a causal LM: the tensor `output` is not on disk, or only as a copy of the embedding."""

    output: str
    candidates: tuple[StoredTensor, ...]
    """Matrices with a row per token: the embedding, and whatever has as many rows by chance."""
    root: Path

    @property
    def embedding(self) -> StoredTensor:
        """The input embedding.

        Raises `UnsupportedAdapter` where several tensors have its shape, `IncompatibleBase` where it is not there.
        """
        if not self.candidates:
            raise IncompatibleBase(
                f"{self.root}: `{self.output}` is tied to the embeddings, but the base has no embeddings under the names of its "
                "class",
                hint=OTHER_BASE,
            )
        if len(self.candidates) != 1:
            raise UnsupportedAdapter(
                f"{self.root}: `{self.output}` is tied, and {len(self.candidates)} tensors have a row per token, "
                "so lora-tool cannot tell which of them is the embedding"
            )
        return self.candidates[0]

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors that are, or may be, one of the ends."""
        return frozenset({self.output, *(tensor.name for tensor in self.candidates)})


class ModelEnds(Struct, frozen=True, kw_only=True):
    """The input embedding and the output layer of the merged model, and the tensors that are tied to them."""

    tied: TiedEmbeddings | None = None
    """The shared matrix of a causal LM with tied embeddings."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors of the base that are tied copies of another, by name: the output has them once."""
    trained_as_one: bool = False
    """Whether LoRA adds the same to both ends of the shared matrix, so that it is W + ΔW for both."""
    untied: bool = False
    """Whether the output has two matrices, and `tie_word_embeddings` is false in its config."""
    untied_tensors: Mapping[str, str] = field(default_factory=dict)
    """Other tensors that only the config tied, which are written too, and the base's tensors that they equal."""
    untied_unsaved: Mapping[str, str] = field(default_factory=dict)
    """The same where PEFT's merge leaves them out, and transformers re-initialises them on loading."""
    vocabulary: Vocabulary | None = None
    """Where the adapter brings another number of tokens than the base has."""


class Draft(Struct, frozen=True, kw_only=True):
    """The decisions of the passes so far; each field has the pass that sets it."""

    inputs: MergeInputs
    model: Model
    base: ModelDir
    """The base in the names of memory; `with_ends` gives it as many rows per token as the merged model has."""
    precision: Precision = Precision.FLOAT32
    dtype: DType | None = None
    """The type of all weights; None for each as in the base."""
    adapted: tuple[Adapted, ...] = ()
    """Each adapter with its changes (`with_deltas`)."""
    modules: AdapterModules = AdapterModules()
    """The changes of all adapters together."""
    per_expert: Mapping[str, tuple[LoraTerm, ...]] = field(default_factory=dict)
    """Tensor on disk → its own deltas, as a part of a fused parameter (`on_layers`)."""
    head: Head | None = None
    """A sequence classifier's (`with_head`); other classes' heads are parameters like any other."""
    labels: int | None = None
    """How many labels the merged model has; None for a class without any."""
    ends: ModelEnds = ModelEnds()
    steps: tuple[Step, ...] = ()
    """One for each tensor of the output: by its name in memory, from `on_disk` by that on disk."""
    leftovers: tuple[InputRecord, ...] = ()
    """Tensors of the inputs that no output tensor is, with what became of them."""
    shards: tuple[Shard, ...] = ()
    side_files: tuple[SideFile, ...] = ()
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    metadata: Mapping[str, str] | None = None
    """The texts in the headers of the weight files; None for the usual."""
    recorded: Mapping[str, object] = field(default_factory=dict)
    """The options, as the manifest records them."""


class MergeInputs(Struct, frozen=True, kw_only=True):
    """The opened inputs."""

    stored: ModelDir
    """The base as it is on disk."""
    base: ModelDir
    """The base with the values and the config that the merge starts from: dequantised, rounded, or its text model."""
    adapters: tuple[AdapterDir, ...]
    weights: tuple[float, ...]
    """The weight of each adapter's ΔW."""
    is_quantised: bool = False
    is_text_only: bool = False
    notes: tuple[str, ...] = ()


def require_exact(inputs: MergeInputs, _: Options) -> MergeInputs:
    """Return the inputs. Raises `UnsupportedAdapter` for adapters that cannot be merged exactly, with their weights."""
    for adapter in inputs.adapters:
        require_mergeable(view_of(adapter), lambda module: inputs.base.tensors.get(f"{module}.weight"))
    require_weightable(inputs.adapters, inputs.weights)
    return inputs
