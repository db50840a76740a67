"""Converting an adapter, the whole way: found, planned, written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from lora_tool.checkpoint import AdapterDir
from lora_tool.display import from_here
from lora_tool.errors import WrongValue
from lora_tool.pipeline.writing import Written, write
from lora_tool.plan.convert.convertible import Convertible, convertible
from lora_tool.plan.convert.forms import AdapterForm
from lora_tool.plan.convert.plan_convert import plan_convert
from lora_tool.plan.core.plan import Plan
from lora_tool.sources import Reference, opened_model
from lora_tool.validation.bases import named_base


def default_output(adapter: AdapterDir, form: AdapterForm) -> Path:
    """Return where the adapter in its new form goes if nobody says: a sibling."""
    folder = adapter.root.resolve()
    return from_here(folder.parent / f"{folder.name}-{form}")


def planned(
    found: Convertible,
    *,
    to: AdapterForm,
    base: Reference | None = None,
    reward: bool = False,
    ignore: Iterable[str] = (),
) -> Plan:
    """Return the plan of `plan_convert`; `base` None takes the one that the adapter names, if it is on this disk."""
    adapter = found.adapter
    model, why = named_base(adapter) if base is None else (opened_model(base, near=adapter.root), "")
    return plan_convert(
        adapter, to=to, rebuilt=found.rebuilt, base=model, why_no_base=why, reward=reward, ignore=ignore
    )


def convert(
    adapter: Reference,
    to: AdapterForm | str,
    *,
    out: str | os.PathLike[str],
    base: Reference | None = None,
    reward: bool = False,
    ignore: Iterable[str] = (),
    verify: bool = False,
    jobs: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
) -> Written:
    """Write `adapter`, PEFT's or MLX-LM's, to `out` in the format `to`, with every value as it is; return the result.

    "peft" gives tensors the names that PEFT loads, "mlx" is MLX-LM's format, "peft-experts" and "peft-fused" have LoRA
    on experts one by one, or fused. `base` is the model whose modules complete names that lost a prefix, by default the
    one that the config names; with `reward`, for "peft", the value head beside the adapter becomes a score head;
    `ignore` are codes of rules. With `verify` samples are read back before the folder gets its name; `jobs`,
    `overwrite` and `resume` are those of `execute`. Raises `FindingsFound`, `CheckpointError`, `PlanError` for what has
    no such form, `ExecutionError`, `VerificationFailed`, `WrongValue`.
    """
    form = AdapterForm(to)
    if reward and form is not AdapterForm.PEFT:
        raise WrongValue('reward: a reward adapter is written in the format "peft" alone', hint='`to="peft"`')
    plan = planned(convertible(adapter, base), to=form, base=base, reward=reward, ignore=ignore)
    return write(plan, out, verify=verify, jobs=jobs, overwrite=overwrite, resume=resume)
