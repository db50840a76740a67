"""The inputs of a computed adapter, from its manifest, so that verify can compute it again."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct

from lora_tool.adapters.view import FACTORS
from lora_tool.checkpoints import AdapterDir, ModelDir, open_model
from lora_tool.checkpoints.sources import Reference, open_adapter_at, opened_adapter, opened_model, resolve
from lora_tool.core.errors import CheckpointError, NotACheckpoint
from lora_tool.core.keys import Part
from lora_tool.formats.manifest import Manifest, fingerprint
from lora_tool.formats.weights import Weights
from lora_tool.plans.algebra.whole_plan import Beginnings
from lora_tool.plans.core.manifest import input_name

Opened = TypeVar("Opened")


class WrittenAdapter(Struct, frozen=True, kw_only=True):
    """An adapter that has a manifest."""

    made: AdapterDir
    stored: Weights
    """Its tensors as they are on the disk, where MLX-LM's have other names and shapes."""
    manifest: Manifest


class SumInputs(WrittenAdapter, frozen=True, kw_only=True):
    """An adapter that is a sum, and the adapters that it was computed from, with their weights."""

    adapters: tuple[AdapterDir, ...]
    weights: tuple[float, ...]
    base: ModelDir | None = None
    """The model that some of it was computed from; None where its inputs' factors were enough."""

    @property
    def keep(self) -> float | None:
        """The share of ‖ΔW‖² that every module was to keep, None where none was requested."""
        keep = self.manifest.raw.get("keep")
        return float(keep) if isinstance(keep, int | float) else None

    @property
    def scale(self) -> float:
        """The scaling that the config says for all modules, which is not in the factors."""
        scale = self.manifest.raw.get("scale")
        return (float(scale) or 1.0) if isinstance(scale, int | float) else 1.0

    @property
    def exact(self) -> bool:
        """Whether nothing was to be left out."""
        return self.manifest.raw.get("rank") is None and self.keep is None

    @property
    def average(self) -> bool:
        """Whether heads that differ were averaged."""
        return self.manifest.raw.get("average") is True and self.head_of is None

    @property
    def head_of(self) -> int | None:
        """The place of the adapter whose head was chosen."""
        name = self.manifest.raw.get("head_of")
        return next((at for at in range(len(self.adapters)) if input_name(at + 1) == name), None)

    @property
    def names(self) -> Beginnings:
        """How its module paths begin, and those of the adapter that it was made of."""
        return Beginnings.of_json(self.manifest.raw.get("renamed"))

    @property
    def sources(self) -> tuple[AdapterDir, ...]:
        """The inputs that a report names."""
        return self.adapters

    @property
    def discarded(self) -> dict[str, float]:
        """Module → the share of ‖ΔW‖ that is left out, by the manifest."""
        return dict(_figures(self.manifest, "error"))

    def fingerprints(self) -> dict[str, str]:
        """Return the inputs' fingerprints by the names that the manifest gives them."""
        own = {input_name(at): fingerprint(each.weights) for at, each in enumerate(self.adapters, start=1)}
        return own if self.base is None else {**own, "base": fingerprint(self.base.weights)}


class ExtractInputs(WrittenAdapter, frozen=True, kw_only=True):
    """An adapter that was extracted, and the two models that it is the difference of."""

    model: ModelDir
    base: ModelDir

    @property
    def sources(self) -> tuple[ModelDir, ModelDir]:
        """The inputs that a report names."""
        return self.model, self.base

    @property
    def residuals(self) -> dict[str, float]:
        """Module → the distance of its ΔW from the difference, by the manifest."""
        return dict(_figures(self.manifest, "residual"))

    @property
    def transposed(self) -> bool:
        """Whether the models store the modules' weights [in, out]."""
        return self.made.config is not None and self.made.config.fan_in_fan_out

    @property
    def whole(self) -> dict[str, str]:
        """Tensor of the adapter that is not a LoRA factor → its name in the model."""
        names = {
            name: key.tensor if key.part is Part.PLAIN else f"{key.module}.{key.leaf}"
            for name, key in self.made.keys.items()
            if key.part not in FACTORS
        }
        return {name: own for name, own in names.items() if own in self.model.tensors}

    def fingerprints(self) -> dict[str, str]:
        """Return the models' fingerprints by the names that the manifest gives them."""
        return {name: fingerprint(each.weights) for name, each in (("model", self.model), ("base", self.base))}


def sum_inputs(written: WrittenAdapter, adapters: Sequence[Reference], base: Reference | None) -> SumInputs:
    """Return the adapters that the manifest says were added up, or `adapters`.

    Raises `NotACheckpoint` for an input that does not exist any more, or where another number of adapters is given.
    """
    made, manifest = written.made, written.manifest
    recorded = tuple(_recorded(manifest))
    opened = tuple(map(opened_adapter, adapters)) or tuple(recorded_adapter(entry, made.root) for entry in recorded)
    if len(opened) != len(recorded):
        raise NotACheckpoint(
            f"{made.root} was computed from {len(recorded)} adapters, but {len(opened)} were given",
            hint="give all of them, in their order: `adapters=A`",
        )
    model, named = None, manifest.input("base")
    if named:
        model = recorded_model(named, made.root, "computed") if base is None else opened_model(base)
    return SumInputs(
        made=made,
        stored=written.stored,
        manifest=manifest,
        adapters=opened,
        weights=tuple(map(_weight, recorded)),
        base=model,
    )


def extract_inputs(written: WrittenAdapter, base: Reference | None) -> ExtractInputs:
    """Return the models that the manifest says the adapter is the difference of, or `base` for the second.

    Raises `NotACheckpoint` for a model that does not exist any more.
    """
    made, manifest = written.made, written.manifest
    first = recorded_model(manifest.input("base"), made.root, "extracted") if base is None else opened_model(base)
    model = recorded_model(manifest.input("model"), made.root, "extracted")
    return ExtractInputs(made=made, stored=written.stored, manifest=manifest, model=model, base=first)


def _figures(manifest: Manifest, name: str) -> Iterator[tuple[str, float]]:
    """Yield the modules that a manifest has a figure of, and that figure."""
    listed = manifest.raw.get("modules")
    for entry in listed if isinstance(listed, list) else ():
        if isinstance(entry, dict) and "module" in entry and isinstance(entry.get(name), int | float):
            yield str(entry["module"]), float(entry[name])


def _recorded(manifest: Manifest) -> Iterator[Mapping[str, Any]]:
    number = 1
    while entry := manifest.input(input_name(number)):
        yield entry
        number += 1


def _weight(entry: Mapping[str, Any]) -> float:
    weight = entry.get("weight", 1.0)
    return float(weight) if isinstance(weight, int | float) else 1.0


def recorded_adapter(entry: Mapping[str, Any], root: Path) -> AdapterDir:
    """Return the adapter that an entry of the manifest in the folder `root` names. Raises as `recorded_input`."""
    again = f"lora-tool verify {shlex.quote(str(root))} --adapter ADAPTER"
    return recorded_input(entry, open_adapter_at, root, "computed", again)


def recorded_model(entry: Mapping[str, Any], root: Path, how: str) -> ModelDir:
    """Return the model that an entry of the manifest in the folder `root` names. Raises as `recorded_input`."""
    return recorded_input(entry, open_model, root, how, None)


def recorded_input(
    entry: Mapping[str, Any], opens: Callable[[Path], Opened], root: Path, how: str, hint: str | None
) -> Opened:
    """Return what `opens` makes of the input that an entry of the manifest in the folder `root` names.

    Raises `NotACheckpoint` with the `hint` where it does not exist any more; the message says `how` the folder was made.
    """
    hub_id, revision = entry.get("hub_id"), entry.get("revision")
    reference = f"hf://{hub_id}" if hub_id else str(entry.get("path"))
    try:
        return opens(resolve(reference, revision=revision if isinstance(revision, str) else None).path)
    except CheckpointError as error:
        raise NotACheckpoint(
            f"{root} was {how} from {hub_id or entry.get('path')}, which no longer exists: {error}", hint=hint
        ) from error
