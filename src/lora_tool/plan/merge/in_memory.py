"""The plan of a merge that PEFT itself did, with the whole model in memory: its tensors, our side files and ledger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.actions import TensorAction
from lora_tool.adapter.view import view_of
from lora_tool.architectures import Architecture
from lora_tool.architectures.heads import last_weights
from lora_tool.checkpoint import AdapterDir, ModelDir
from lora_tool.checkpoint.quantised import in_full_precision
from lora_tool.errors import UnsupportedAdapter
from lora_tool.formats.quantised.names import give_full_precision
from lora_tool.formats.stored import same_values
from lora_tool.keys import Part
from lora_tool.names.model import ModelFacts
from lora_tool.plan.adapter.combine import Adapted
from lora_tool.plan.adapter.modules import AdapterModules
from lora_tool.plan.base.task import CLASSIFIERS, Task
from lora_tool.plan.core.ops import Copy, Precision
from lora_tool.plan.core.plan import Plan
from lora_tool.plan.core.steps import InputRecord, Step
from lora_tool.plan.merge.base_view import BaseView
from lora_tool.plan.merge.build_plan import build_plan
from lora_tool.plan.merge.context import Head, MergeContext, count_labels
from lora_tool.plan.merge.read_base import read_base
from lora_tool.plan.merge.tied_embeddings import ModelEnds
from lora_tool.plan.merge.untie import require_no_lora_on_tied_ends_in_memory
from lora_tool.report.findings import Finding, Severity
from lora_tool.rules.merging import MergeJudge
from lora_tool.sources import source_of
from lora_tool.tensors import DType, StoredTensor, float_type

_NOTHING = AdapterModules(
    lora={}, lora_bias={}, magnitudes={}, saved={}, frozen_base={}, embeddings=frozenset(), tokens={}
)
_REASON = "merged by PEFT, with the whole model in memory"


class InMemory(Struct, frozen=True, kw_only=True):
    """The request to PEFT: a model for `task`, with `num_labels` where it has labels."""

    base: ModelDir
    adapters: tuple[AdapterDir, ...]
    arch: Architecture
    task: Task
    num_labels: int | None
    dtype: DType | None
    facts: ModelFacts | None = None
    """The class, where it was looked up: a language model that sees is none of `AutoModelForCausalLM`'s."""
    findings: tuple[Finding, ...] = ()
    """The findings of the rules about the inputs."""

    @property
    def needed_bytes(self) -> int:
        """Memory that it takes: the model, its adapters in float32, and PEFT's work on the largest tensor."""
        sizes = {DType.F32: 4, DType.F64: 8}
        tensors = list(self.base.tensors.values())
        each = sizes.get(self.dtype, 2) if self.dtype else None
        model = sum(tensor.spec.numel * each if each else tensor.nbytes for tensor in tensors)
        adapters = sum(4 * t.spec.numel for adapter in self.adapters for t in adapter.tensors.values())
        largest = max((tensor.spec.numel for tensor in tensors), default=0)
        return model + adapters + 3 * 4 * largest + _LIBRARIES


_LIBRARIES = 700 << 20
"""What torch, transformers and PEFT take before any weight is loaded (measured: 0.6 GB with torch 2.13 for CPUs)."""


def ask_in_memory(
    base: ModelDir,
    adapters: Sequence[AdapterDir],
    *,
    task: Task | str = Task.AUTO,
    num_labels: int | None = None,
    dtype: DType | str | None = None,
    select: Iterable[str] = (),
    ignore: Iterable[str] = (),
    fail_on: Severity | str = Severity.ERROR,
) -> InMemory:
    """Return what PEFT is to be asked for. Takes and raises what `plan_merge` does, where PEFT could not be right
    either.
    """
    if in_full_precision(base) is not base:
        raise UnsupportedAdapter(
            f"{base.root}: the base is quantised, and transformers cannot load what it writes of such a base after PEFT's merge",
            hint=give_full_precision(source_of(base.root).hub_id, base.config, base.root),
        )
    judge = MergeJudge(
        task=Task(task).expected,
        num_labels=num_labels,
        select=tuple(select),
        ignore=tuple(ignore),
        fail_on=Severity(fail_on),
    )
    report = judge.as_stored(adapters, base)
    with judge.reading(base):
        view = read_base(base, adapters, Task(task))
    if view.task not in CLASSIFIERS:
        require_no_lora_on_tied_ends_in_memory(view)
    wanted = 1 if view.task is Task.REWARD and num_labels is None else num_labels
    return InMemory(
        base=base,
        adapters=tuple(adapters),
        arch=view.arch,
        task=view.task,
        num_labels=_labels(view, wanted),
        dtype=None if dtype is None else float_type(dtype),
        facts=None if view.task in CLASSIFIERS else view.facts,
        findings=report.findings,
    )


def _labels(view: BaseView, wanted: int | None) -> int | None:
    """Return how many labels the model has by its tensors; for a classifier without a head, how many are `wanted`."""
    whole = {
        key.tensor: adapter.tensors[name]
        for adapter in reversed(view.adapters)
        for name, key in adapter.keys.items()
        if key.part in (Part.PLAIN, Part.SAVED_MODULE)
    }
    if view.task in CLASSIFIERS:
        names = tuple(last_weights(view.arch.head or ""))
        held = (place[name] for place in (whole, view.base.tensors) for name in names if name in place)
        weight = next(held, None)
        return wanted if weight is None else weight.shape[0]
    if view.facts is None or view.task is Task.CAUSAL_LM:
        return None
    return count_labels(view.facts, whole, view.base)


def plan_in_memory(
    asked: InMemory,
    staged: ModelDir,
    *,
    why: str,
    max_shard_bytes: int | None,
) -> Plan:
    """Return the plan that makes a model folder of the weights that PEFT wrote into `staged`; `why` it had to."""
    head = None
    if asked.task in CLASSIFIERS:
        name = next(name for name in last_weights(asked.arch.head or "") if name in staged.tensors)
        weight = staged.tensors[name]
        head = Head(module=asked.arch.head or "", name=name, weight=weight, num_labels=weight.shape[0])
    was_tied = asked.base.whole_config.tie_word_embeddings
    is_tied = staged.whole_config.tie_word_embeddings
    merge = MergeContext(
        base=asked.base,
        adapted=tuple(Adapted(view=view_of(adapter), modules=_NOTHING) for adapter in asked.adapters),
        arch=asked.arch,
        task=asked.task,
        modules=_NOTHING,
        head=head,
        labels=asked.num_labels,
        dtype=asked.dtype,
        facts=asked.facts,
        ends=ModelEnds(untied=bool(was_tied) and is_tied is False),
    )
    plan = build_plan(
        merge,
        [_step(asked.base, tensor) for tensor in staged.tensors.values()],
        list(_leftovers(asked, staged)),
        asked.base,
        precision=Precision.PEFT,
        max_shard_bytes=max_shard_bytes,
        options={"tier": "in memory", "why": why},
    )
    stamps = {stamp.path: stamp for stamp in (*plan.inputs, *staged.weights.stamps)}
    notes = (*plan.notes, f"in memory: {why}")
    return replace(plan, inputs=tuple(stamps.values()), notes=notes, findings=asked.findings)


def _step(base: ModelDir, tensor: StoredTensor) -> Step:
    held = base.tensors.get(tensor.name)
    if held is not None and same_values(held, tensor):
        return Step(out=tensor.spec, op=Copy(source=held), action=TensorAction.COPIED, reason="as in the base")
    action = TensorAction.ADDED if held is None else TensorAction.MERGED
    return Step(out=tensor.spec, op=Copy(source=tensor), action=action, reason=_REASON)


def _leftovers(asked: InMemory, staged: ModelDir) -> Iterator[InputRecord]:
    for tensor in asked.base.tensors.values():
        if tensor.name not in staged.tensors:
            reason = "not in the model that transformers wrote"
            yield InputRecord(path=tensor.path, name=tensor.name, action=TensorAction.DROPPED, reason=reason)
    for adapter in asked.adapters:
        for tensor in adapter.tensors.values():
            yield InputRecord(path=tensor.path, name=tensor.name, action=TensorAction.CONSUMED, reason=_REASON)
