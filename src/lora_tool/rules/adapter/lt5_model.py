"""LT504 and LT513 to LT515: an adapter and its base as one model: its vocabulary, its head, its ties, all of it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from lora_tool.adapters.support import UNMERGED
from lora_tool.adapters.targeting import saved_as_one, trained_for
from lora_tool.checkpoints.nearby import way_to_head
from lora_tool.core.display import counted
from lora_tool.core.report import Severity
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.formats.stored import same_values
from lora_tool.models.ends import (
    MATRIX,
    Vocabulary,
    embeddings,
    head_of,
    is_end,
    last_weights,
    other_vocabulary,
    output_name,
    stored_twice,
)
from lora_tool.models.model_tensors import ModelTensors, base_prefixes, own_tensors
from lora_tool.rules.adapter.lt3_head import (
    CLASSIFYING,
    carries_head,
    head_weight,
    lora_head_rows,
    lora_heads,
    saved_heads,
)
from lora_tool.rules.adapter.lt5_base import whole_ends, whole_tensors
from lora_tool.rules.engine.base_match import BaseMatch
from lora_tool.rules.engine.registry import Fault, Need, doubted, rule
from lora_tool.rules.engine.subjects import AdapterSubject
from lora_tool.rules.shared.merged_class import merged_tensors

_ALL = frozenset({Need.WEIGHTS, Need.CONFIG, Need.BASE})
_NUMBERED = re.compile(r"\.\d+\.")
"""In the names of layers, whose ties no config undoes."""


def _by_base_names(match: BaseMatch, whole: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the adapter's whole tensors by the base's names."""
    return {match.name(name): tensor for name, tensor in whole.items()}


@rule("LT504", Severity.WARNING, on=AdapterSubject, needs=_ALL | {Need.SAME_NAMES}, unmergeable=True)
def vocabulary_differs(subject: AdapterSubject) -> Iterator[Fault]:
    """A different vocabulary from the base's.

    What it does: Compares the rows of embeddings and output layers that the adapter carries or adapts with the base's.
    Why it matters: Tokens were added before training. PEFT fails with a size mismatch unless the base's embeddings are
    resized first, and the model needs the adapter's tokenizer. This is reported as info if the adapter carries every
    embedding and output layer of the base with the same number of new rows. It is an error if those matrices differ in
    their rows; if one of them has new rows and another has none, so that these were random; and if LoRA was trained on
    a matrix with another number of rows than the base's that the adapter does not carry.
    Example: `embed_tokens.weight` has 151,668 rows in the adapter, but 151,666 in the base.
    What to do: Resize the base before loading: `model.resize_token_embeddings(ROWS)`, and use the adapter's tokenizer.
    """
    match = subject.matched
    vocabularies = tuple(_vocabularies(subject))
    if not vocabularies:
        return
    severity = Severity.INFO if _is_extended(subject) else None
    carried = {*subject.view.saved, *subject.view.frozen}
    adapted = {layer.target for layer in subject.layers}
    torn = len(_rows_of_ends(subject, match)) > 1
    vocabulary = _brought(subject, match)
    left = _left_as_it_was(subject, match, vocabulary) if vocabulary is not None else None
    for tensor, module, rows in vocabularies:
        base = match.tensor(module)
        if base is not None and len(base.shape) == MATRIX and base.shape[0] != rows:
            message = f"has {rows:,} vocabulary rows, but the base's `{base.name}` has {base.shape[0]:,}"
            lost = torn or (module in adapted and f"{module}.weight" not in carried)
            if match.in_part and not lost and not (left in match.arch.causal_only and subject.has_output_layer):
                continue  # which other ends the model has is not known
            lost = lost or vocabulary is None or base.name not in vocabulary.names
            if left is not None and not lost:
                message += f", and the adapter has no new rows for `{left}`"
            severe = Severity.ERROR if lost or left is not None else severity
            yield Fault(subject=tensor.name, message=message, severity=severe)


def _brought(subject: AdapterSubject, match: BaseMatch) -> Vocabulary | None:
    """Return the vocabulary that the adapter brings."""
    whole = {f"{match.name(module)}.{leaf}": tensor for tensor, module, leaf in whole_tensors(subject)}
    return other_vocabulary(match.base, match.arch, whole)


def _left_as_it_was(subject: AdapterSubject, match: BaseMatch, vocabulary: Vocabulary) -> str | None:
    """Return an end of the base that would have to be resized, and whose rows the adapter does not bring."""
    tied = match.facts.tied if match.facts else stored_twice(match.base, match.arch)
    absent = () if subject.has_output_layer else match.arch.causal_only
    return next(vocabulary.lacking(match.base, {*tied, *absent}), None)


def _rows_of_ends(subject: AdapterSubject, match: BaseMatch) -> set[int]:
    """Return the numbers of rows that the whole ends in the adapter have for the base's one vocabulary."""
    size = match.base.config.vocab_size if match.base.config else None
    held = ((tensor, match.tensor(module)) for tensor, module in whole_ends(subject))
    return {tensor.shape[0] for tensor, base in held if base is None or base.shape == (size, *tensor.shape[1:])}


def _is_extended(subject: AdapterSubject) -> bool:
    """Whether tokens were added: all ends of the base are in the adapter, whole, with the same larger number of rows."""
    match = subject.matched
    whole = {match.name(module): tensor.shape[0] for tensor, module in whole_ends(subject)}
    held = {
        name.removesuffix(".weight"): tensor.shape[0]
        for name, tensor in match.base.tensors.items()
        if name.endswith(".weight") and is_end(name.removesuffix(".weight")) and len(tensor.shape) == MATRIX
    }
    ends = held if subject.config.task_type == "CAUSAL_LM" else held.keys() & whole.keys()
    rows = {whole.get(end) for end in ends}
    return len(rows) == 1 and all((whole.get(end) or 0) > held[end] for end in ends)


def _vocabularies(subject: AdapterSubject) -> Iterator[tuple[StoredTensor, str, int]]:
    for tensor, module in whole_ends(subject):
        yield tensor, module, tensor.shape[0]
    for layer in subject.view.found(lambda layer: [layer] if is_end(layer.target) else []):
        pair = layer.pair
        if pair is not None and layer.rank is not None:
            yield pair[0], layer.target, pair[0].shape[1] if layer.embedding else pair[1].shape[0]


@rule("LT513", Severity.ERROR, on=AdapterSubject, needs=_ALL, unmergeable=True)
def head_of_another_class(subject: AdapterSubject) -> Iterator[Fault]:
    """The head does not belong to the model's class.

    What it does: Compares the head of a classifier's adapter with the head of the base's architecture: its name, the
    number of labels in all tensors of the head, including the base's, and the requested number.
    Why it matters: PEFT silently drops a head under another name, and transformers initialises a random one in its
    place, a different one on every load. A weight and a bias of different lengths cannot be loaded.
    Example: `classifier.weight` is in the adapter, but the head of a `Qwen2ForSequenceClassification` is called
    `score`.
    What to do: Give the model that the adapter was trained on: `--base MODEL`; or rename the head's tensors as the
    class expects.
    """
    match = subject.matched
    whole = _by_base_names(match, {**subject.view.frozen, **subject.view.saved})
    if _is_classifier(subject, match) and match.arch.head and match.arch.sequence_classification:
        yield from _head_elsewhere(subject, match, whole)
    sizes = tuple(_labels(subject, match, whole))
    tensor, size = sizes[0] if sizes else (None, subject.num_labels)
    other = next((each for each in sizes if each[1] != size), None)
    if tensor is not None and other is not None:
        message = f"is for {counted(size or 0, 'label')}, but `{other[0].name}` is for {other[1]}"
        yield Fault(subject=tensor.name, message=message, path=tensor.path)
    elif tensor is not None and subject.num_labels not in (None, size) and not _compared_by_name(subject):
        message = f"is for {counted(size or 0, 'label')}, not the requested {subject.num_labels or 0}"
        yield Fault(subject=tensor.name, message=message, path=tensor.path)


def _is_classifier(subject: AdapterSubject, match: BaseMatch) -> bool:
    """Whether a sequence classifier is made of it: by options or config, else by its head or the base's class."""
    said = subject.is_reward() or trained_for(subject.config) == "SEQ_CLS"
    if said or subject.task is not None or trained_for(subject.config) is not None:
        return said
    config = match.base.config
    own = config is not None and any(name.endswith(CLASSIFYING[0]) for name in config.architectures)
    return own or any(f"{path}.".startswith(f"{match.arch.head}.") for path in saved_heads(subject))


def _compared_by_name(subject: AdapterSubject) -> bool:
    """Whether LT303 compares the labels, which knows heads by their names."""
    return head_weight(saved_heads(subject)) is not None or lora_head_rows(subject) is not None


def _head_elsewhere(subject: AdapterSubject, match: BaseMatch, whole: Mapping[str, StoredTensor]) -> Iterator[Fault]:
    """Look for the head under the names that its class has; one that is nowhere at all is LT301's or LT302's."""
    head, class_name = match.arch.head or "", match.arch.sequence_classification or ""
    names, allowed = last_weights(head), own_tensors(match.arch.model_type, class_name)
    expected = (
        subject.layers
        and not carries_head(subject)
        and (subject.is_reward() or trained_for(subject.config) == "SEQ_CLS" or lora_heads(subject))
    )
    lost = not expected and not any(name in whole or match.held(name) for name in names)
    for name, tensor in whole.items():
        inside, held = name.startswith(f"{head}."), name in match.base.tensors or match.facts is not None
        if held:  # LT506 sees it in the names of memory
            continue
        if inside and allowed is not None and name not in allowed:
            yield Fault(subject=tensor.name, message=f"is not part of the head of a {class_name}: PEFT would drop it")
        elif head_of(name) and not inside:
            why = f", and neither adapter nor base has `{names[0]}`" if lost else ""
            yield Fault(subject=tensor.name, message=f"belongs to a head that a {class_name} does not have{why}")
            lost = False
    if lost:
        message = (
            f"neither adapter nor base has `{names[0]}`, the head of a {class_name}: transformers would "
            "initialise it at random"
        )
        yield Fault(message=message, hint=way_to_head(subject.checkpoint.root, head))


def _labels(
    subject: AdapterSubject, match: BaseMatch, whole: Mapping[str, StoredTensor]
) -> Iterator[tuple[StoredTensor, int]]:
    """Yield the tensors whose shape depends on the number of labels, the adapter's before the base's, and their number."""
    at: dict[str, int] = {}
    if match.facts is not None:
        at = dict(match.facts.label_axes)
    elif _is_classifier(subject, match) and match.arch.head:
        last = next((name for name in last_weights(match.arch.head) if name in whole or match.held(name)), None)
        at = {} if last is None else {last: 0, f"{last.removesuffix('.weight')}.bias": 0}
    for name in sorted(at, key=lambda name: name not in whole):
        tensor = whole.get(name) or match.held(name)
        if tensor is not None and len(tensor.shape) > at[name]:
            yield tensor, tensor.shape[at[name]]


@rule("LT514", Severity.ERROR, on=AdapterSubject, needs=_ALL, unmergeable=True)
def two_values_for_one(subject: AdapterSubject) -> Iterator[Fault]:
    """Two values for tensors that the base ties.

    What it does: Compares the adapter's values for two tensors that the base ties: embeddings and output layer, whole
    or as trained tokens, and others that the model's class ties. A layer trained as a separate module
    (`modules_to_save` without `ensure_weight_tying`) stays separate, and so do both layers under `--untie`.
    Why it matters: The adapter was trained on a base with separate embeddings and output layer. PEFT loads both into
    the one tied matrix, the second over the first, and half of the training is lost.
    Example: The adapter has `embed_tokens.weight` and `lm_head.weight` with different values, but the base has
    `"tie_word_embeddings": true`.
    What to do: Give the base that it was trained on, saved with `tie_word_embeddings=False`, or merge into two matrices
    with `--untie`.
    """
    match = subject.matched
    tied = match.facts.tied if match.facts else _tied_output(subject, match)
    if not tied:
        return
    saved, frozen = _by_base_names(match, subject.view.saved), _by_base_names(match, subject.view.frozen)
    output = f"{match.facts.output}.weight" if match.facts else output_name(match.arch)
    for name, of in tied.items():
        if name == output:
            yield from _two_ends(subject, match, (name, of), saved, frozen)
            continue
        biases = {end: frozen[end] for end in (name, of) if end in frozen and end.endswith(".bias")}
        mine, its = ({**biases, **saved}.get(end) for end in (name, of))
        if mine is not None and its is not None and not _saves_one(subject.config, name, of):
            yield from _unless_same(match, its, mine, hint=UNMERGED if _NUMBERED.search(name) else None)


def _tied_output(subject: AdapterSubject, match: BaseMatch) -> dict[str, str]:
    """Return the output layer of a plainly stored base, and the embedding that is the same, where it is one."""
    output, inputs = output_name(match.arch), embeddings(match.base, match.arch)
    if output is None or len(inputs) != 1 or not subject.has_output_layer:
        return {}
    return {output: inputs[0].name}


def _two_ends(
    subject: AdapterSubject,
    match: BaseMatch,
    ends: tuple[str, str],
    saved: Mapping[str, StoredTensor],
    frozen: Mapping[str, StoredTensor],
) -> Iterator[Fault]:
    """Compare the output layer, the first of the `ends`, with the embedding."""
    output, embedding = ends
    own, shared = match.held(output), match.held(embedding)
    config = subject.config
    apart = (end in saved and config.saves(end.removesuffix(".weight")) for end in ends)
    tokens = {match.name(module): trained for module, trained in subject.view.tokens.items()}
    rows, others = (tokens.get(end.removesuffix(".weight")) for end in ends)
    as_one = saved_as_one(config, output.removesuffix(".weight"), held=output in saved)
    if not (output in saved or rows) or (any(apart) and not as_one):
        return
    if own is not None and (_says_untied(match) or shared is None or not same_values(own, shared)):
        return
    if output in saved and (one := saved.get(embedding) or shared):
        yield from _unless_same(match, one, saved[output])
    if rows is None:
        return
    if others is None or others.indices != rows.indices:
        message = f"trains other tokens than `{embedding}` does, but {match.base.root} ties the two"
        yield Fault(subject=rows.rows.name, message=message)
        return
    yield from _unless_same(match, others.rows, rows.rows)
    if output in frozen and (one := frozen.get(embedding) or shared):
        yield from _unless_same(match, one, frozen[output])


def _says_untied(match: BaseMatch) -> bool:
    return match.base.config is None or match.base.config.tie_word_embeddings is False


def _saves_one(config: AdapterConfig, name: str, of: str) -> bool:
    """Return whether a module with the one tensor is saved whole, and the other is outside it."""
    entries = (f"{entry}." for entry in config.modules_to_save)
    return any(entry in name and entry not in of for entry in entries)


def _unless_same(match: BaseMatch, one: StoredTensor, other: StoredTensor, hint: str | None = None) -> Iterator[Fault]:
    if not same_values(one, other):
        message = f"has other values than `{one.name}`, but {match.base.root} ties the two"
        yield Fault(subject=other.name, message=message, hint=hint)


@rule("LT515", Severity.ERROR, on=AdapterSubject, needs=_ALL | {Need.CLASS}, unmergeable=True)
def base_lacks(subject: AdapterSubject) -> Iterator[Fault]:
    """The base lacks tensors that the model's class has.

    What it does: Looks for each parameter of the class in the base and among the whole tensors of the adapter. The
    parameters come from a built-in table of architectures, and from transformers in merges that need it, and if the
    table finds any missing and transformers is installed (see LT317). LT301 and LT513 look at heads.
    Why it matters: transformers initialises missing parameters with random values, different ones on every load, with a
    log line at most.
    Example: The base was saved without `lm_head.weight`, and the adapter does not have it either.
    What to do: Give the complete model that the adapter was trained on: `--base MODEL`. A head may be in the training
    checkpoint. What the base's class does not have, such as a pooler, was random when training began: if the adapter does
    not have it, train again with its name in `modules_to_save`.
    """
    match = subject.matched
    class_name, lacking, doubt = (_lacking_in_memory if match.facts else _lacking_on_disk)(subject, match)
    if lacking:
        more = f" (and {len(lacking) - 1} more)" if len(lacking) > 1 else ""
        message = f"has no `{lacking[0]}`{more}, which a {class_name} needs, and neither has the adapter"
        head = next((name for name in lacking if match.facts and name in match.facts.label_axes), None)
        hint = (
            way_to_head(subject.checkpoint.root, head.split(".")[-2])
            if head
            else _never_saved(subject, class_name, lacking)
        )
        message = f"{message}: transformers would initialise it at random"
        fault = Fault(message=message, path=match.base.root, hint=hint, mergeable=match.facts is None)
        yield doubted(fault, doubt)


def _never_saved(subject: AdapterSubject, class_name: str, lacking: list[str]) -> str | None:
    """Return how to train what the base's own class does not have; None where the base should have it."""
    config = None if subject.base is None else subject.base.config
    if config is None or class_name in config.architectures or not config.architectures:
        return None
    fresh = [
        name.removeprefix(f"{name.partition('.')[0]}.") if name.partition(".")[0] in base_prefixes() else name
        for name in lacking
    ]
    names = dict.fromkeys([*subject.config.modules_to_save, *(name.partition(".")[0] for name in fresh)])
    listed = ", ".join(f'"{name}"' for name in names)
    return (
        "give the model that the adapter was trained on; if this is it, they were random in training and never saved: "
        f"train again with modules_to_save=[{listed}]"
    )


def _lacking_in_memory(subject: AdapterSubject, match: BaseMatch) -> tuple[str, list[str], None]:
    """Return what transformers calls the class, and its parameters that are nowhere."""
    if match.facts is None:
        raise TypeError("transformers was not asked")
    shapes, tied, unsaved = match.facts.shapes, match.facts.tied, match.facts.unsaved | match.facts.optional
    whole = _by_base_names(match, {**subject.view.frozen, **subject.view.saved})
    there = {tied.get(name, name) for name in shapes if name in whole or match.held(name)}
    return match.facts.class_name, [name for name in shapes if tied.get(name, name) not in there | unsaved], None


def _lacking_on_disk(subject: AdapterSubject, match: BaseMatch) -> tuple[str, list[str], str | None]:
    """Return the class that the adapter's task makes, its parameters that are nowhere, and why that may be wrong."""
    known = merged_tensors(subject)
    if known is not None and _nowhere(subject, match, known):
        known = merged_tensors(subject, sure=True)
    elif known is None and subject.whole and subject.stored_base is not None:
        known = subject.stored_base.class_tensors  # of a type that no table has, as transformers says
    return ("", [], None) if known is None else (known.class_name or "", _nowhere(subject, match, known), known.doubt)


def _nowhere(subject: AdapterSubject, match: BaseMatch, known: ModelTensors) -> list[str]:
    """Return the parameters that neither base nor adapter has; of a classifier's head that is nowhere other rules tell."""
    if not known.missing:
        return []
    whole = _by_base_names(match, {**subject.view.frozen, **subject.view.saved})
    heads = {*map(head_of, whole)} - {None} or {head_of(name) for name in known.missing if _has_head(match)}
    absent = set() if subject.has_output_layer else set(match.arch.causal_only)
    other = {*whole, *absent}
    told = (known.class_name or "").endswith(CLASSIFYING)
    return [name for name in known.missing if name not in other and (not told or head_of(name) in {None, *heads})]


def _has_head(match: BaseMatch) -> bool:
    return any(map(head_of, match.base.tensors))
