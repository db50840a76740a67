"""A base whose tensors have other names or shapes on disk than in memory, as if it were stored as it is in memory.

The planner knows parameters by the names that adapters use, those in memory. For a base that is not stored so, this
makes a base that is: each parameter is the rows that it is made of, wherever they lie. The steps on it become steps on
tensors of the names that `save_pretrained` writes (`fused.on_disk`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from msgspec.structs import replace

from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core.errors import IncompatibleBase
from lora_tool.core.tensors import (
    DType,
    Span,
    StoredTensor,
    TensorAction,
    TensorSpec,
    TensorTable,
    TransposedSpan,
    contiguous,
)
from lora_tool.formats.quantised.encodings import encoding_of, rounded
from lora_tool.models import Architecture
from lora_tool.models.mapping.model import LABELS, NamesOnDisk, RowMapping
from lora_tool.plans.base.task import Task
from lora_tool.plans.core.operation import rows_of
from lora_tool.plans.core.steps import InputRecord
from lora_tool.plans.merge.model.adapter_names import disk_name, in_memory
from lora_tool.plans.merge.model.model import Model, ParameterConversion
from lora_tool.rules.engine.subjects import BaseMatch


def converted(
    base: ModelDir,
    adapters: Sequence[AdapterDir],
    mapping: NamesOnDisk,
    arch: Architecture,
    task: Task,
    *,
    same_names: bool = False,
) -> Model:
    """Return base and adapters in the names of memory that `mapping` gives them; `same_names` if they are those on disk.

    Raises `IncompatibleBase` for mixed types in one parameter.
    """
    tensors: dict[str, StoredTensor] = {}
    copied_only: dict[str, StoredTensor] = {}
    mixed: set[str] = set()
    for name, made in mapping.parameters.items():
        if made.transposed and mapping.is_written_as_in_memory(name):
            tensors[name] = _transposed(name, made, base.tensors[made.sources[0]])
        elif made.pieces is None:
            copied_only[name] = base.tensors[made.sources[0]]
        else:
            held, partly = _of_one_type(made, base.tensors)
            tensors[name] = _parameter(name, made, held)
            mixed |= {name} if partly else set()
    class_name = mapping.facts.class_name
    reasons = dict.fromkeys(mapping.unexpected, f"{class_name} has no place for it, and transformers leaves it out too")
    for name in mapping.facts.unsaved & tensors.keys():
        of = tensors.pop(name)
        sources = mapping.parameters[name].sources
        reasons |= dict.fromkeys(sources, f"{class_name} computes {of.name}, and does not save it")
    dropped = tuple(
        InputRecord(path=base.tensors[name].path, name=name, action=TensorAction.DROPPED, reason=reason)
        for name, reason in reasons.items()
    )
    return Model(
        base=replace(base, weights=replace(base.weights, tensors=tensors)),
        adapters=tuple(in_memory(adapter, mapping) for adapter in adapters),
        arch=arch,
        task=task,
        leftovers=dropped,
        conversion=ParameterConversion(
            mapping=mapping,
            disk=base.tensors,
            copied_only=copied_only,
            same_names=same_names,
            partly_quantised=frozenset(mixed),
        ),
    )


def complete(model: Model, conversion: ParameterConversion) -> BaseMatch:
    """Return the base with every parameter of its class by name and shape, for rules that read only headers.

    A new head, which the base lacks, gets the adapter's number of labels. The parts of a fused parameter are there by
    their names on disk, where an adapter has LoRA on one of them.
    """
    facts = conversion.mapping.facts
    held = {key.tensor: each.tensors[name] for each in model.adapters for name, key in each.keys.items()}
    held = held if facts.label_axes else {}
    dtype = model.base.dtype or DType.F32
    tensors: dict[str, StoredTensor] = {}
    for name, shape in facts.shapes.items():
        found = held.get(name)
        sizes = zip_longest(shape, found.shape[: len(shape)] if found is not None else ())
        spec = TensorSpec(
            name=name, dtype=dtype, shape=tuple(got if size == LABELS and got else size for size, got in sizes)
        )
        made_up = StoredTensor(spec=spec, spans=(Span(path=model.base.root, offset=0, nbytes=spec.nbytes),))
        tensors[name] = model.base.tensors.get(name, made_up)
    missing = tensors.keys() - model.base.tensors.keys() - conversion.copied_only.keys()
    for module in dict.fromkeys(key.module for each in model.adapters for key in each.keys.values()):
        if f"{module}.weight" not in tensors:
            tensors |= _parts_of_same(conversion, module)
    return BaseMatch(
        base=replace(model.base, weights=replace(model.base.weights, tensors=tensors)),
        arch=model.arch,
        facts=facts,
        missing=frozenset(missing),
        outside=conversion.mapping.outside,
    )


def _parts_of_same(conversion: ParameterConversion, module: str) -> dict[str, StoredTensor]:
    """Return the parts of the fused parameter that `module` is a part of, by the names that the adapter has."""
    own, name = disk_name(conversion.mapping, module), f"{module}.weight"
    if own is None:
        return {}
    longer, shorter = (own, name) if len(own) > len(name) else (name, own)
    shift = longer.removesuffix(shorter)
    parts = dict.fromkeys(
        piece.name for piece in conversion.mapping.parameters[conversion.mapping.place(name)].pieces or ()
    )
    return {part.removeprefix(shift) if longer is own else shift + part: conversion.disk[part] for part in parts}


def _parameter(name: str, made: RowMapping, disk: TensorTable) -> StoredTensor:
    """Return the parameter as the bytes of the rows that it is made of."""
    pieces = made.pieces or ()
    dtypes = {disk[piece.name].dtype for piece in pieces} or {disk[source].dtype for source in made.sources}
    if len(dtypes) != 1:
        raise IncompatibleBase(
            f"`{name}` is made of tensors with different dtypes, {', '.join(sorted(map(str, dtypes)))}: "
            f"{pieces[0].name} and {len(pieces) - 1} others"
        )
    spans = [span for piece in pieces for span in rows_of(disk[piece.name], piece.start, piece.rows).spans]
    spans = spans or [span for source in made.sources for span in disk[source].spans]  # of an empty tensor
    return StoredTensor(spec=TensorSpec(name=name, dtype=dtypes.pop(), shape=made.shape), spans=contiguous(spans))


def _transposed(name: str, made: RowMapping, stored: StoredTensor) -> StoredTensor:
    """Return the parameter whose matrices lie transposed in the file."""
    if len(stored.spans) != 1:
        raise AssertionError("a tensor of a model file is one span")
    itemsize = stored.dtype.bits // 8
    rows, columns = made.shape[-2:]
    nbytes = rows * columns * itemsize
    spans = tuple(
        TransposedSpan(
            path=stored.path,
            offset=stored.spans[0].offset + at,
            nbytes=nbytes,
            rows=rows,
            columns=columns,
            itemsize=itemsize,
        )
        for at in range(0, stored.nbytes, nbytes)
    )
    return StoredTensor(spec=TensorSpec(name=name, dtype=stored.dtype, shape=made.shape), spans=spans)


def _of_one_type(made: RowMapping, disk: TensorTable) -> tuple[TensorTable, bool]:
    """Return the tensors that a parameter is made of, and whether only some of them are quantised.

    Those are rounded to the type of the others when they are read.
    """
    held = {piece.name: disk[piece.name] for piece in made.pieces or ()}
    plain = {tensor.dtype for tensor in held.values() if encoding_of(tensor) is None}
    if len(plain) != 1 or all(tensor.dtype in plain for tensor in held.values()):
        return disk, False
    (dtype,) = plain
    return {name: rounded(tensor, dtype) for name, tensor in held.items()}, True
