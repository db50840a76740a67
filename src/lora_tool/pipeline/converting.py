"""Converting an adapter, the whole way: found, planned, written."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lora_tool.checkpoint import AdapterDir
from lora_tool.display import from_here
from lora_tool.plan.convert.convertible import Convertible
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
