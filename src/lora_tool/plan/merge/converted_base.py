"""A base whose tensors have other names or shapes on disk than in memory, as if it were stored as it is in memory.

The planner knows parameters by the names that adapters use, those in memory. For a base that is not stored so, this
makes a base that is: each parameter is the rows that it is made of, wherever they lie. The steps on it become steps on
tensors of the names that `save_pretrained` writes (`on_disk`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

from msgspec import Struct, field
from msgspec.structs import replace

from lora_tool.actions import TensorAction
from lora_tool.architectures import Architecture, is_computed
from lora_tool.checkpoint import AdapterDir, ModelDir
from lora_tool.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.names.model import LABELS, ModelFacts, NamesOnDisk, RowMapping
from lora_tool.plan.adapter.modules import AdapterModules
from lora_tool.plan.base.task import Task
from lora_tool.plan.core.operation import rows_of
from lora_tool.plan.core.ops import Cast, Copy, Dequantise, LoraDelta, Precision
from lora_tool.plan.core.steps import InputRecord, Step
from lora_tool.plan.core.terms import LoraTerm
from lora_tool.plan.merge.adapter_in_memory import (
    SAVE_AGAIN,
    disk_name,
    in_memory,
    require_as_in_memory,
    require_no_lora_on_tied,
    require_pefts_experts,
    require_pefts_reading,
)
from lora_tool.plan.merge.base_view import PerExpert
from lora_tool.plan.merge.partly_quantised import of_one_type, require_unchanged
from lora_tool.plan.merge.split_steps import disk_steps
from lora_tool.rules.engine.subjects import BaseMatch
from lora_tool.tensors import DType, Span, StoredTensor, TensorSpec, TensorTable, TransposedSpan, contiguous


class ConvertedBase(Struct, frozen=True, kw_only=True):
    """A base in the words of memory, the adapter in the same, and the way back."""

    mapping: NamesOnDisk
    disk: TensorTable
    base: ModelDir
    adapters: tuple[AdapterDir, ...]
    arch: Architecture
    task: Task
    leftovers: tuple[InputRecord, ...]
    copied_only: Mapping[str, StoredTensor] = field(default_factory=dict)
    """Parameters whose rows are not rows on disk → their whole tensor there; they can be copied only."""
    plain: bool = False
    """Whether names on disk are those in memory, so that PEFT has nothing to translate."""
    partly_quantised: frozenset[str] = frozenset()
    """Parameters of which some rows are quantised on disk and some are not: they can only be left as they are."""

    @property
    def facts(self) -> ModelFacts:
        return self.mapping.facts

    @property
    def of_no_class(self) -> frozenset[str]:
        """See `BaseView`."""
        return frozenset(name for name in self.mapping.unexpected if not is_computed(name))

    @property
    def missing_keys(self) -> frozenset[str]:
        """Parameters of the class for which the base has no tensor."""
        return frozenset(self.mapping.missing)

    @property
    def tied_by_config(self) -> Mapping[str, str]:
        """The tensors that transformers ties only while `tie_word_embeddings` is true."""
        return self.mapping.tied_by_config

    def parameter_of(self, name: str) -> str:
        """See `BaseView`."""
        return self.mapping.place(name)

    def in_memory(self) -> BaseMatch:
        """Return the base with every parameter of its class by name and shape, for rules that read headers alone.

        What the base has not, a new head, has the labels of the adapter's. The parts of a fused parameter are there by
        their names on disk, where an adapter has LoRA on one of them.
        """
        held = {key.tensor: each.tensors[name] for each in self.adapters for name, key in each.keys.items()}
        held = held if self.facts.label_axes else {}
        dtype = self.base.dtype or DType.F32
        tensors: dict[str, StoredTensor] = {}
        for name, shape in self.facts.shapes.items():
            found = held.get(name)
            sizes = zip_longest(shape, found.shape[: len(shape)] if found is not None else ())
            spec = TensorSpec(
                name=name, dtype=dtype, shape=tuple(got if size == LABELS and got else size for size, got in sizes)
            )
            made_up = StoredTensor(spec=spec, spans=(Span(path=self.base.root, offset=0, nbytes=spec.nbytes),))
            tensors[name] = self.base.tensors.get(name, made_up)
        missing = tensors.keys() - self.base.tensors.keys() - self.copied_only.keys()
        for module in dict.fromkeys(key.module for each in self.adapters for key in each.keys.values()):
            if f"{module}.weight" not in tensors:
                tensors |= self._parts_beside(module)
        return BaseMatch(
            base=replace(self.base, weights=replace(self.base.weights, tensors=tensors)),
            arch=self.arch,
            facts=self.facts,
            missing=frozenset(missing),
            outside=self.mapping.outside,
        )

    def _parts_beside(self, module: str) -> dict[str, StoredTensor]:
        """Return the parts of the fused parameter that `module` is a part of, by the names that the adapter has."""
        own, name = disk_name(self.mapping, module), f"{module}.weight"
        if own is None:
            return {}
        longer, shorter = (own, name) if len(own) > len(name) else (name, own)
        shift = longer.removesuffix(shorter)
        parts = dict.fromkeys(piece.name for piece in self.mapping.parameters[self.mapping.place(name)].pieces or ())
        return {part.removeprefix(shift) if longer is own else shift + part: self.disk[part] for part in parts}

    def parts_of_fused(self, modules: AdapterModules, precision: Precision) -> tuple[AdapterModules, PerExpert]:
        """Return the modules without those that are no layers, and the deltas on tensors that are on disk alone.

        PEFT takes an adapter that an earlier transformers trained on single experts, and fuses its factors; here each
        goes into the expert's own tensor. Raises `UnsupportedAdapter` where PEFT's bits are asked for and PEFT would
        leave tensors out or scale them otherwise.
        """
        if precision is Precision.PEFT and not self.plain:
            for adapter in self.adapters:
                require_pefts_reading(self.mapping, adapter)
        require_as_in_memory(self.mapping, self.copied_only, modules)
        lora = dict(modules.lora)
        parameters = dict(modules.parameters)
        per_expert: dict[str, tuple[LoraTerm, ...]] = {}
        for module in [module for module in lora if module not in self.facts.layers]:
            if module in self.facts.modules:
                parameters[f"{module}.weight"] = lora.pop(module)
            elif (name := disk_name(self.mapping, module)) is not None:
                per_expert[name] = lora.pop(module)
        if precision is Precision.PEFT:
            require_pefts_experts(self.mapping, self.adapters, per_expert)
        changed = (*parameters, *(f"{name}.weight" for name in lora), *map(self.mapping.place, per_expert))
        require_unchanged(self.base.root, self.partly_quantised.intersection(changed))
        require_no_lora_on_tied(self.facts, (*lora, *(name.removesuffix(".weight") for name in parameters)))
        return replace(modules, lora=lora, parameters=parameters), per_expert

    def on_disk(self, steps: Sequence[Step], per_expert: PerExpert) -> tuple[Step, ...]:
        """Return the steps on the tensors that `save_pretrained` writes, those of the base in the base's order.

        `per_expert` are deltas on tensors that are on disk alone: parts of fused parameters.
        """
        by_name = {step.out.name: step for step in steps}
        stored = self.copied_only.keys()
        shapes = {step.out.name: step.out.shape for step in steps} | {name: self.facts.shapes[name] for name in stored}
        written = self.mapping.written(shapes)
        transposed = {name: made for name, made in written.items() if stored and not stored.isdisjoint(made.sources)}
        made_of_rows = {name: made for name, made in written.items() if name not in transposed}
        out = {step.out.name: step for step in disk_steps(by_name, made_of_rows, self.disk)}
        out |= {step.out.name: step for step in _stored(self, transposed)}
        out |= {name: _with_delta(out[name], term) for name, term in per_expert.items()}
        in_order = [out.pop(name) for name in self.disk if name in out]
        return (*in_order, *out.values())


def converted_base(
    base: ModelDir,
    adapters: Sequence[AdapterDir],
    mapping: NamesOnDisk,
    arch: Architecture,
    task: Task,
    *,
    plain: bool = False,
) -> ConvertedBase:
    """Return base and adapters in the names of memory that `mapping` gives them; `plain` if they are those on disk.

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
            held, partly = of_one_type(made, base.tensors)
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
    return ConvertedBase(
        mapping=mapping,
        disk=base.tensors,
        base=replace(base, weights=replace(base.weights, tensors=tensors)),
        adapters=tuple(in_memory(adapter, mapping) for adapter in adapters),
        arch=arch,
        task=task,
        leftovers=dropped,
        copied_only=copied_only,
        plain=plain,
        partly_quantised=frozenset(mixed),
    )


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


def _stored(view: ConvertedBase, written: Mapping[str, RowMapping]) -> Iterator[Step]:
    """Yield copies of the tensors behind parameters that are not rows of them: saving turns them back."""
    for name, made in written.items():
        tensor = view.disk.get(name)
        if tensor is None or tensor.shape != made.shape:
            raise UnsupportedAdapter(
                f"{view.base.root}: `{name}` {list(made.shape)} is stored transposed"
                + (f", {list(tensor.shape)}" if tensor else "")
                + ", and transformers would not write it that way",
                hint=SAVE_AGAIN,
            )
        yield Step(out=tensor.spec, op=Copy(source=tensor), action=TensorAction.COPIED, reason="as in the base")


def _with_delta(step: Step, terms: tuple[LoraTerm, ...]) -> Step:
    if not isinstance(step.op, Copy | Cast | Dequantise):
        raise UnsupportedAdapter(f"`{step.out.name}` has LoRA both by itself and as a part of a fused parameter")
    # PEFT fuses these factors, and rounds the delta of a bare parameter to its type
    op = LoraDelta(source=step.op.source, terms=terms, rounded=True)
    return Step(out=step.out, op=op, action=TensorAction.MERGED, reason=str(op))
