"""The inputs of a merged folder, as given, or from its manifest or the configs; and planning the merge again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from lora_tool.adapters.support import require_lora
from lora_tool.adapters.weighted import all_weighted
from lora_tool.checkpoints import AdapterDir, ModelDir, open_adapter, open_model
from lora_tool.checkpoints.sources import Reference, opened_adapter, opened_model, resolve
from lora_tool.core.errors import CheckpointError, NotACheckpoint, UnsupportedAdapter
from lora_tool.core.options import inferred, replayed
from lora_tool.formats.manifest import FILE_NAME, fingerprint
from lora_tool.plans.core.manifest import input_name
from lora_tool.plans.core.ops import Precision
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.merge.options import PlanOptions
from lora_tool.plans.merge.plan_merge import plan_merge


class Provenance(Struct, frozen=True, kw_only=True):
    """A merged model, and the base and adapters that it is compared with."""

    merged: ModelDir
    base: ModelDir
    adapters: tuple[AdapterDir, ...]
    weights: tuple[float, ...] | None = None
    """The adapters' weights in their sum, 1 each without."""

    @property
    def by_manifest(self) -> Mapping[str, Any] | None:
        """The manifest of the merge; None if another tool or another operation wrote the folder."""
        manifest = self.merged.manifest
        return manifest.raw if manifest is not None and manifest.raw.get("operation") == "merge" else None

    @property
    def precision(self) -> Precision | None:
        """The arithmetic of the merge, None if no manifest records it."""
        return replayed(PlanOptions, self.by_manifest or {}).get("precision")

    def plan(self) -> Plan:
        """Return the plan of the same merge, made now, without judging its inputs again. Raises as `plan_merge` where
        nothing can be computed.
        """
        record = self.by_manifest
        options = inferred(PlanOptions, self.merged, self.base) if record is None else replayed(PlanOptions, record)
        weights = self.weights or (1.0,) * len(self.adapters)
        judged = PlanOptions(**options, weights=weights, allow_loss=True, ignore=("LT",))
        return plan_merge(self.base, self.adapters, judged)

    def plan_or_why_not(self) -> tuple[Plan | None, str]:
        """Return the plan, or a sentence on what about the adapter cannot be recomputed. Raises for unfit inputs."""
        try:
            require_lora(self.adapters)
            return self.plan(), ""
        except UnsupportedAdapter as error:
            return None, str(error)

    def fingerprints(self) -> Mapping[str, str]:
        """Return the inputs' fingerprints by the names that the manifest gives them."""
        names = (input_name(number) for number in range(1, len(self.adapters) + 1))
        adapters = {name: fingerprint(adapter.weights) for name, adapter in zip(names, self.adapters, strict=True)}
        return {"base": fingerprint(self.base.weights), **adapters}


def find_inputs(
    merged: Reference,
    *,
    base: Reference | None = None,
    adapters: Sequence[Reference] = (),
    open_base: Callable[[Path], ModelDir] = open_model,
) -> Provenance:
    """Return the merged model, its base and its adapters.

    `open_base` opens the folder of a base that a file names, for several merged models once, say.

    Without `adapters` the manifest names them; without `base` the manifest, else the adapter's config, else the merged
    model's `_name_or_path`. Given ones may be downloaded; those that only a file names must be on this disk.
    Raises `NotACheckpoint` if one is unknown, and as `open_checkpoint` does.
    """
    model = open_model(merged) if isinstance(merged, str | os.PathLike) else opened_model(merged)
    names, given = all_weighted(adapters, None)
    opened = tuple(map(opened_adapter, names)) or tuple(map(open_adapter, _recorded_adapters(model)))
    recorded = tuple(_recorded_weights(model, len(opened)))
    # weights that the user gives go before the manifest's
    weights = given if any(weight != 1 for weight in given) else recorded
    return Provenance(
        merged=model,
        base=open_base(_base_named_by(model, opened[0])) if base is None else opened_model(base),
        adapters=opened,
        weights=weights,
    )


def _recorded_weights(merged: ModelDir, count: int) -> Iterator[float]:
    for number in range(1, count + 1):
        entry = merged.manifest.input(input_name(number)) if merged.manifest else {}
        weight = entry.get("weight", 1.0)
        yield float(weight) if isinstance(weight, int | float) else 1.0


def _recorded_adapters(merged: ModelDir) -> Iterator[Path]:
    number = 1
    while (entry := _recorded(merged, input_name(number))) is not None:
        yield _resolve_named(entry, merged, "adapter")
        number += 1
    if number == 1:
        broken = next((each for each in merged.problems if Path(each.path).name == FILE_NAME), None)
        raise NotACheckpoint(
            str(broken) if broken else f"{merged.root} does not record which adapter was merged into it",
            hint=f"lora-tool verify {shlex.quote(str(merged.root))} --adapter ADAPTER",
        )


def _base_named_by(merged: ModelDir, adapter: AdapterDir) -> Path:
    hint = f"lora-tool verify {shlex.quote(str(merged.root))} --adapter {shlex.quote(str(adapter.root))} --base MODEL"
    return base_named_by(merged, adapter, hint=hint)


def base_named_by(model: ModelDir, adapter: AdapterDir | None = None, *, hint: str) -> Path:
    """Return the folder of the base that the model's manifest names, else the `adapter`, else its own config.

    Raises `NotACheckpoint` with the `hint` where none does, and as `resolve` where it is not on this disk.
    """
    recorded = _recorded(model, "base")
    if recorded is not None:
        return _resolve_named(recorded, model, "base", hint=hint if adapter is None else None)
    own = model.config.raw.get("_name_or_path") if model.config else None
    named = adapter.config if adapter is not None else None
    names = [
        (named.base_model if named else None, named.revision if named else None),
        (own if isinstance(own, str) else None, None),
    ]
    for name, revision in names:
        if name:
            try:
                path = resolve(name, near=model.root if adapter is None else adapter.root, revision=revision).path
            except CheckpointError as error:
                if model.config is not None and name is own:
                    error.args = (f"{model.config.path} names the base {name}: {error}",)
                error.hint = error.hint or hint
                raise
            if not path.samefile(model.root):
                return path
    nor = "no file of this model" if adapter is None else "neither this model nor the adapter"
    raise NotACheckpoint(f"{model.root}: {nor} names the base model", hint=hint)


def _recorded(merged: ModelDir, name: str) -> Mapping[str, Any] | None:
    entry = merged.manifest.input(name) if merged.manifest else {}
    return entry if entry.get("path") or entry.get("hub_id") else None


def _resolve_named(entry: Mapping[str, Any], merged: ModelDir, name: str, *, hint: str | None = None) -> Path:
    hub_id, revision = entry.get("hub_id"), entry.get("revision")
    reference = f"hf://{hub_id}" if hub_id else str(entry.get("path"))
    option = f"--{name} {name.upper()}"
    try:
        return resolve(reference, revision=revision if isinstance(revision, str) else None).path
    except CheckpointError as error:
        raise NotACheckpoint(
            f"{merged.root} was made from the {name} {printable_reference(entry)}, which no longer exists: {error}",
            hint=hint or f"lora-tool verify {shlex.quote(str(merged.root))} {option}",
        ) from error


def printable_reference(entry: Mapping[str, Any]) -> str:
    """Return the name of an input in a manifest's entry."""
    return str(entry.get("hub_id") or entry.get("path"))
