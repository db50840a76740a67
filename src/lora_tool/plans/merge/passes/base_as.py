"""`base_as`: a 16-bit base with the weights that it had when it was loaded in four bits for training (QLoRA)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core.display import counted
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.keys import split_layer
from lora_tool.core.options import Options, Recorded, Section, option
from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.quantised.encodings import RoundedAs, encoding_of
from lora_tool.formats.quantised.four_bits import TrainedAs
from lora_tool.formats.quantised.names import full_precision_name
from lora_tool.models import architecture_of
from lora_tool.models.ends import MATRIX, is_end

if TYPE_CHECKING:
    from lora_tool.plans.merge.draft import MergeInputs


@dataclass(frozen=True, kw_only=True)
class BaseAs(Options):
    """The option of this pass."""

    section = Section.QUANTISED

    base_as: TrainedAs | str | None = option(
        None,
        "Round the linear layers of a 16-bit base to four bits and back, as QLoRA training loaded them.",
        parse=TrainedAs,
        recorded=Recorded.IF_GIVEN,
    )


def rounded_base(inputs: MergeInputs, options: BaseAs) -> MergeInputs:
    """Return the inputs with the base as it was in training. Raises `UnsupportedAdapter` as `as_trained` does."""
    if options.base_as is None:
        return inputs if inputs.is_quantised else replace(inputs, notes=(*inputs.notes, *_trained_on_quantised(inputs)))
    how = TrainedAs(options.base_as)
    base = as_trained(inputs.base, inputs.adapters, how)
    return replace(inputs, base=base, notes=(*inputs.notes, rounded_note(base, how)))


def _trained_on_quantised(inputs: MergeInputs) -> Iterator[str]:
    """Yield a note for each adapter that was trained on a base whose name says that it is quantised."""
    for adapter in inputs.adapters:
        named = (adapter.config.base_model if adapter.config else None) or ""
        if full_precision_name(named.rpartition("/")[2]) is not None:
            yield (
                f"{adapter.root} was trained on {named}, whose name says that it is quantised. If {inputs.stored.root} is "
                "the model that it was made from, its weights differ from the trained ones by the rounding: to get what "
                "was trained, merge into the named model, or round this one with `base_as=nf4`"
            )


_ROUTERS = ("gate", "router")
_NOT_ROUNDED = "leave out `base_as` to merge W + ΔW into the base as it is"


def as_trained(base: ModelDir, adapters: Sequence[AdapterDir], how: TrainedAs) -> ModelDir:
    """Return the base with its linear layers rounded to four bits and back, each when it is read.

    bitsandbytes replaces every linear layer but the output layer. Of a mixture of experts, the experts and the router,
    which new versions of transformers hold as parameters, are rounded only if an adapter changes them. Raises
    `UnsupportedAdapter` for a base that is quantised already, has no linear layers, or stores them transposed.
    """
    arch = architecture_of(base.whole_config.model_type or "")
    if any(encoding_of(tensor) is not None for tensor in base.tensors.values()):
        raise UnsupportedAdapter(
            f"{base.root}: the base is already quantised, so `base_as` has nothing to round", hint=_NOT_ROUNDED
        )
    if arch is not None and arch.conv1d:
        raise UnsupportedAdapter(
            f"{base.root}: {arch.model_type} stores linear layers transposed, and lora-tool cannot round those as "
            "bitsandbytes does",
            hint=_NOT_ROUNDED,
        )
    touched = frozenset(f"{key.module}.weight" for adapter in adapters for key in adapter.keys.values())
    chosen = {tensor.name: how.rounded(tensor) for tensor in _linear(base, touched)}
    if not chosen:
        raise UnsupportedAdapter(
            f"{base.root}: no tensor is the weight of a linear layer in a numbered layer", hint=_NOT_ROUNDED
        )
    tensors = {name: chosen.get(name, tensor) for name, tensor in base.tensors.items()}
    return replace(base, weights=replace(base.weights, tensors=tensors))


def rounded_note(base: ModelDir, how: TrainedAs) -> str:
    """Return the plan's note on a base that was rounded."""
    count = sum(isinstance(encoding_of(tensor), RoundedAs) for tensor in base.tensors.values())
    return (
        f"{counted(count, 'linear layer')} of the base rounded to {how} and back, as bitsandbytes loads it for training"
    )


def _linear(base: ModelDir, touched: frozenset[str]) -> Iterator[StoredTensor]:
    """Yield the weights of linear layers that bitsandbytes replaces."""
    for name, tensor in base.tensors.items():
        module, _, leaf = name.rpartition(".")
        is_matrix = (
            leaf == "weight" and len(tensor.shape) == MATRIX and tensor.dtype.is_float and tensor.dtype is not DType.F64
        )
        if not is_matrix or is_end(module) or split_layer(name)[0] is None or 0 in tensor.shape or tensor.is_transposed:
            continue
        of_experts = ".experts." in name or module.rpartition(".")[2] in _ROUTERS
        if name in touched or not of_experts:
            yield tensor
