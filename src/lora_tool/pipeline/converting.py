"""Converting an adapter, the whole way: found, planned, written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_tool.adapter.mlx import is_mlx, read_mlx
from lora_tool.checkpoint import AdapterDir
from lora_tool.checkpoint.folders import read_folder
from lora_tool.plan.convert.forms import AdapterForm
from lora_tool.plan.convert.plan_convert import plan_convert
from lora_tool.plan.core.plan import Plan
from lora_tool.sources import Reference, opened_adapter, opened_model
from lora_tool.validation.bases import named_base


@dataclass(frozen=True, slots=True, kw_only=True)
class Convertible:
    """An adapter that is to be converted, as PEFT has it."""

    adapter: AdapterDir
    rebuilt: Mapping[str, Any] | None = None
    """The fields of PEFT's config, of an adapter of another program."""


def convertible(reference: Reference, base: Reference | None = None) -> Convertible:
    """Return the adapter that is named: PEFT's, or MLX-LM's in a folder here. Raises as `opened_adapter`, `read_mlx`."""
    folder = Path(reference).expanduser() if isinstance(reference, str | os.PathLike) else None
    if folder is None or not folder.is_dir() or not is_mlx(read_folder(folder)):
        return Convertible(adapter=opened_adapter(reference))
    model = None if base is None else opened_model(base, near=folder)
    found = read_mlx(folder, None if model is None else model.tensors)
    named = {} if model is None else {"base_model_name_or_path": str(model.root.resolve())}
    return Convertible(adapter=found.adapter, rebuilt={**found.fields, **named})


def default_output(adapter: AdapterDir, form: AdapterForm) -> Path:
    """Return where the adapter in its new form goes if nobody says: a sibling."""
    folder = adapter.root.resolve()
    return folder.parent / f"{folder.name}-{form}"


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
