"""LT5xx: an adapter against its base model, by names and shapes."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from lora_tool.adapter import targeting
from lora_tool.adapter.view import MATRIX, LoraLayer
from lora_tool.architectures.ends import embeddings, is_end
from lora_tool.architectures.heads import CLASSIFICATION_TASKS, head_of, is_last_layer
from lora_tool.display import counted
from lora_tool.keys import Part, split_layer
from lora_tool.report import Severity
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject, BaseMatch
from lora_tool.tensors import StoredTensor

_ALL = frozenset({Need.WEIGHTS, Need.CONFIG, Need.BASE})
_RESHAPED = frozenset({"use_bdlora", "use_qalora"})
"""Variants whose factors are smaller than the weight: in diagonal blocks, or over pooled inputs."""
_WIDTHS = (
    "hidden_size",
    "n_embd",
    "d_model",
    "word_embed_proj_dim",
    "embedding_size",
    "dim",
    "emb_dim",
    "pooler_hidden_size",
)
_TIED_DECODERS = (".lm_head.decoder", ".predictions.decoder")
"""The output layer of BERT's kin, which is tied to the embeddings."""
_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


def _matched(subject: AdapterSubject) -> BaseMatch:
    if not isinstance(subject.match, BaseMatch):
        raise TypeError("rules that need a base run only with one that matches")
    return subject.match


def _may_be_absent(match: BaseMatch, module: str) -> bool:
    """Whether a module is rightly not in the base's files: a head, or an output layer tied to the embeddings."""
    names = {name.rpartition(".")[0] for name in match.arch.causal_only} | {"lm_head"}
    return head_of(module) is not None or module in names


def _adapted(subject: AdapterSubject) -> Mapping[str, str]:
    """Return each module with LoRA or trained tokens, and the name of one of its tensors."""
    tokens = {module: trained.rows.name for module, trained in subject.view.tokens.items()}
    return {**tokens, **{layer.target: layer.any_tensor.name for layer in subject.layers}}


def _held_indices(match: BaseMatch) -> Mapping[str, int]:
    """Return the largest number that each place in the base's names has: ``model.layers.`` → 31."""
    largest: dict[str, int] = {}
    for name in match.base.tensors:
        number = _INDEX.search(name)
        if number and len(number[0]) < 10:  # noqa: PLR2004 - a number of layers, not of stars
            place = name[: number.start()]
            largest[place] = max(largest.get(place, -1), int(number[0]))
    return largest


def _beyond(match: BaseMatch, held: Mapping[str, int], module: str) -> tuple[int, int] | None:
    """Return the module's layer number and the base's last one, where it is larger."""
    name = match.name(module) + "."
    number = _INDEX.search(name)
    last = held.get(name[: number.start()]) if number else None
    if number is None or last is None or int(number[0]) <= last:
        return None
    return int(number[0]), last


def _absent(subject: AdapterSubject) -> Iterator[tuple[str, str]]:
    """Yield module and tensor name of what the adapter adapts and the base does not have."""
    match = _matched(subject)
    held = frozenset(name.rpartition(".")[0] for name in match.base.tensors)
    for module, name in _adapted(subject).items():
        if match.name(module) not in held and not _may_be_absent(match, module):
            yield module, name


@rule("LT501", Severity.ERROR, on=AdapterSubject, needs=_ALL, unmergeable=True)
def target_absent(subject: AdapterSubject) -> Iterator[Fault]:
    """A module that the base does not have.

    ## What it does
    Looks for each adapted module among the base's tensors.

    ## Why it matters
    PEFT drops what it finds no module for: with a warning at most, part of the adapter, or all of it, does nothing.

    ## Example
    LoRA on `model.layers.0.self_attn.qkv_proj`, and the base has `q_proj`, `k_proj` and `v_proj`.

    ## What to do
    Give the model that the adapter was trained on: `--base MODEL`.
    """
    match = _matched(subject)
    held = _held_indices(match)
    absent = [(module, name) for module, name in _absent(subject) if _beyond(match, held, module) is None]
    modules = sorted({name.rpartition(".")[0] for name in match.base.tensors}) if absent else []
    if absent and len(absent) == len(_adapted(subject)):
        message = f"none of its {len(absent)} modules is in {match.base.root}; the first is `{absent[0][0]}`"
        yield Fault(message=message)
        return
    for module, name in absent:
        close = difflib.get_close_matches(match.name(module), modules, n=1) if module is absent[0][0] else []
        nearest = f"; the nearest there is `{close[0]}`" if close else ""
        yield Fault(subject=name, message=f"adapts `{module}`, which {match.base.root} does not have{nearest}")


@rule("LT502", Severity.ERROR, on=AdapterSubject, needs=_ALL, unmergeable=True)
def dimensions_differ(subject: AdapterSubject) -> Iterator[Fault]:
    """Sizes that are not the base's.

    ## What it does
    Compares lora_B·lora_A and the rows of trained tokens with the base's weight, and the width of a new head with the
    base's hidden states.

    ## Why it matters
    The adapter was trained on another model: loading fails with a size mismatch.

    ## Example
    lora_B·lora_A is [4096, 4096], and the base's `q_proj.weight` is [3584, 3584].

    ## What to do
    Give the model that the adapter was trained on: `--base MODEL`.
    """
    match = _matched(subject)
    yield from _heads_of_other_width(subject, match)
    if _RESHAPED & set(subject.config.refused):
        return
    for layer in subject.layers:
        held, pair = _held_or_tied(match, layer.target), layer.pair
        weight = subject.view.frozen.get(f"{layer.target}.weight") or held
        if weight is None or pair is None or layer.rank is None:
            continue
        if not weight.dtype.is_float:
            yield Fault(subject=pair[0].name, message=f"is for `{weight.name}`, whose {weight.dtype} are no floats")
        needed = _delta_shape(match, layer, pair, bare=not subject.config.targets(layer.target))
        rows_only = weight is match.tensor(layer.target) and _is_vocabulary(layer.target)
        rows_only = rows_only and needed[1:] == weight.shape[1:]
        comparable = MATRIX in (len(needed), len(weight.shape))  # a kernel's inputs may be in groups
        if comparable and needed != weight.shape and not rows_only:
            whose = "the base's" if weight is held else "the adapter's own"
            message = f"lora_B·lora_A is {list(needed)}, {whose} `{weight.name}` is {list(weight.shape)}"
            yield Fault(subject=pair[0].name, message=message)
    for module, tokens in subject.view.tokens.items():
        weight, rows = match.tensor(module), tokens.rows
        if weight is not None and rows.shape[1:] != weight.shape[1:]:
            message = f"has rows of {list(rows.shape[1:])}, the base's `{weight.name}` of {list(weight.shape[1:])}"
            yield Fault(subject=rows.name, message=message)


def _held_or_tied(match: BaseMatch, module: str) -> StoredTensor | None:
    """Return the base's weight of a module; for an output layer that is not on disk, the embedding it is tied to."""
    held, inputs = match.tensor(module), embeddings(match.base, match.arch)
    tied = held is None and f"{match.name(module)}.weight" in match.arch.causal_only and len(inputs) == 1
    return inputs[0] if tied else held


def _heads_of_other_width(subject: AdapterSubject, match: BaseMatch) -> Iterator[Fault]:
    """Look at the last layer of a head, which has a row per label and reads the hidden states."""
    raw = match.base.config.raw if match.base.config else {}
    nested = raw.get("text_config")
    table = nested if isinstance(nested, dict) else raw
    widths = {table[name] for name in _WIDTHS if type(table.get(name)) is int}
    for tensor, module, leaf in _whole_tensors(subject):
        if leaf != "weight" or not is_last_layer(module) or not tensor.spec.numel or not widths:
            continue
        known = match.tensor(module)  # the base may have a head of its own, of whatever width
        allowed = widths | set(known.shape[1:] if known is not None else ())
        listed = " or ".join(map(str, sorted(allowed)))
        if len(tensor.shape) != MATRIX:
            message = f"has shape {list(tensor.shape)}, expected a row of {listed} for each label"
            yield Fault(subject=tensor.name, message=message)
        elif tensor.shape[1] not in allowed:
            yield Fault(
                subject=tensor.name, message=f"is {tensor.shape[1]} wide, the base's hidden states are {listed}"
            )


def _delta_shape(
    match: BaseMatch, layer: LoraLayer, pair: tuple[StoredTensor, StoredTensor], *, bare: bool
) -> tuple[int, ...]:
    """Return the shape of lora_B·lora_A as the weight is stored; a `bare` parameter is not a Conv1D's weight to PEFT."""
    a, b = pair
    conv1d = match.arch.conv1d
    is_conv1d = not conv1d.isdisjoint({layer.target, layer.target.rpartition(".")[2]})
    transposed = layer.embedding or (is_conv1d and not bare)
    return (a.shape[1], b.shape[0], *a.shape[2:]) if transposed else (b.shape[0], a.shape[1], *a.shape[2:])


def _is_vocabulary(module: str) -> bool:
    return is_end(module)


def _whole_tensors(subject: AdapterSubject) -> Iterator[tuple[StoredTensor, str, str]]:
    """Yield the tensors that replace, or repeat, one of the base's: tensor, module path, parameter."""
    for item in subject.view.parts(Part.PLAIN, Part.BASE_LAYER):
        if item.leaf:
            yield item.tensor, item.module, item.leaf


@rule("LT503", Severity.ERROR, on=AdapterSubject, needs=_ALL, unmergeable=True)
def layer_beyond_base(subject: AdapterSubject) -> Iterator[Fault]:
    """A layer that the base does not reach.

    ## What it does
    Compares the layer numbers of the adapter with those of the base.

    ## Why it matters
    The adapter is for a deeper model of the family. PEFT drops the layers that are too many, and applies the others
    to a model that they were not trained on.

    ## Example
    The adapter has layers 0 to 39, the base 0 to 31.

    ## What to do
    Give the model that the adapter was trained on: `--base MODEL`.
    """
    match = _matched(subject)
    held = _held_indices(match)
    for module, name in _absent(subject):
        beyond = _beyond(match, held, module)
        if beyond:
            yield Fault(subject=name, message=f"is of layer {beyond[0]}, the last one of the base is {beyond[1]}")


@rule("LT504", Severity.WARNING, on=AdapterSubject, needs=_ALL, unmergeable=True)
def vocabulary_differs(subject: AdapterSubject) -> Iterator[Fault]:
    """Another vocabulary than the base's.

    ## What it does
    Compares the rows of embeddings and output layers that the adapter carries or adapts with the base's.

    ## Why it matters
    Tokens were added before training. PEFT fails with a size mismatch unless the base's embeddings are resized
    first, and the tokenizer has to be the adapter's. Where tokens were added and every embedding and output layer of
    the base is in the adapter with the same new rows, this is noted only; otherwise the two ends of the model would
    not fit each other. It is an error where the whole ends in the adapter differ in their rows, and for LoRA on more or
    fewer rows than the base has where the adapter does not carry the matrix that it was trained on.

    ## Example
    `embed_tokens.weight` has 151,668 rows in the adapter and 151,666 in the base.

    ## What to do
    Resize the base before loading: `model.resize_token_embeddings(ROWS)`, and use the tokenizer of the adapter.
    """
    match = _matched(subject)
    severity = Severity.INFO if _is_extended(subject) else None
    carried = {*subject.view.saved, *subject.view.frozen}
    adapted = {layer.target for layer in subject.layers}
    torn = len(_rows_of_ends(subject, match)) > 1
    for tensor, module, rows in _vocabularies(subject):
        base = match.tensor(module)
        if base is not None and len(base.shape) == MATRIX and base.shape[0] != rows:
            message = f"has {rows:,} rows of vocabulary, the base's `{base.name}` has {base.shape[0]:,}"
            lost = torn or (module in adapted and f"{module}.weight" not in carried)
            yield Fault(subject=tensor.name, message=message, severity=Severity.ERROR if lost else severity)


def _rows_of_ends(subject: AdapterSubject, match: BaseMatch) -> set[int]:
    """Return the numbers of rows that the whole ends in the adapter have for the base's one vocabulary."""
    size = match.base.config.vocab_size if match.base.config else None
    ends = (item for item in _whole_tensors(subject) if item[2] == "weight" and _is_vocabulary(item[1]))
    held = ((tensor, match.tensor(module)) for tensor, module, _ in ends if len(tensor.shape) == MATRIX)
    return {tensor.shape[0] for tensor, base in held if base is None or base.shape == (size, *tensor.shape[1:])}


def _is_extended(subject: AdapterSubject) -> bool:
    """Whether tokens were added: all ends of the base are in the adapter, whole, with the same larger number of rows."""
    match = _matched(subject)
    whole = {
        match.name(module): tensor.shape[0]
        for tensor, module, leaf in _whole_tensors(subject)
        if leaf == "weight" and _is_vocabulary(module) and len(tensor.shape) == MATRIX
    }
    held = {
        name.removesuffix(".weight"): tensor.shape[0]
        for name, tensor in match.base.tensors.items()
        if name.endswith(".weight") and _is_vocabulary(name.removesuffix(".weight")) and len(tensor.shape) == MATRIX
    }
    ends = held if subject.config.task_type == "CAUSAL_LM" else held.keys() & whole.keys()
    rows = {whole.get(end) for end in ends}
    return len(rows) == 1 and all((whole.get(end) or 0) > held[end] for end in ends)


def _vocabularies(subject: AdapterSubject) -> Iterator[tuple[StoredTensor, str, int]]:
    for tensor, module, leaf in _whole_tensors(subject):
        if leaf == "weight" and _is_vocabulary(module) and len(tensor.shape) == MATRIX:
            yield tensor, module, tensor.shape[0]
    for layer in subject.layers:
        pair = layer.pair
        if pair is not None and _is_vocabulary(layer.target) and layer.rank is not None:
            yield pair[0], layer.target, pair[0].shape[1] if layer.embedding else pair[1].shape[0]


@rule("LT505", Severity.ERROR, on=AdapterSubject, needs=_ALL)
def target_not_trained(subject: AdapterSubject) -> Iterator[Fault]:
    """A targeted module of the base has no LoRA.

    ## What it does
    Applies `target_modules` and `target_parameters` to the base, as PEFT does, and looks for those without tensors.

    ## Why it matters
    Tensors were lost. PEFT puts LoRA there all the same, with B = 0, and says so in a warning only: these layers
    are the base's.

    ## Example
    `q_proj` has LoRA in layers 0 to 30 of 32.

    ## What to do
    Save the adapter again from the training state, or take an earlier checkpoint.
    """
    match, config = _matched(subject), subject.config
    yield from _parameters_not_trained(subject, match)
    if targeting.is_all_linear(config) or not subject.layers:
        return
    adapted = {match.name(layer.target) for layer in subject.layers}
    if not any(name in adapted for name in (tensor.rpartition(".")[0] for tensor in match.base.tensors)):
        return
    for tensor in match.base.tensors.values():
        module, _, leaf = tensor.name.rpartition(".")
        path = match.strip + module.removeprefix(match.add)
        matrix = leaf == "weight" and len(tensor.shape) == MATRIX and not _may_be_absent(match, path)
        if matrix and module not in adapted and config.targets(path) and _is_of_every_class(subject, path):
            yield Fault(subject=path, message=f"`target_modules` names it in {match.base.root}, but it has no LoRA")


def _parameters_not_trained(subject: AdapterSubject, match: BaseMatch) -> Iterator[Fault]:
    """Count each module's parameters that are named: PEFT wraps it once for each, one wrapper around the other."""
    paths = (match.strip + name.removeprefix(match.add) for name in match.base.tensors)
    counts = Counter(path.rpartition(".")[0] for path in paths if targeting.parameter_is_targeted(subject.config, path))
    held = {layer.module for layer in subject.layers}
    for module, count in counts.items():
        found = sum(module + ".base_layer" * depth in held for depth in range(count))
        if found < count:
            which = f"{counted(count, 'parameter')} of it in {match.base.root}, LoRA is on {found}"
            yield Fault(subject=module, message=f"`target_parameters` names {which}")


def _is_of_every_class(subject: AdapterSubject, path: str) -> bool:
    """Whether a module of the base is in every class made of it: a pooler is not, a module of a layer is."""
    own = subject.config.task_type == "CAUSAL_LM" and "pooler" not in path.split(".")
    return own or split_layer(path)[0] is not None


@rule("LT506", Severity.ERROR, on=AdapterSubject, needs=_ALL, unmergeable=True)
def saved_module_absent(subject: AdapterSubject) -> Iterator[Fault]:
    """A saved tensor that the base has no place for.

    ## What it does
    Looks for each whole tensor of the adapter among the base's, and compares the shapes. Heads may be new, tied output
    layers absent; LT504 looks at vocabularies.

    ## Why it matters
    PEFT drops a tensor that has no place without a word, and what was trained there is lost. One of another shape
    makes loading fail.

    ## Example
    `model.norm_extra.weight` is in the adapter, the base has no such tensor.

    ## What to do
    Give the model that the adapter was trained on: `--base MODEL`.
    """
    match = _matched(subject)
    for tensor, module, leaf in _whole_tensors(subject):
        base = match.tensor(module, leaf)
        if base is None:
            lost = leaf == "bias" or targeting.is_saved_whole(subject.config, module)
            lost = lost and not _may_be_absent(match, module) and not f".{module}".endswith(_TIED_DECODERS)
            if lost and not _belongs_to_head(subject, match, module):
                message = f"belongs to `{module}.{leaf}`, which {match.base.root} does not have"
                yield Fault(subject=tensor.name, message=message)
        elif tensor.spec.numel and head_of(module) is None and not _fits(match, tensor, base, module):
            message = f"is {list(tensor.shape)}, the base's `{base.name}` is {list(base.shape)}"
            yield Fault(subject=tensor.name, message=message)


def _belongs_to_head(subject: AdapterSubject, match: BaseMatch, module: str) -> bool:
    """Whether a classifier's module stands beside the base, as DistilBERT's `pre_classifier` or BERT's pooler does."""
    if subject.config.task_type not in CLASSIFICATION_TASKS or split_layer(module)[0] is not None:
        return False
    stem = ".".join(match.name(module).split(".")[:2])
    return not any(name.startswith(f"{stem}.") for name in match.base.tensors)


def _fits(match: BaseMatch, tensor: StoredTensor, base: StoredTensor, module: str) -> bool:
    """Whether a whole tensor can replace the base's; another number of vocabulary rows is LT504's."""
    vocab_size = match.base.config.vocab_size if match.base.config else None
    rows = _is_vocabulary(module) or base.shape[:1] == (vocab_size,)
    return tensor.shape == base.shape or (rows and tensor.shape[1:] == base.shape[1:])
