"""LT5xx: an adapter against its base model, by names and shapes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping

from lora_tool.adapters import targeting
from lora_tool.adapters.experts import LISTED
from lora_tool.adapters.support import groups_of
from lora_tool.adapters.view import LoraLayer
from lora_tool.core.choices import closest
from lora_tool.core.keys import INDEX, Part, split_layer
from lora_tool.core.report import Severity
from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.models.ends import CLASSIFICATION_TASKS, MATRIX, head_of, is_end, is_last_layer
from lora_tool.models.layers import is_beyond
from lora_tool.rules.engine.base_match import BaseMatch
from lora_tool.rules.engine.registry import Fault, Need, as_one, doubted, rule
from lora_tool.rules.engine.subjects import AdapterSubject
from lora_tool.rules.shared.base_match import delta_shape, held_or_tied, is_decoder, may_be_absent, of_causal_lm
from lora_tool.rules.shared.merged_class import merged_tensors

_ALL = frozenset({Need.WEIGHTS, Need.CONFIG, Need.BASE})
_SAME = _ALL | {Need.SAME_NAMES}
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
_OF_DECODERS = "score"
_FROM_ONE_PLACE = "copy the base's config.json and its weights again, from one place"
_TRUNK = re.compile(r"model\.layers\.\d+\..+|lm_head")
"""Modules that the causal LMs of transformers have as a whole, or not at all, under the names on disk."""


def _adapted(subject: AdapterSubject) -> Mapping[str, str]:
    """Return each module with LoRA or trained tokens, and the name of one of its tensors."""
    adapted: dict[str, str] = {}
    for module, tokens in subject.view.tokens.items():
        adapted[module] = tokens.rows.name
    for layer in subject.layers:
        adapted[layer.target] = layer.any_tensor.name
    return adapted


def _held_indices(match: BaseMatch) -> Mapping[str, int]:
    """Return the largest number that each place in the base's names has: ``model.layers.`` → 31."""
    largest: dict[str, int] = {}
    for name in match.base.tensors:
        number = INDEX.search(name)
        if number and len(number[0]) < 10:  # noqa: PLR2004 - a number of layers, not of stars
            place = name[: number.start()]
            largest[place] = max(largest.get(place, -1), int(number[0]))
    return largest


def _beyond(match: BaseMatch, held: Mapping[str, int], module: str) -> tuple[int, int] | None:
    """Return the module's layer number and the base's last one, where it is larger."""
    name = match.name(module) + "."
    number = INDEX.search(name)
    last = held.get(name[: number.start()]) if number else None
    if number is None or last is None or int(number[0]) <= last:
        return None
    return int(number[0]), last


def _absent(subject: AdapterSubject) -> Iterator[tuple[str, str, tuple[int, int] | None]]:
    """Yield module, tensor name and the result of `_beyond` for each adapted module that the base does not have."""
    match = subject.matched
    without_weight: dict[str, str] = {}
    for module, tokens in subject.view.tokens.items():
        if match.tensor(module) is None:
            without_weight[module] = tokens.rows.name
    for layer in subject.layers:
        if match.tensor(layer.target) is None:
            without_weight[layer.target] = layer.any_tensor.name
    if not without_weight:  # as nearly always
        return
    held, indices = match.base.modules, _held_indices(match)
    for module, name in without_weight.items():
        if match.name(module) not in held and not may_be_absent(subject, module):
            yield module, name, _beyond(match, indices, module)


def _is_listed(match: BaseMatch, module: str) -> bool:
    """Return whether a module is one of the matrices in a parameter of the base, by the names of Unsloth's 4-bit gpt-oss."""
    found = LISTED.fullmatch(module)
    return found is not None and match.name(found["experts"]) in match.base.modules


@rule("LT501", Severity.ERROR, on=AdapterSubject, needs=_ALL, unmergeable=True)
def target_absent(subject: AdapterSubject) -> Iterator[Fault]:
    """A module that the base does not have.

    What it does: Looks for each adapted module among the base's tensors. A classifier does not have the output layer of
    a language model.
    Why it matters: PEFT drops LoRA for modules that the base does not have, with a warning at most, so that part of the
    adapter does nothing.
    Example: LoRA on `model.layers.0.self_attn.qkv_proj`, but the base has `q_proj`, `k_proj` and `v_proj`.
    What to do: Give the model that the adapter was trained on: `--base MODEL`.
    """
    match = subject.matched
    absent = [(module, name) for module, name, beyond in _absent(subject) if beyond is None]
    listed = [(module, name) for module, name in absent if _is_listed(match, module)]
    if listed:
        yield Fault(
            subject=listed[0][1],
            message=f"adapts {len(listed)} matrices of single experts by Unsloth's names, the first is `{listed[0][0]}`, "
            f"but {match.base.root} has all experts in one parameter",
            hint=f"for PEFT's names: lora-tool convert {shlex.quote(str(subject.checkpoint.root))} --to peft-fused --base "
            f"{shlex.quote(str(match.base.root))} -o OUT",
        )
        absent = [each for each in absent if each not in listed]
    modules = sorted(match.base.modules) if absent else []
    if absent and len(absent) == len(_adapted(subject)):
        yield Fault(message=f"none of its {len(absent)} modules is in {match.base.root}; the first is `{absent[0][0]}`")
        return
    close = closest(match.name(absent[0][0]), modules) if absent else None
    nearest = f"; the closest name there is `{close}`" if close else ""
    lacks = f"which {match.base.root} does not have"
    yield from as_one(
        Fault(subject=name, message=f"adapts `{module}`, {lacks}{'' if at else nearest}")
        for at, (module, name) in enumerate(absent)
    )
    for module, name in _adapted(subject).items() if subject.is_reward() else ():
        if of_other := of_causal_lm(subject, module):
            yield Fault(subject=name, message=f"adapts `{module}`, which a {of_other} does not have")


@rule("LT502", Severity.ERROR, on=AdapterSubject, needs=_SAME, unmergeable=True)
def dimensions_differ(subject: AdapterSubject) -> Iterator[Fault]:
    """Sizes that differ from the base's.

    What it does: Compares the shapes of lora_B·lora_A and of trained token rows with the base's weight, including
    stacked experts and kernels, and the width of a new head with the base's hidden states. For model types whose names in memory no
    header tells, it compares what has the same name on disk.
    Why it matters: The adapter was trained on a different model, so loading fails with a size mismatch.
    Example: lora_B·lora_A is [4096, 4096], but the base's `q_proj.weight` is [3584, 3584].
    What to do: Give the model that the adapter was trained on: `--base MODEL`.
    """
    match = subject.matched
    yield from _heads_of_other_width(subject, match)
    yield from as_one(_layers_of_other_size(subject, match))
    for module, tokens in subject.view.tokens.items():
        weight, rows = match.tensor(module), tokens.rows
        if weight is not None and rows.shape[1:] != weight.shape[1:]:
            message = (
                f"has rows of {list(rows.shape[1:])}, but the base's `{weight.name}` has rows of "
                f"{list(weight.shape[1:])}"
            )
            yield Fault(subject=rows.name, message=message)


def _layers_of_other_size(subject: AdapterSubject, match: BaseMatch) -> Iterator[Fault]:
    """Compare the factors of each layer with the base's weight."""
    if _RESHAPED & set(subject.config.refused):
        return
    # only the class itself has the order in which parameters are wrapped
    named = match.facts.parameters if match.facts and subject.config.target_parameters else ()
    bare = targeting.wrapped_parameters(subject.config, named) if named else {}
    fitting: set[tuple[int, DType, tuple[int, ...]]] = set()  # kinds of layers, and the base's weights that they fit
    for layer in subject.layers:
        if layer.module in bare:
            yield from _misfits_parameter(subject, match, layer, bare[layer.module])
            continue
        weight = match.tensor(layer.target)
        single = weight is None or f"{layer.target}.weight" in subject.view.frozen
        kind = None if weight is None or single else (layer.kind, weight.dtype, weight.shape)
        if kind not in fitting:
            faults = tuple(_misfits_weight(subject, match, layer))
            yield from faults
            if kind is not None and not faults:
                fitting.add(kind)


def _misfits_weight(subject: AdapterSubject, match: BaseMatch, layer: LoraLayer) -> Iterator[Fault]:
    """Compare the shape of lora_B·lora_A with the weight's."""
    held, pair = held_or_tied(match, layer.target), layer.pair
    weight = subject.view.frozen.get(f"{layer.target}.weight") or held
    if weight is None or pair is None or layer.rank is None:
        return
    if not weight.dtype.is_float:
        yield Fault(subject=pair[0].name, message=f"is for `{weight.name}`, whose dtype {weight.dtype} is not a float")
    needed = delta_shape(match, layer, pair, bare=not subject.config.targets(layer.target))
    rows_only = weight is match.tensor(layer.target) and is_end(layer.target)
    rows_only = rows_only and needed[1:] == weight.shape[1:]
    # a kernel's inputs may be in groups, and a stack of experts only what wraps bare parameters knows
    comparable = len(weight.shape) == MATRIX or (len(needed) == MATRIX and len(weight.shape) < MATRIX)
    as_stored: tuple[tuple[int, ...], ...] = (weight.shape, weight.shape[::-1]) if match.in_part else (weight.shape,)
    if len(pair[0].shape) == len(weight.shape) > MATRIX:
        comparable, as_stored = True, (needed,) if _fits_kernel(*pair, weight) else ()
    if comparable and needed not in as_stored and not rows_only:
        whose = "the base's" if weight is held else "the adapter's own"
        message = f"lora_B·lora_A is {list(needed)}, but {whose} `{weight.name}` is {list(weight.shape)}"
        hint = None
        if (groups := groups_of(pair[0], weight)) > 1 and needed == (
            weight.shape[0],
            groups * weight.shape[1],
            *weight.shape[2:],
        ):
            message += ", a convolution in groups: an old PEFT wrote factors without any, which no PEFT loads now"
            hint = f'train it again, with exclude_modules=["{layer.target.rpartition(".")[2]}"]'
        yield Fault(subject=pair[0].name, message=message, hint=hint)


def _fits_kernel(a: StoredTensor, b: StoredTensor, weight: StoredTensor) -> bool:
    """Return whether factors are of a convolution: lora_A has its kernel over all channels, lora_B one of ones in as many
    groups (peft 0.21, `_ConvNd.update_layer`).
    """
    groups = groups_of(a, weight)
    same = (b.shape[0], *a.shape[2:]) == (weight.shape[0], *weight.shape[2:])
    return same and groups > 0 and b.shape[1] * groups == a.shape[0] and set(b.shape[2:]) == {1}


def _misfits_parameter(subject: AdapterSubject, match: BaseMatch, layer: LoraLayer, name: str) -> Iterator[Fault]:
    """Compare the factors with a parameter that is a matrix or a stack of experts, [experts, out, in] or transposed."""
    weight, a, b = match.base.tensors[name], layer.a, layer.b
    if a is None or b is None or match.facts is None:
        return
    if not weight.dtype.is_float:
        yield Fault(subject=a.name, message=f"is for `{weight.name}`, whose dtype {weight.dtype} is not a float")
    rank = subject.config.rank(name) * (weight.shape[0] if len(weight.shape) > MATRIX else 1)
    needed = weight.shape[-2:]
    if len(weight.shape) > MATRIX and name.rpartition(".")[0] in match.facts.transposed:
        needed = needed[::-1]
    if len(weight.shape) not in (MATRIX, MATRIX + 1) or (a.shape, b.shape) != ((rank, needed[1]), (needed[0], rank)):
        factors = f"{list(a.shape)} and its lora_B {list(b.shape)}"
        message = f"{factors} do not fit `{name}` {list(weight.shape)} at rank {subject.config.rank(name)}"
        # as Automodel saved them at first
        if (a.shape, b.shape) == ((rank, needed[0]), (needed[1], rank)):
            message += ": lora_A and lora_B are swapped, and transposed"
            hint = "save the adapter again with the program that trained it, in a version that does not swap them"
            yield Fault(subject=a.name, message=message, hint=hint)
        else:
            yield Fault(subject=a.name, message=message)


def _heads_of_other_width(subject: AdapterSubject, match: BaseMatch) -> Iterator[Fault]:
    """Look at the last layer of a head, which has a row per label and reads the hidden states."""
    raw = match.base.config.raw if match.base.config else {}
    nested = raw.get("text_config")
    table = nested if isinstance(nested, dict) else raw
    widths = {table[name] for name in _WIDTHS if type(table.get(name)) is int}
    for tensor, module, leaf in whole_tensors(subject):
        known = match.tensor(module)  # the base may have a head of its own, of whatever width
        allowed = set(known.shape[1:]) if known is not None and len(known.shape) == MATRIX else widths
        unknown = match.in_part and module != _OF_DECODERS  # which all of transformers' decoders have
        if leaf != "weight" or not is_last_layer(module) or not tensor.spec.numel or not allowed or unknown:
            continue
        listed = " or ".join(map(str, sorted(allowed)))
        if len(tensor.shape) != MATRIX:
            message = f"has shape {list(tensor.shape)}, expected a row of {listed} for each label"
            yield Fault(subject=tensor.name, message=message)
        elif tensor.shape[1] not in allowed:
            yield Fault(
                subject=tensor.name, message=f"is {tensor.shape[1]} wide, but the base's hidden states are {listed}"
            )


def whole_tensors(subject: AdapterSubject) -> Iterator[tuple[StoredTensor, str, str]]:
    """Yield the tensors that replace, or repeat, one of the base's: tensor, module path, parameter."""
    for item in subject.view.parts(Part.PLAIN, Part.BASE_LAYER, Part.SAVED_MODULE, Part.TOKENS_BASE):
        if item.leaf and item.tensor.name not in subject.view.repeats:
            module, _, leaf = item.name.rpartition(".")
            yield item.tensor, module, leaf


def whole_ends(subject: AdapterSubject) -> Iterator[tuple[StoredTensor, str]]:
    """Yield the matrices of embeddings and output layers among them, with their module paths."""
    for tensor, module, leaf in whole_tensors(subject):
        if leaf == "weight" and is_end(module) and len(tensor.shape) == MATRIX:
            yield tensor, module


@rule("LT503", Severity.ERROR, on=AdapterSubject, needs=_SAME, unmergeable=True)
def layer_beyond_base(subject: AdapterSubject) -> Iterator[Fault]:
    """A layer number beyond the base's last layer.

    What it does: Compares the layer numbers of the adapter with those of the base. For model types that have the same
    tensors on disk and in memory, it also looks for adapted tensors of the base that `config.json` leaves no place for.
    Why it matters: The adapter is for a deeper model of the family. PEFT drops the extra layers and applies the others
    to a model that they were not trained on.
    Example: The adapter has layers 0 to 39, the base 0 to 31.
    What to do: Give the model that the adapter was trained on: `--base MODEL`.
    """
    yield from as_one(
        Fault(subject=name, message=f"belongs to layer {beyond[0]}, but the base's last layer is {beyond[1]}")
        for _, name, beyond in _absent(subject)
        if beyond
    )
    yield from _without_a_place(subject)
    if subject.matched.in_part:
        yield from _past_the_config(subject)


def _without_a_place(subject: AdapterSubject) -> Iterator[Fault]:
    """Look for adapted weights of the base that its class does not have under its config, where headers tell."""
    known = subject.stored_base.class_tensors if subject.stored_base is not None else None
    if known is None or not known.unexpected:
        return
    unexpected, root = frozenset(known.unexpected), subject.matched.base.root
    for module, name in _adapted(subject).items():
        held = subject.matched.tensor(module)
        if held is not None and held.name in unexpected:
            what = f"a {known.class_name or 'model of this type'} has no place under {root / 'config.json'}"
            message = f"adapts `{held.name}`, for which {what}: transformers ignores it"
            fault = Fault(subject=name, message=message, hint=_FROM_ONE_PLACE, mergeable=True)
            yield doubted(fault, known.doubt)


def _past_the_config(subject: AdapterSubject) -> Iterator[Fault]:
    """For a class in no table, find adapted layers that the base has, but not under its config."""
    match = subject.matched
    config = match.base.config
    if config is None:
        return
    for module, name in _adapted(subject).items():
        held = match.tensor(module)
        if held is not None and _TRUNK.fullmatch(module) and is_beyond(config, module):
            message = f"adapts `{held.name}`, for which {config.path} has no place: transformers ignores it"
            yield Fault(subject=name, message=message, hint=_FROM_ONE_PLACE)


@rule("LT506", Severity.ERROR, on=AdapterSubject, needs=_SAME, unmergeable=True)
def saved_module_absent(subject: AdapterSubject) -> Iterator[Fault]:
    """A saved tensor that the base does not have.

    What it does: Looks for each whole tensor of the adapter in the base and compares the shapes; of a head, only those
    before its last layer. A head may be new, a tied output layer may be absent, and a classifier has no output layer.
    LT504 compares vocabularies.
    Why it matters: PEFT silently drops a tensor that the base does not have, and cannot load one of another shape.
    Example: `model.norm_extra.weight` is in the adapter, but the base has no such tensor.
    What to do: Give the model that the adapter was trained on: `--base MODEL`.
    """
    match = subject.matched
    for tensor, module, leaf in whole_tensors(subject):
        base = match.tensor(module, leaf)
        if of_other := of_causal_lm(subject, module):
            yield Fault(subject=tensor.name, message=f"belongs to `{module}.{leaf}`, which a {of_other} does not have")
        elif base is None and match.in_part:
            if leaf == "bias" and match.tensor(module) is not None and _TRUNK.fullmatch(module):
                message = f"belongs to `{module}.bias`, which {match.base.root} does not have"
                yield Fault(subject=tensor.name, message=message)
        elif base is None:
            named = targeting.is_saved_whole(subject.config, module) or head_of(module) is not None
            absent = f"{match.name(module)}.{leaf}" in match.arch.causal_only or head_of(module) or leaf == "weight"
            lost = (named or leaf == "bias") and not (absent and may_be_absent(subject, module))
            lost = lost and not is_decoder(module)
            if lost and not _is_of_the_class(subject, match, f"{module}.{leaf}"):
                message = f"belongs to `{module}.{leaf}`, which {match.base.root} does not have"
                yield Fault(subject=tensor.name, message=message)
        elif tensor.spec.numel and not is_last_layer(module) and not _fits(match, tensor, base, module):
            message = f"is {list(tensor.shape)}, but the base's `{base.name}` is {list(base.shape)}"
            yield Fault(subject=tensor.name, message=message)


def _is_of_the_class(subject: AdapterSubject, match: BaseMatch, name: str) -> bool:
    """Whether the base lacks it because the task makes another class, as DistilBERT's `pre_classifier` or a pooler."""
    if match.facts or split_layer(name)[0] is not None:
        return False
    known = merged_tensors(subject)
    if known is not None:
        return match.name(name) in known.missing
    if subject.config.task_type not in CLASSIFICATION_TASKS:
        return False
    stem = ".".join(match.name(name.rpartition(".")[0]).split(".")[:2])
    return not any(name.startswith(f"{stem}.") for name in match.base.tensors)


def _fits(match: BaseMatch, tensor: StoredTensor, base: StoredTensor, module: str) -> bool:
    """Whether a whole tensor can replace the base's; another number of vocabulary rows is LT504's, of labels LT513's."""
    vocab_size = match.base.config.vocab_size if match.base.config else None
    rows = (is_end(module) and len(base.shape) == MATRIX) or base.shape[:1] == (vocab_size,)
    rows = rows or (head_of(module) == module.rpartition(".")[2] and bool(tensor.shape))
    # a stack of experts may lie transposed on disk; with the class, the shape in memory is compared
    stack = match.facts is None and len(base.shape) > MATRIX and sorted(tensor.shape) == sorted(base.shape)
    return tensor.shape == base.shape or stack or (rows and tensor.shape[1:] == base.shape[1:])
