"""Inspecting checkpoints: what each is and holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from lora_tool.checkpoints import AdapterDir, Checkpoint, ModelDir
from lora_tool.checkpoints.sources import Reference, opened, opened_model
from lora_tool.core.choices import flag
from lora_tool.core.errors import WrongValue
from lora_tool.core.options import Options, option
from lora_tool.rules.bases import named_base
from lora_tool.workflows.drawing import drawer
from lora_tool.workflows.inspection.folders import inspect_checkpoint
from lora_tool.workflows.inspection.model import AdapterInspection, Inspection


@dataclass(frozen=True, kw_only=True)
class InspectOptions(Options):
    """How much of a checkpoint is computed."""

    norms: bool | None = option(
        None, "Norms of A, B and ΔW.  [default: for adapters up to 512 MiB]", parse=flag, off="no-norms"
    )
    spectra: bool = option(default=False, text="Also compute the singular values of ΔW.", parse=flag, library_only=True)


def inspect(checkpoint: Reference, options: InspectOptions) -> Inspection:
    """Return what `checkpoint`, a path, a Hub id or an opened checkpoint, holds. Raises `CheckpointError`."""
    return inspect_checkpoint(opened(checkpoint), norms=options.norms, spectra=options.spectra)


@dataclass(frozen=True, kw_only=True)
class InspectEachOptions(InspectOptions):
    """How several checkpoints are inspected, or one is drawn."""

    base: Reference | None = option(
        None,
        "Base model, for ‖ΔW‖/‖W‖ in the pictures.  [default: the one in the adapter's config, if it is on this disk]",
        metavar="MODEL",
    )
    plot: Path | None = option(None, "Picture of the checkpoint that is written.", library_only=True)


def inspect_each(checkpoints: Sequence[Reference], options: InspectEachOptions) -> tuple[Inspection, ...]:
    """Return what each checkpoint holds, and write the picture of one.

    Raises `CheckpointError`, `ExecutionError`, `MissingDependency`, `WrongValue`.
    """
    if options.plot is not None and len(checkpoints) > 1:
        raise WrongValue("`plot=FILE` draws one folder; lora-tool diff A B --plot FILE draws the difference of two")
    found = [opened(each) for each in checkpoints]
    inspections = tuple(inspect_checkpoint(each, norms=options.norms, spectra=options.spectra) for each in found)
    if options.norms is not False and len(found) > 1:
        inspections = tuple(_with_cosines(one, each, found[0]) for one, each in zip(inspections, found, strict=True))
    if options.plot is not None:
        base = _base_of(found[0], options.base)
        drawer().checkpoint(found[0], options.plot, base=base, facts=inspections[0].facts())
    return inspections


def _with_cosines(inspection: Inspection, checkpoint: Checkpoint, first: Checkpoint) -> Inspection:
    """Return the inspection of an adapter with the cosines of its heads and those of the first; else it as it is."""
    if not (
        isinstance(inspection, AdapterInspection)
        and isinstance(checkpoint, AdapterDir)
        and isinstance(first, AdapterDir)
    ):
        return inspection
    from lora_tool.rules.adapter.lt5_several import cosine_of_heads  # only for several adapters

    heads = []
    for head in inspection.head:
        own, other = checkpoint.tensors[head.name], first.tensors.get(head.name)
        fits = checkpoint is not first and other is not None and other.shape == own.shape and head.norm is not None
        heads.append(replace(head, cosine=cosine_of_heads(own, other)) if fits and other else head)
    return replace(inspection, head=tuple(heads))


def _base_of(checkpoint: Checkpoint, base: Reference | None) -> ModelDir | None:
    if base is None:
        return named_base(checkpoint)[0]
    return opened_model(base, near=checkpoint.folder.root, download=False)
