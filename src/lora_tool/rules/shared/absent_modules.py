"""Which modules of an adapter are rightly not in its base's files, and which are none of a classifier's."""

from __future__ import annotations

from lora_tool.adapters.targeting import trained_for
from lora_tool.models.heads import head_of
from lora_tool.models.model_tensors import tied_modules
from lora_tool.rules.engine.subjects import AdapterSubject, BaseMatch

_DECODERS = (".lm_head.decoder", ".predictions.decoder", ".entity_predictions.decoder")
_BY_NAME = ("lm_head", "lm_head.out_proj")
"""Output layers of classes without a row; the second is T5Gemma's."""


def may_be_absent(subject: AdapterSubject, module: str) -> bool:
    """Return whether a module is rightly not in the base's files: a head of the class that is said, an output layer
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
