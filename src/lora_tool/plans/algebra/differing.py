"""The tensors in which two models differ: as LoRA, saved whole, or refused, as no adapter can hold them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from msgspec import Struct

from lora_tool.adapters.experts import EXPERT, STACKED_BY_PEFT, is_taken_for_stacks
from lora_tool.checkpoints import ModelDir
from lora_tool.core.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.core.keys import is_under
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.stored import same_values
from lora_tool.models import architecture_of
from lora_tool.models.ends import (
    ADDED_BY_PEFT,
    LANGUAGE_MODELS,
    MATRIX,
    head_of,
    head_path,
    is_end,
    is_input,
    is_output,
    is_tied,
    output_name,
)
from lora_tool.models.table import Architecture
from lora_tool.plans.algebra.ranks import missing_experts

_NO_LINEAR = re.compile(r"emb|wte|wpe|norm|ln_|conv|score|position|router|^gate$|bias$", re.IGNORECASE)
"""Last parts of the names of modules that hold a matrix but may not be linear layers: they are saved whole."""
_MAMBAS = frozenset({"falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h"})
"""Model types on whose `out_proj` PEFT 0.21 refuses LoRA: the kernel of Mamba takes its weight past the module."""

_KEEP = "keep the model itself, or publish it: lora-tool push"
_TASKS = {"ForTokenClassification": "TOKEN_CLS", "ForQuestionAnswering": "QUESTION_ANS"}
"""How the names of classes with a head end, and PEFT's task types; any other has the labels of a text."""


class Differing(Struct, frozen=True, kw_only=True):
    """The differences of a model from its base."""

    low_rank: tuple[str, ...]
    """Modules whose weight differs and can have LoRA."""
    stacked: Mapping[str, str | None]
    """Modules that PEFT stacks with those, but did not change: each with one of those that has as many columns, if any."""
    transposed: frozenset[str]
    """Those of them that store it [in, out]."""
    whole: Mapping[str, str]
    """Name of a tensor that is saved whole → its name in the adapter."""
    saved_modules: tuple[str, ...]
    tied: Mapping[str, str]
    """Output layer that is tied to a saved embedding → the embedding's tensor: PEFT would leave it as the base's."""
    biases: bool
    """Whether biases of modules with LoRA differ."""
    left: tuple[StoredTensor, ...]
    """Tensors of the model that are not in the adapter: the base has the same values."""
    targets: tuple[str, ...]
    task_type: str | None


def differing(tuned: ModelDir, base: ModelDir, save: frozenset[str]) -> Differing:
    """Return where `tuned` differs from `base`; `save` are modules that are saved whole though LoRA could have them.

    Raises `IncompatibleBase` where the two are not of one architecture, `UnsupportedAdapter` for a change that an
    adapter has no place for.
    """
    arch = architecture_of(base.whole_config.model_type or "")
    conv1d = arch.conv1d if arch else frozenset()
    _require_alike(tuned, base)
    changed = {name: tensor for name, tensor in tuned.tensors.items() if not _is_in_base(tensor, base)}
    heads = {head_path(module) for module in (name.rpartition(".")[0] for name in changed) if head_of(module)}
    task = _task(tuned, classifies=bool(heads))
    saved = (*heads, *ADDED_BY_PEFT.get(task or "", ()))
    linear = {
        module
        for name, tensor in changed.items()
        if name in base.tensors and not _is_in(saved, name) and _is_linear(name, tensor, base.tensors[name], save)
        if _has_lora(module := name.removesuffix(".weight"), base.whole_config.model_type)
    }
    whole: dict[str, str] = {}
    modules: dict[str, None] = {}
    biases = False
    for name, tensor in changed.items():
        module, _, leaf = name.rpartition(".")
        if _is_in(saved, name) or (leaf == "weight" and module in linear):
            continue
        if leaf == "bias" and module in linear:
            biases = True
        else:
            _require_place(tensor, base.tensors.get(name, tensor), tuned, base)
            modules[module] = None
    if biases:  # PEFT trains and saves those of all modules, or of none
        whole |= {
            name: f"{module}.base_layer.bias" if module in linear else name
            for name in tuned.tensors
            for module, _, leaf in (name.rpartition("."),)
            if leaf == "bias" and head_of(module) is None and not EXPERT.fullmatch(module)
        }
    for module in modules:
        _require_own(module, tuned)
    # PEFT loads all of such a module, or nothing: buffers of a router, too
    whole |= {name: name for name in tuned.tensors if _is_in({*modules, *saved}, name)}
    tied = _tied(tuned, arch, modules)
    stacked = dict(missing_experts(linear, (name.removesuffix(".weight") for name in base.tensors)))
    return Differing(
        low_rank=tuple(sorted(linear)),
        stacked=stacked,
        transposed=frozenset(module for module in linear if module.rpartition(".")[2] in conv1d),
        whole=whole,
        saved_modules=(*sorted(heads), *modules, *(name.removesuffix(".weight") for name in tied)),
        tied=tied,
        biases=biases,
        left=tuple(each for name, each in tuned.tensors.items() if name not in changed and name not in whole),
        targets=_targets({*linear, *stacked}, base),
        task_type=task,
    )


def _is_in_base(tensor: StoredTensor, base: ModelDir) -> bool:
    known = base.tensors.get(tensor.name)
    return known is not None and (same_values(known, tensor) or _same_numbers(known, tensor))


def _tied(tuned: ModelDir, arch: Architecture | None, modules: Iterable[str]) -> dict[str, str]:
    """Return the output layer that has the values of a saved embedding, with that embedding's tensor."""
    named = list(modules)
    if any(map(is_output, named)):  # PEFT loads its bias and its weight, or neither
        named += (name.rpartition(".")[0] for name in tuned.tensors)
    embedding = next(filter(is_input, named), None)
    writes = str(next(iter(tuned.whole_config.architectures), "")).endswith(LANGUAGE_MODELS)
    if embedding is None or not (writes and is_tied(tuned)):
        return {}
    output = "lm_head.weight" if arch is None else output_name(arch)
    return {} if output is None else {output: f"{embedding}.weight"}


def _require_place(tensor: StoredTensor, known: StoredTensor, tuned: ModelDir, base: ModelDir) -> None:
    """Raise `UnsupportedAdapter` unless an adapter can hold the changed tensor whole."""
    module, _, leaf = tensor.name.rpartition(".")
    if EXPERT.fullmatch(module):
        raise UnsupportedAdapter(
            f"{tensor.path}: `{tensor.name}` differs from the base, but PEFT finds no single experts of a "
            f"{tuned.whole_config.model_type}: an adapter has no place for it",
            hint=_KEEP,
        )
    if not (tensor.dtype.is_float and known.dtype.is_float):
        raise UnsupportedAdapter(
            f"`{tensor.name}` is {tensor.dtype} in {tuned.root}, {known.dtype} in {base.root}: extract subtracts floats of "
            "16 bits or more, no quantised weights",
            hint="give both models as they were before they were quantised",
        )
    if not module or (leaf not in ("weight", "bias") and f"{module}.weight" not in tuned.tensors):
        raise UnsupportedAdapter(
            f"{tensor.path}: `{tensor.name}` differs from the base, but no module has it as its weight: an adapter has no "
            "place for it",
            hint=_KEEP,
        )


def _require_own(module: str, tuned: ModelDir) -> None:
    """Raise where an encoder and a decoder have this module as their embeddings: PEFT would replace only it."""
    prefix, _, leaf = module.rpartition(".")
    inner = f"{prefix}.encoder.embed_tokens.weight".removeprefix(".")
    if leaf == "shared" and inner not in tuned.tensors:
        raise UnsupportedAdapter(
            f"{tuned.root}: `{module}` differs from the base, and encoder and decoder have it as their embeddings, too: PEFT "
            "would change only one of the three",
            hint=_KEEP,
        )


def _has_lora(module: str, model_type: str | None) -> bool:
    """Return whether PEFT finds LoRA on a linear layer of this type of model."""
    if EXPERT.fullmatch(module):
        return model_type in STACKED_BY_PEFT
    past_lora = module.rpartition(".")[2] == "out_proj" and model_type in _MAMBAS
    return not (past_lora or is_taken_for_stacks(module, model_type))


def _same_numbers(one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether tensors of different float types hold the same numbers."""
    from lora_tool.formats.stored_numbers import READABLE, blocks  # numpy, only for such tensors

    if one.dtype is other.dtype or one.shape != other.shape or not {one.dtype, other.dtype} <= READABLE:
        return False
    return all(bool((left == right).all()) for left, right in zip(blocks(one), blocks(other), strict=True))


def _is_linear(name: str, tensor: StoredTensor, known: StoredTensor, save: frozenset[str]) -> bool:
    module, _, leaf = name.rpartition(".")
    fits = leaf == "weight" and len(tensor.shape) == MATRIX and tensor.shape == known.shape
    floats = tensor.dtype.is_float and known.dtype.is_float
    other = is_end(module) or head_of(module) is not None or _NO_LINEAR.search(module.rpartition(".")[2])
    return bool(fits and floats and not other and not is_under(module, save))


def _require_alike(tuned: ModelDir, base: ModelDir) -> None:
    """Raise unless the tuned model has the base's tensors, but for heads and ends, in the base's shapes."""
    ours, theirs = tuned.whole_config.model_type, base.whole_config.model_type
    if ours != theirs:
        raise IncompatibleBase(
            f"{tuned.root} is a {ours}, {base.root} a {theirs}: no adapter can turn one into the other"
        )
    strange = [name for name in tuned.tensors if name not in base.tensors and head_of(name.rpartition(".")[0]) is None]
    strange = [name for name in strange if not is_end(name.rpartition(".")[0])]
    if strange:
        raise IncompatibleBase(
            f"{tuned.root} has `{strange[0]}`, but {base.root} does not" + _more(strange),
            hint="give the base that it was trained on",
        )
    missing = [name for name in base.tensors if name not in tuned.tensors and not is_end(name.rpartition(".")[0])]
    missing = [name for name in missing if head_of(name.rpartition(".")[0]) is None]
    if missing:
        raise IncompatibleBase(f"{base.root} has `{missing[0]}`, but {tuned.root} does not" + _more(missing))
    for name, tensor in tuned.tensors.items():
        known = base.tensors.get(name)
        module = name.rpartition(".")[0]
        if known is not None and known.shape != tensor.shape and not is_end(module) and head_of(module) is None:
            raise IncompatibleBase(
                f"`{name}` is {list(tensor.shape)} in {tuned.root}, {list(known.shape)} in {base.root}: the two models have different sizes"
            )


def _more(names: Iterable[str]) -> str:
    count = len(list(names)) - 1
    return f" (and {count} more)" if count else ""


def _targets(linear: Iterable[str], base: ModelDir) -> tuple[str, ...]:
    """Return how PEFT finds these modules: by the last parts of their names where those mean no others."""
    wanted = set(linear)
    leaves = {module.rpartition(".")[2] for module in wanted}
    matrices = {name.removesuffix(".weight") for name, tensor in base.tensors.items() if name.endswith(".weight")}
    meant = {module for module in matrices if module.rpartition(".")[2] in leaves}
    return tuple(sorted(leaves if meant == wanted else wanted))


def _is_in(saved: Iterable[str], tensor: str) -> bool:
    """Return whether PEFT saves and loads the tensor with one of these modules: it searches for their names as text."""
    return any(f"{name}." in tensor for name in saved)


def _task(tuned: ModelDir, *, classifies: bool) -> str | None:
    """Return PEFT's task type of the model, by its class; None for one that PEFT has no class for."""
    named = str(next(iter(tuned.whole_config.architectures), ""))
    if not classifies:
        return "CAUSAL_LM" if named.endswith(("ForCausalLM", "LMHeadModel")) else None
    return next((task for ending, task in _TASKS.items() if named.endswith(ending)), "SEQ_CLS")
