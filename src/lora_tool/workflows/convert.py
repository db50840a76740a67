"""Converting an adapter: found, planned, written, and read back."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lora_tool.checkpoints.sources import Reference, beside, opened_model, source_of
from lora_tool.core.choices import codes, flag
from lora_tool.core.errors import WrongValue
from lora_tool.core.options import option
from lora_tool.plans.convert.forms import AdapterForm
from lora_tool.plans.convert.peft_names import convertible
from lora_tool.plans.core.options import OUTPUT, ResumableOptions
from lora_tool.rules.bases import named_base
from lora_tool.rules.options import IgnoreOptions
from lora_tool.workflows.caller import LIBRARY, Caller, Done
from lora_tool.workflows.writing import carry_out, hashing, require_apart, require_output


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(ResumableOptions, IgnoreOptions):
    """The options of a conversion."""

    out: str | os.PathLike[str] | None = option(
        None, "Folder to write.  [default: ADAPTER-peft for the form peft, and so on]", **OUTPUT
    )
    base: Reference | None = option(
        None, "Base model; its modules complete names that lost their prefix.  [default: the config's]", metavar="MODEL"
    )
    reward: bool = option(
        default=False,
        text="Turn the value head beside the adapter into a reward model's score head.",
        parse=flag,
        name="rm",
    )
    ignore: Iterable[str] = option((), "Continue despite these findings: LT207.", parse=codes)
    verify: bool = option(
        default=False,
        text="Read samples back and check them before the output gets its name.",
        parse=flag,
        off="no-verify",
    )


def convert(adapter: Reference, to: AdapterForm | str, options: ConvertOptions, caller: Caller = LIBRARY) -> Done:
    """Write `adapter`, PEFT's or MLX-LM's, in the format `to`, with every value as it is.

    "peft" gives tensors the names that PEFT loads, "mlx" is MLX-LM's format, "peft-experts" and "peft-fused" have LoRA
    on experts one by one, or fused. Raises `FindingsFound`, `CheckpointError`, `PlanError` for what has no such form,
    `ExecutionError`, `VerificationFailed`, `WrongValue`.
    """
    form = AdapterForm(to)
    if options.reward and form is not AdapterForm.PEFT:
        raise WrongValue('`reward=True` needs `to="peft"`: it writes a reward adapter in PEFT\'s format')
    if options.out is not None:
        require_output(Path(options.out), options, adapter)
    found = convertible(adapter, options.base)
    out = Path(options.out) if options.out is not None else beside(source_of(found.adapter.root), form)
    require_apart(out, options, found.adapter.root)
    from lora_tool.plans.convert.plan_convert import plan_convert  # after the inputs are known to be right

    with hashing(caller, found.adapter):
        if options.base is None:
            base, why = named_base(found.adapter)
        else:
            base, why = opened_model(options.base, near=found.adapter.root), ""
        plan = plan_convert(
            found.adapter,
            to=form,
            rebuilt=found.rebuilt,
            base=base,
            why_no_base=why,
            reward=options.reward,
            ignore=options.ignore,
        )
        return carry_out(plan, out, options, caller)
