"""LT621 to LT624: a model folder against its base, tensor by tensor, whoever made it from the base."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lora_tool.checkpoints import ModelDir
from lora_tool.checkpoints.quantised import as_matrices
from lora_tool.core.report import Severity
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.stored import read_part
from lora_tool.models import architecture_of, is_computed
from lora_tool.models.ends import head_of, is_end, is_input
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import ModelSubject

_COMPARED = frozenset({Need.WEIGHTS, Need.BASE})
_FIRST = 4096
_BLOCK = 1 << 20


def _matched(base: ModelDir, subject: ModelSubject) -> Mapping[str, StoredTensor]:
    """Return the base's tensors by the names that the model gives them: one may be saved without its beginning.

    Of quantised weights both have the matrices that they stand for.
    """
    held, theirs = subject.matrices.keys(), as_matrices(base).tensors
    firsts = dict.fromkeys(f"{name.partition('.')[0]}." for name in (*theirs, *held) if "." in name)
    shifts = [("", ""), *((first, "") for first in firsts), *(("", first) for first in firsts)]
    renamed = [{add + name.removeprefix(strip): t for name, t in theirs.items()} for strip, add in shifts]
    return max(renamed, key=lambda table: len(table.keys() & held))


def _is_end(name: str, subject: ModelSubject) -> bool:
    """Return whether a tensor may come and go with the class: a head, or an output layer."""
    config = subject.checkpoint.config
    arch = architecture_of(config.model_type or "") if config else None
    path = name.rpartition(".")[0]
    return (
        head_of(path) is not None or is_end(path) or bool(arch and name in arch.causal_only)
    )  # LT318 reports tensors that the class requires


def _no_place(subject: ModelSubject, names: Mapping[str, StoredTensor]) -> frozenset[str]:
    """Return which of the base's tensors the model's class has no place for."""
    config = subject.plain.config
    if config is None or subject.class_tensors is None:
        return frozenset()
    found = subject.compared(config, {name: tensor.shape for name, tensor in names.items()}, subject.ask)
    return frozenset() if isinstance(found, str) else frozenset((*found.unexpected, *found.of_other_classes))


@rule("LT621", Severity.ERROR, on=ModelSubject, needs=_COMPARED)
def tensor_of_the_base_lost(subject: ModelSubject) -> Iterator[Fault]:
    """A tensor of the base is not in the model.

    What it does: Compares the names in the weights with the base's. Tensors that the model's class does not have, such
    as a head or output layer, and buffers that transformers computes, may be absent.
    Why it matters: transformers re-initialises it at random, with only a log line.
    Example: A merge that goes shard by shard stopped after the second of three.
    What to do: Merge again, and save the whole `state_dict`.
    """
    if subject.base is None:
        return
    base = _matched(subject.base, subject)
    lost = [name for name in base if name not in subject.matrices and not is_computed(name)]
    if 2 * len(lost) > len(base):
        held = len(base) - len(lost)
        message = (
            f"the model has {held} of the base's {len(base)} tensors: it is a different model, or its tensors "
            "have other names"
        )
        yield Fault(message=message, severity=Severity.WARNING)
        return
    said = set(subject.class_tensors.missing) if subject.class_tensors else set()
    no_end = not (any(is_end(name.rpartition(".")[0]) for name in subject.matrices) or subject.lost_end)
    excused = _no_place(subject, base) | said | set(subject.expected or ())
    for name in lost:
        embedding = no_end and is_input(name.rpartition(".")[0])
        if name not in excused and (embedding or not _is_end(name, subject)):
            yield Fault(subject=name, message=f"is not in the model, but in the base {subject.base.root}")


@rule("LT622", Severity.WARNING, on=ModelSubject, needs=_COMPARED)
def tensor_that_the_base_lacks(subject: ModelSubject) -> Iterator[Fault]:
    """A tensor in the model that its base does not have.

    What it does: Compares the names in the weights with the base's, except for heads and output layers.
    Why it matters: Either transformers ignores it on loading, or it changes what the model computes.
    Example: The model has biases of `q_proj`, but the base has none.
    What to do: Compare the two `config.json` files, and give the base that the model was made from.
    """
    base = subject.base and _matched(subject.base, subject)
    if not base or 2 * len(base.keys() & subject.matrices.keys()) < len(base):
        return
    known = subject.class_tensors
    said = {*known.unexpected, *known.of_other_classes} if known else set()
    for name, tensor in subject.matrices.items():
        adapter = "lora_" in name or "base_layer" in name  # LT601 reports these
        if name not in base and name not in said and not (adapter or is_computed(name) or _is_end(name, subject)):
            yield Fault(subject=name, message="is not a tensor of the base", path=tensor.path)


@rule("LT623", Severity.ERROR, on=ModelSubject, needs=_COMPARED)
def other_shape_than_the_base(subject: ModelSubject) -> Iterator[Fault]:
    """A tensor of the model has another shape than the base's.

    What it does: Compares shapes with the base's, except for heads. Another number of rows in embeddings and output
    layers is reported as info: the vocabulary was resized.
    Why it matters: The model does not load with the base's config, and a transposed matrix computes something else.
    Example: `mlp.down_proj.weight` is [64, 16] in the model, but [16, 64] in the base.
    What to do: Merge again with the base that the adapter was trained on.
    """
    if subject.base is None:
        return
    for name, theirs in _matched(subject.base, subject).items():
        mine = subject.matrices.get(name)
        if mine is None or mine.shape == theirs.shape or head_of(name.rpartition(".")[0]):
            continue
        if _contradicts_the_config(subject, name):
            continue
        resized = _is_end(name, subject) and mine.shape[1:] == theirs.shape[1:]
        message = f"is {list(mine.shape)}, but {list(theirs.shape)} in the base"
        severity = Severity.INFO if resized else None
        yield Fault(subject=name, message=message, path=mine.path, severity=severity)


def _contradicts_the_config(subject: ModelSubject, name: str) -> bool:
    """Whether the tensor's shape contradicts the config, too, which LT317 reports."""
    wanted = subject.class_tensors.shapes.get(name, ()) if subject.class_tensors else ()
    shape = subject.matrices[name].shape
    return len(wanted) == len(shape) and any(a not in (None, b) for a, b in zip(wanted, shape, strict=True))


@rule("LT624", Severity.ERROR, on=ModelSubject, needs=_COMPARED)
def model_is_its_base(subject: ModelSubject) -> Iterator[Fault]:
    """The model equals its base: nothing in it was trained.

    What it does: Looks for a tensor that differs from the base's. It compares the first bytes of each, which gives a
    warning; with `--deep` it compares all bytes, which gives an error. If only a head differs, or is new, this is
    reported as info: the head alone was trained, or the adapter was not merged.
    Why it matters: It is the base under another name: every measurement of it measures the base.
    Example: A wrong prefix made PEFT ignore every tensor of the adapter; `merge_and_unload` then merged nothing.
    What to do: Check the adapter's names with `lora-tool validate ADAPTER --base BASE`, and merge again.
    """
    base = subject.base and _matched(subject.base, subject)
    if not base:
        return
    heads = {name for name in subject.matrices if head_of(name.rpartition(".")[0])}
    if not all(_same(each, base.get(name), subject) for name, each in subject.matrices.items() if name not in heads):
        return
    trained = not all(_same(subject.matrices[name], base.get(name), subject) for name in heads)
    read = "" if subject.whole else " in the bytes that were read; --deep reads all"
    message = f"all {len(subject.matrices)} tensors equal the base's{read}"
    if trained:
        message = f"only its head was trained, or no adapter was merged: all other tensors equal the base's{read}"
    yield Fault(message=message, severity=Severity.INFO if trained else None if subject.whole else Severity.WARNING)


def _same(one: StoredTensor, other: StoredTensor | None, subject: ModelSubject) -> bool:
    if other is None or one.dtype is not other.dtype or one.shape != other.shape:
        return False
    length = one.nbytes if subject.whole else min(one.nbytes, _FIRST)
    blocks = ((at, min(_BLOCK, length - at)) for at in range(0, length, _BLOCK))
    return all(read_part(one, *block) == read_part(other, *block) for block in blocks)
