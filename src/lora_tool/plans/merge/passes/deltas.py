"""The adapters' changes of the model's layers, summed over all adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from lora_tool.adapters.view import view_of
from lora_tool.core.choices import flag
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.options import Options, Recorded, Section, option
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.models.ends import end_names
from lora_tool.plans.adapter.combine import Adapted, adapter_modules, join, require_saved_in_first, without_delta
from lora_tool.plans.core.ops import Precision

if TYPE_CHECKING:
    from lora_tool.plans.merge.draft import Draft


@dataclass(frozen=True, kw_only=True)
class Deltas(Options):
    """The options of this pass."""

    section = Section.ARITHMETIC

    precision: Precision | str = option(
        Precision.FLOAT32,
        "Arithmetic: float32 accumulation, PEFT's own bits, or the same bytes on every machine.",
        parse=Precision,
        recorded=Recorded.AS_DECIDED,
    )
    expert_layout: ExpertLayout | str | None = option(
        None,
        "How a fused lora_B of experts is packed.  [default: as adapter_config.json says, else PEFT's rank-major]",
        parse=ExpertLayout,
        name="moe-b-layout",
        recorded=Recorded.ALWAYS,
    )
    weights: Sequence[float] | None = option(
        None, 'Weight of each adapter\'s ΔW.  [default: the number in its name ("A=0.7"), or 1]', library_only=True
    )
    average: bool = option(
        default=False,
        text="Merge the weighted mean: the weights are divided by their sum, and heads are averaged, too.",
        parse=flag,
        recorded=Recorded.IF_GIVEN,
    )
    head_alone: bool = option(
        default=False,
        text="Leave ΔW out: write the base with the adapter's head, for a server that adds ΔW itself.",
        parse=flag,
        library_only=True,
        recorded=Recorded.IF_GIVEN,
    )


def with_deltas(draft: Draft, options: Deltas) -> Draft:
    """Return the draft with what each adapter does and what all of them do together, without ΔW under `head_alone`.

    Raises `UnsupportedAdapter` for several adapters that PEFT would not merge as they were trained, where its bits are
    wanted.
    """
    model = draft.model
    layout = None if options.expert_layout is None else ExpertLayout(options.expert_layout)
    ends = end_names(model.base, model.arch)
    parts = []
    for adapter, weight in zip(model.adapters, draft.inputs.weights, strict=True):
        view = view_of(adapter)
        modules = adapter_modules(
            view, facts=model.facts, expert_layout=layout, ends=ends, base=model.base.tensors, weight=weight
        )
        parts.append(Adapted(view=view, modules=modules, weight=weight))
    adapted, together = join(parts, average=options.average)
    if options.head_alone:
        adapted, together = join([without_delta(each) for each in adapted], average=options.average)
    precision = Precision(options.precision)
    if precision is Precision.PEFT:
        require_saved_in_first(adapted)
    return replace(draft, adapted=adapted, modules=together, precision=precision)


def on_layers(draft: Draft, _: Options) -> Draft:
    """Return the draft with the modules that are layers in memory, and with the ΔW of parts of fused parameters."""
    conversion = draft.model.conversion
    if conversion is None:
        return draft
    from lora_tool.plans.merge.fused.parts import parts_of_fused

    modules, per_expert = parts_of_fused(draft.model, conversion, draft.modules, draft.precision)
    return replace(draft, modules=modules, per_expert=per_expert)


def require_same_everywhere(draft: Draft, _: Deltas) -> Draft:
    """Return the draft.

    Raises `UnsupportedAdapter` where torch would compute bytes that must not depend on the machine.
    """
    if draft.precision is not Precision.FLOAT64:
        return draft
    inits = [step.op.taken_out for step in draft.steps if step.op.taken_out]
    if inits:
        raise UnsupportedAdapter(
            f"`init_lora_weights` {inits[0]} is recomputed with torch, whose bits depend on the machine, "
            'but `precision="float64"` promises the same bytes on every machine',
            hint='`precision="peft"` gives the bits of PEFT on this machine',
        )
    return draft
