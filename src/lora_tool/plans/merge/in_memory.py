"""The plan of a merge that PEFT itself did, with the whole model in memory: its tensors, our side files and ledger."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace as replace_option

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.adapters.view import view_of
from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.checkpoints.quantised import in_full_precision
from lora_tool.checkpoints.sources import source_of
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.keys import Part
from lora_tool.core.report.findings import Finding
from lora_tool.core.tensors import DType, StoredTensor, TensorAction, float_type
from lora_tool.formats.quantised.names import give_full_precision
from lora_tool.formats.stored import same_values
from lora_tool.models.ends import last_weights
from lora_tool.plans.adapter.combine import Adapted, AdapterModules
from lora_tool.plans.base.task import CLASSIFIERS, Task
from lora_tool.plans.core.ops import Copy, Precision, copied_as
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import InputRecord, Step
from lora_tool.plans.merge.draft import Draft, Head, MergeInputs, Model, ModelEnds
from lora_tool.plans.merge.judged import judge_of
from lora_tool.plans.merge.model.converted import turned
from lora_tool.plans.merge.model.reading import read_model
from lora_tool.plans.merge.options import PlanOptions
from lora_tool.plans.merge.passes.head import count_labels
from lora_tool.plans.merge.passes.side_files import in_files, with_side_files
from lora_tool.plans.merge.passes.steps import kept_step
from lora_tool.plans.merge.plan_merge import inputs_of, plan_of
from lora_tool.plans.merge.untying import require_no_lora_on_tied_ends_in_memory

_REASON = "merged by PEFT, with the whole model in memory"


class InMemory(Struct, frozen=True, kw_only=True):
    """The request to PEFT."""

    inputs: MergeInputs
    model: Model
    num_labels: int | None
    """How many labels the model is to have; None where it has none."""
    dtype: DType | None
    findings: tuple[Finding, ...] = ()
    """The findings of the rules about the inputs."""

    @property
    def base(self) -> ModelDir:
        return self.inputs.stored

    @property
    def adapters(self) -> tuple[AdapterDir, ...]:
        return self.inputs.adapters

    @property
    def class_name(self) -> str | None:
        """The class of transformers that loads the base: a language model that sees is none of `AutoModelForCausalLM`'s."""
        if self.model.facts is not None and self.model.task not in CLASSIFIERS:
            return self.model.facts.class_name
        return self.model.task.auto_class

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


def ask_in_memory(base: ModelDir, adapters: Sequence[AdapterDir], options: PlanOptions) -> InMemory:
    """Return the request to PEFT. Takes and raises what `plan_merge` does, where PEFT could not be right
    either.
    """
    if in_full_precision(base) is not base:
        raise UnsupportedAdapter(
            f"{base.root}: the base is quantised, and transformers cannot load what it writes of such a base after PEFT's merge",
            hint=give_full_precision(source_of(base.root).hub_id, base.config, base.root),
        )
    inputs = inputs_of(base, adapters, options)
    judge = replace(judge_of(replace_option(options, untie=False)), by_peft=True)  # PEFT leaves tied ends tied
    report = judge.as_stored(inputs.adapters, base)
    with judge.reading(base):
        model = read_model(base, inputs.adapters, Task(options.task))
    if model.task not in CLASSIFIERS:
        require_no_lora_on_tied_ends_in_memory(model)
    wanted = 1 if model.task is Task.REWARD and options.num_labels is None else options.num_labels
    return InMemory(
        inputs=inputs,
        model=model,
        num_labels=_labels(model, wanted),
        dtype=None if options.dtype is None else float_type(options.dtype),
        findings=report.findings,
    )


def _labels(model: Model, wanted: int | None) -> int | None:
    """Return how many labels the model has by its tensors; for a classifier without a head, how many are `wanted`."""
    whole = {
        key.tensor: adapter.tensors[name]
        for adapter in reversed(model.adapters)
        for name, key in adapter.keys.items()
        if key.part in (Part.PLAIN, Part.SAVED_MODULE)
    }
    if model.task in CLASSIFIERS:
        names = tuple(last_weights(model.arch.head or ""))
        held = (place[name] for place in (whole, model.base.tensors) for name in names if name in place)
        weight = next(held, None)
        return wanted if weight is None else weight.shape[0]
    if model.facts is None or model.task is Task.CAUSAL_LM:
        return None
    return count_labels(model.facts, whole, model.base)


def plan_in_memory(request: InMemory, staged: ModelDir, options: PlanOptions, *, why: str) -> Plan:
    """Return the plan that makes a model folder of the weights that PEFT wrote into `staged`; `why` it had to."""
    model, head = request.model, None
    if model.task in CLASSIFIERS:
        name = next(name for name in last_weights(model.arch.head or "") if name in staged.tensors)
        weight = staged.tensors[name]
        head = Head(module=model.arch.head or "", name=name, weight=weight, num_labels=weight.shape[0])
    was_tied = request.base.whole_config.tie_word_embeddings
    is_tied = staged.whole_config.tie_word_embeddings
    draft = Draft(
        inputs=request.inputs,
        model=model,
        base=request.base,
        precision=Precision.PEFT,
        dtype=request.dtype,
        adapted=tuple(Adapted(view=view_of(adapter), modules=AdapterModules()) for adapter in request.adapters),
        head=head,
        labels=request.num_labels,
        ends=ModelEnds(untied=bool(was_tied) and is_tied is False),
        steps=tuple(_steps(request, staged)),
        leftovers=tuple(_leftovers(request, staged)),
        notes=(f"in memory: {why}",),
        recorded={"tier": "in memory", "why": why},
    )
    further = (kept_step(draft, tensor) for tensor in model.further_layers)
    draft = replace(draft, steps=(*draft.steps, *further))
    plan = plan_of(with_side_files(in_files(draft, options), options), request.findings)
    stamps = {stamp.path: stamp for stamp in (*plan.inputs, *staged.weights.stamps)}
    return replace(plan, inputs=tuple(stamps.values()))


def _steps(request: InMemory, staged: ModelDir) -> Iterator[Step]:
    base, conversion = request.base.tensors, request.model.conversion
    lie_turned = {conversion.mapping.parameters[name].sources[0] for name in conversion.turned} if conversion else set()
    for name, tensor in staged.tensors.items():
        as_it_lies = name in lie_turned and tensor.shape != base[name].shape
        yield _step(base.get(name), turned(tensor) if as_it_lies else tensor)


def _step(held: StoredTensor | None, tensor: StoredTensor) -> Step:
    if held is not None and same_values(held, tensor):
        return Step(out=tensor.spec, op=Copy(source=held), action=TensorAction.COPIED, reason="as in the base")
    action = TensorAction.ADDED if held is None else TensorAction.MERGED
    return Step(out=tensor.spec, op=copied_as(tensor.dtype, tensor), action=action, reason=_REASON)


def _leftovers(request: InMemory, staged: ModelDir) -> Iterator[InputRecord]:
    kept = staged.tensors.keys() | {tensor.name for tensor in request.model.further_layers}
    for tensor in request.base.tensors.values():
        if tensor.name not in kept:
            reason = "not in the model that transformers wrote"
            yield InputRecord(path=tensor.path, name=tensor.name, action=TensorAction.DROPPED, reason=reason)
    for adapter in request.adapters:
        for tensor in adapter.tensors.values():
            yield InputRecord(path=tensor.path, name=tensor.name, action=TensorAction.CONSUMED, reason=_REASON)
