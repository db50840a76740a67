"""Finding an adapter's modules among a base model's tensors, or saying why that cannot be done by name."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from msgspec.structs import replace

from lora_tool.adapters.experts import IN_EXPERT
from lora_tool.adapters.targeting import trained_for
from lora_tool.adapters.view import LoraLayer, view_of
from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.checkpoints.quantised import in_full_precision
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.formats.model_config import ModelConfig
from lora_tool.models import Architecture, architecture_of
from lora_tool.models.ends import embeddings, head_of, is_new_module
from lora_tool.models.model_tensors import base_prefixes, prefixes_of, tied_modules
from lora_tool.models.text_classes import TEXT_CLASSES, TextClass
from lora_tool.rules.engine.base_match import BaseMatch
from lora_tool.rules.engine.subjects import AdapterSubject
from lora_tool.rules.shared.merged_class import makes_unknown_class

_OUTPUT = "lm_head.weight"
"""What every class of transformers that has it on disk has in memory, too."""


def match_base(base: ModelDir, adapter: AdapterConfig, modules: Iterable[str]) -> BaseMatch | str:
    """Return how the module paths are named in the base; a sentence where names on disk may mean something else.

    A checkpoint of the model without its head, as the published `gpt2`, has other beginnings: the one under which
    most modules are found is taken.
    """
    if base.config is None or base.is_broken:
        return f"the base model {base.root} cannot be read: lora-tool validate {shlex.quote(str(base.root))}"
    if "layer_replication" in adapter.refused:
        return "`layer_replication` numbers the adapter's layers differently from the base's"
    config = base.config
    arch, text = architecture_of(config.model_type or ""), TEXT_CLASSES.get(config.model_type or "")
    if (arch is None and text is None) or config.custom_code:
        return _may_differ(config)
    try:
        base = in_full_precision(base)
    except UnsupportedAdapter as error:
        return str(error)
    wanted = [module for module in modules if head_of(module) is None]
    held = base.modules
    if arch is None:
        return (_text_match(base, text, held, wanted) if text else None) or _may_differ(config)
    return _best_match(base, arch, wanted)


def _best_match(base: ModelDir, arch: Architecture, wanted: Sequence[str]) -> BaseMatch:
    """Return the match that finds most of the modules `wanted`, if possible without removing or adding a prefix."""
    best, most = BaseMatch(base=base, arch=arch), -1
    for strip, add in _shifts(wanted[0], base.modules, arch) if wanted else ():
        match = BaseMatch(base=base, arch=arch, strip=strip, add=add)
        found = sum(map(base.modules.__contains__, map(match.name, wanted)))
        if found > most:
            best, most = match, found
        if found == len(wanted):  # as nearly always
            break
    return best


def same_names(base: ModelDir, adapter: AdapterConfig, modules: Iterable[str]) -> BaseMatch | None:
    """Return a match of the modules that the base has under the same names, whatever its other names mean; None if it
    has none of them.

    transformers renames, fuses and splits what it reads, but gives nothing the name that another tensor has on disk.
    """
    if base.config is None or base.is_broken or "layer_replication" in adapter.refused:
        return None
    try:
        plain = in_full_precision(base)
    except UnsupportedAdapter:
        return None
    if not any(f"{module}.weight" in plain.tensors for module in modules):
        return None
    row = Architecture(
        model_type=base.config.model_type or "",
        causal_lm=None,
        sequence_classification=None,
        head=None,
        causal_only=(_OUTPUT,) if _OUTPUT in plain.tensors else (),
        conv1d=frozenset(),
    )
    return BaseMatch(base=plain, arch=row, in_part=True)


class AskNames(Protocol):
    """Gives adapter and base the names of memory, as a merge for a task does."""

    def __call__(
        self, adapter: AdapterDir, base: ModelDir, task: str | None, *, sure: bool
    ) -> tuple[AdapterDir, BaseMatch] | str:
        """Return both, or a sentence that says why it cannot; only to be `sure` it takes seconds."""


def as_in_memory(subject: AdapterSubject, adapter: AdapterDir, match: BaseMatch) -> AdapterSubject:
    """Return the subject with adapter and base in the names of memory."""
    view = view_of(adapter)
    return replace(
        subject, checkpoint=adapter, view=view, base=match.base, stored_base=None, match=match, same_names=None
    )


def with_names_in_memory(subject: AdapterSubject, names: AskNames) -> AdapterSubject:
    """Return the subject of an adapter whose base may have other names on disk with those in memory, or with the reason
    why they are not known; any other subject as it is.
    """
    base = subject.base
    if base is None or base.config is None or subject.why_no_match != _may_differ(base.config):
        return subject
    told = names(subject.checkpoint, base, subject.task, sure=subject.whole)
    if isinstance(told, str):
        return replace(subject, match=f"{subject.why_no_match}; {told}")
    return replace(subject, in_memory=as_in_memory(subject, *told))


def of_unknown_class(subject: AdapterSubject, names: AskNames) -> AdapterSubject | str | None:
    """Return the subject in the names of memory if no table knows the class that it makes of its base, or why those are
    not known; None of any other, and where the base has none of the modules.
    """
    base, match = subject.base, subject.match
    if base is None or not isinstance(match, BaseMatch) or not makes_unknown_class(subject):
        return None
    if not any(match.tensor(layer.target) for layer in subject.layers):
        return None
    told = names(subject.checkpoint, base, subject.task, sure=True)
    return told if isinstance(told, str) else as_in_memory(subject, *told)


def begin_as_with_a_head(subject: AdapterSubject, base: ModelDir) -> bool:
    """Return whether all paths begin, as those of the base do, with what classes with a head call their base model."""
    roots = {module.partition(".")[0] for module in base.modules} & base_prefixes()
    return all(layer.target.partition(".")[0] in roots for layer in subject.layers if not is_new_module(layer.target))


def _may_differ(config: ModelConfig) -> str:
    return f"the base is of {f'type {config.model_type}' if config.model_type else 'no known type'}, whose tensor names on disk may differ from those in memory"


def _text_match(base: ModelDir, text: TextClass, held: frozenset[str], wanted: Sequence[str]) -> BaseMatch | None:
    """Return the match of an adapter that was trained on the text class of a multimodal base, else None.

    None too for experts stored one by one: headers do not show their form in memory.
    """
    outside = frozenset(name for name in base.tensors if not text.holds(name))
    match = BaseMatch(base=base, arch=text.architecture, strip=text.strip, add=text.add, outside=outside)
    found = sum(match.name(module) in held for module in wanted)
    whole = frozenset(map(text.in_whole, held))
    as_they_are = sum(module in whole for module in wanted)
    return match if found > as_they_are and not any(map(IN_EXPERT.search, held)) else None


def _shifts(module: str, held: frozenset[str], arch: Architecture) -> Iterator[tuple[str, str]]:
    """Yield (prefix to remove, prefix to add) for a module path; first none."""
    yield "", ""
    first, _, rest = module.partition(".")
    own = frozenset(prefixes_of(arch.model_type).values()) or base_prefixes()
    if rest and first in own and rest.partition(".")[0] not in own - {first}:  # no class has a base model in another
        yield f"{first}.", ""
    for name in sorted(held):
        if name.endswith(f".{module}"):
            yield "", name.removesuffix(module)
            return


# The shape of a layer's ΔW, and the weight of the base that it is added to.


def held_or_tied(match: BaseMatch, module: str) -> StoredTensor | None:
    """Return the base's weight of a module; for an output layer that is not on disk, the embedding it is tied to."""
    held = match.tensor(module)
    if held is not None or f"{match.name(module)}.weight" not in match.arch.causal_only:
        return held
    inputs = embeddings(match.base, match.arch)
    return inputs[0] if len(inputs) == 1 else None


def delta_shape(
    match: BaseMatch, layer: LoraLayer, pair: tuple[StoredTensor, StoredTensor], *, bare: bool
) -> tuple[int, ...]:
    """Return the shape of lora_B·lora_A as the weight is stored; a `bare` parameter is not a Conv1D's weight to PEFT."""
    a, b = pair
    conv1d = match.arch.conv1d
    is_conv1d = not conv1d.isdisjoint({layer.target, layer.target.rpartition(".")[2]})
    transposed = layer.embedding or (is_conv1d and not bare)
    return (a.shape[1], b.shape[0], *a.shape[2:]) if transposed else (b.shape[0], a.shape[1], *a.shape[2:])


# Which modules of an adapter are rightly not in its base's files, and which are none of a classifier's.


_DECODERS = (".lm_head.decoder", ".predictions.decoder", ".entity_predictions.decoder")
_BY_NAME = ("lm_head", "lm_head.out_proj")
"""Output layers of classes without a row; the second is T5Gemma's."""


def may_be_absent(subject: AdapterSubject, module: str) -> bool:
    """Return whether a module is rightly not in the base's files: a head of the expected class, an output layer
    tied to the embeddings, or embeddings that are tied to others. In the names of memory everything is there.
    """
    match = subject.matched
    by_name = () if subject.is_reward() else _BY_NAME
    if match.facts is None and _is_tied_to_another(match, module):
        return True
    if match.facts is not None or head_of(module) is None:
        return match.facts is None and (module in {*by_name, *_outputs(match)} or _is_tied_decoder(match, module))
    said = subject.task or trained_for(subject.config)
    return said is not None or f"{module}.".startswith(f"{match.arch.head}.")


def is_decoder(module: str) -> bool:
    """Return whether a module is, by its name, the output layer of BERT's kin, which is tied to the embeddings."""
    return f".{module}".endswith(_DECODERS)


def of_causal_lm(subject: AdapterSubject, module: str) -> str | None:
    """Return the class that has no place for the module, where it is an output layer's in a classifier's adapter."""
    match = subject.matched
    of_other = subject.is_reward() and match.name(module) in _outputs(match)
    return match.arch.sequence_classification if of_other else None


def _is_tied_to_another(match: BaseMatch, module: str) -> bool:
    """Return whether the module's weight is that of another, which the base has: BART's encoder and decoder share one."""
    other = tied_modules(match.arch.model_type).get(match.name(module))
    return other is not None and f"{other}.weight" in match.base.tensors


def _is_tied_decoder(match: BaseMatch, module: str) -> bool:
    """Return whether a module is, by its name, tied to embeddings of a class whose own output layers no table names."""
    named = match.base.config.architectures if match.base.config else ()
    known = {match.arch.causal_lm, match.arch.sequence_classification}
    return bool(named) and known.isdisjoint(named) and is_decoder(module)


def _outputs(match: BaseMatch) -> frozenset[str]:
    """Return the modules that a classifier of the architecture does not have."""
    return frozenset(name.rpartition(".")[0] for name in match.arch.causal_only)
