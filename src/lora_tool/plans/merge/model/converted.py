"""A base whose tensors have other names or shapes on disk than in memory, as if it were stored as it is in memory.

The planner knows parameters by the names that adapters use, those in memory. For a base that is not stored so, this
makes a base that is: each parameter is the rows that it is made of, wherever they lie. The steps on it become steps on
tensors of the names that `save_pretrained` writes (`fused.on_disk`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from msgspec.structs import replace

from lora_tool.adapters.view import view_of
from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core.errors import IncompatibleBase
from lora_tool.core.keys import AdapterKey, Part, without_wrapped
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
from lora_tool.formats.model_config import ModelConfig
from lora_tool.formats.quantised.encodings import encoding_of, rounded
from lora_tool.models import Architecture
from lora_tool.models.ends import LAST_LAYERS
from lora_tool.models.layers import of_further_tokens
from lora_tool.models.mapping.model import LABELS, ModelFacts, NamesOnDisk, RowMapping
from lora_tool.plans.base.task import Task
from lora_tool.plans.core.operation import rows_of
from lora_tool.plans.core.steps import InputRecord
from lora_tool.plans.merge.draft import Model, ParameterConversion
from lora_tool.rules.engine.base_match import BaseMatch


def in_memory(adapter: AdapterDir, mapping: NamesOnDisk) -> AdapterDir:
    """Return the adapter with the module paths of this transformers."""
    found = homes(adapter, mapping)
    if all(path in (None, module) for (module, _), path in found.items()):
        return adapter  # whose view is kept

    def placed(key: AdapterKey) -> AdapterKey:
        path = found[key.module, _leaf_in_memory(key)] or key.module
        return key if path == key.module else replace(key, module=path)

    return replace(adapter, keys={name: placed(key) for name, key in adapter.keys.items()})


def homes(adapter: AdapterDir, mapping: NamesOnDisk) -> dict[tuple[str, str], str | None]:
    """Return module and leaf of each of the adapter's tensors → the path in memory of the module that it belongs to.

    None where there is none.
    """
    # in the file's order: a rule of transformers may wait for a name before it applies to others
    wanted = dict.fromkeys((key.module, _leaf_in_memory(key)) for key in adapter.keys.values())
    return {(module, leaf): _home(module, leaf, mapping) for module, leaf in wanted}


def strangers(adapter: AdapterDir, mapping: NamesOnDisk) -> int:
    """Return how many of the adapter's tensors the class has no module for."""
    return sum(home is None for home in set(homes(adapter, mapping).values()))


def lacks_layers(adapter: AdapterDir, mapping: NamesOnDisk) -> bool:
    """Return whether the config targets a layer of the class on which the adapter has no LoRA."""
    view = view_of(adapter)
    layers = mapping.facts.layers.difference(layer.target for layer in view.layers)
    return any(map(view.config.targets, layers))


def _leaf_in_memory(key: AdapterKey) -> str:
    """Return the parameter of its module that an adapter's tensor is for."""
    return key.leaf if key.part is Part.PLAIN and key.leaf else "weight"


def _home(module: str, leaf: str, mapping: NamesOnDisk) -> str | None:
    """Return the path in memory of a module that an adapter names.

    An adapter of an earlier transformers has the names of then, which are mostly those on disk.
    """
    module = bare = without_wrapped(module)
    while bare.endswith(".base_layer"):
        bare = bare.removesuffix(".base_layer")
    if bare in mapping.facts.modules:
        return module
    placed = mapping.place(f"{bare}.{leaf}")
    if placed not in mapping.facts.shapes:
        return None
    path, _, found = placed.rpartition(".")
    # a part of a fused parameter keeps its own name: `per_expert` finds it on disk
    return path + module.removeprefix(bare) if found == leaf else module


def disk_name(mapping: NamesOnDisk, module: str) -> str | None:
    """Return the tensor on disk that is the weight of `module`, a part of a fused parameter; None if it is none."""
    name = f"{module}.weight"
    held = mapping.piece_names(mapping.place(name))
    if name in held:
        return name
    return next((at for at in held if at.endswith(f".{name}") or name.endswith(f".{at}")), None)


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
    turned: set[str] = set()
    for name, made in mapping.parameters.items():
        if made.transposed:
            stored = base.tensors[made.sources[0]]
            tensors[name] = replace(stored, spec=replace(stored.spec, name=name))
            turned.add(name)
        elif made.pieces is None:
            copied_only[name] = base.tensors[made.sources[0]]
        else:
            held, partly = _of_one_type(made, base.tensors)
            tensors[name] = _parameter(name, made, held)
            mixed |= {name} if partly else set()
    class_name = mapping.facts.class_name
    further = [name for name in mapping.unexpected if of_further_tokens(base.whole_config, name)]
    reasons = dict.fromkeys(mapping.unexpected, f"{class_name} has no place for it, and transformers leaves it out too")
    reasons = {name: reason for name, reason in reasons.items() if name not in further}
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
        further_layers=tuple(base.tensors[name] for name in further),
        conversion=ParameterConversion(
            mapping=mapping,
            disk=base.tensors,
            copied_only=copied_only,
            same_names=same_names,
            turned=frozenset(turned),
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
        tensors[name] = made_up if model.is_turned(name) else model.base.tensors.get(name, made_up)
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


def turned(stored: StoredTensor) -> StoredTensor:
    """Return the tensor with rows and columns of its matrices exchanged: a parameter that was saved whole, as it lies in
    a base that has it so.
    """
    if len(stored.spans) != 1:
        raise AssertionError("a tensor of a model file is one span")
    itemsize = stored.dtype.bits // 8
    columns, rows = stored.shape[-2:]
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
    return StoredTensor(spec=replace(stored.spec, shape=(*stored.shape[:-2], rows, columns)), spans=spans)


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


def class_row(config: ModelConfig, generator: ModelFacts | None, classifier: ModelFacts | None) -> Architecture:
    """Return the classes that transformers has for a model type, as a row like those of the table of architectures."""
    head = classifier.head if classifier else None
    last = next((last for last in LAST_LAYERS if last and head and head.endswith(last)), "")
    output = generator.output if generator else None
    return Architecture(
        model_type=config.model_type or "",
        causal_lm=generator.class_name if generator else None,
        sequence_classification=classifier.class_name if classifier and head else None,
        head=head.removesuffix(last) if head else None,
        causal_only=tuple(f"{output}.{leaf}" for leaf in ("weight", "bias")) if output else (),
        conv1d=frozenset().union(*(each.conv1d for each in (generator, classifier) if each)),
    )
