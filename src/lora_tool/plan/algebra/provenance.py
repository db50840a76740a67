"""What a computed adapter was made from, as its manifest says, so that verify can compute it again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lora_tool.adapter.mlx import is_mlx, read_mlx
from lora_tool.adapter.view import FACTORS
from lora_tool.checkpoint import ADAPTER, AdapterDir, ModelDir, open_model, require_whole
from lora_tool.checkpoint.folders import read_folder
from lora_tool.errors import CheckpointError, NotACheckpoint
from lora_tool.formats import manifest as manifest_format
from lora_tool.formats.files import is_file
from lora_tool.formats.fingerprint import fingerprint
from lora_tool.formats.manifest import Manifest, read_manifest
from lora_tool.formats.weights import Weights
from lora_tool.keys import Part
from lora_tool.plan.core.manifest import input_name
from lora_tool.sources import Reference, open_adapter_at, opened_adapter, opened_model, resolve

Opened = TypeVar("Opened", AdapterDir, ModelDir)


@dataclass(frozen=True, slots=True, kw_only=True)
class SumInputs:
    """An adapter that is a sum, and the adapters that it was computed from, with their weights."""

    made: AdapterDir
    stored: Weights
    """Its tensors as they are on the disk, where MLX-LM's have other names and shapes."""
    manifest: Manifest
    adapters: tuple[AdapterDir, ...]
    weights: tuple[float, ...]
    base: ModelDir | None = None
    """The model that some of it was computed from; None where its inputs' factors were enough."""

    @property
    def keep(self) -> float | None:
        """The share of ‖ΔW‖² that every module was to keep, None where that was not asked."""
        keep = self.manifest.raw.get("keep")
        return float(keep) if isinstance(keep, int | float) else None

    @property
    def exact(self) -> bool:
        """Whether nothing was to be left out."""
        return self.manifest.raw.get("rank") is None and self.keep is None

    @property
    def head_of(self) -> int | None:
        """The place of the adapter whose head was chosen."""
        name = self.manifest.raw.get("head_of")
        return next((at for at in range(len(self.adapters)) if input_name(at + 1) == name), None)

    @property
    def sources(self) -> tuple[AdapterDir, ...]:
        """The inputs that a report names."""
        return self.adapters

    @property
    def discarded(self) -> dict[str, float]:
        """Module → the share of ‖ΔW‖ that was said to be left out."""
        return dict(_figures(self.manifest, "error"))

    def fingerprints(self) -> dict[str, str]:
        """Return the inputs' fingerprints by the names that the manifest gives them."""
        own = {input_name(at): fingerprint(each.weights) for at, each in enumerate(self.adapters, start=1)}
        return own if self.base is None else {**own, "base": fingerprint(self.base.weights)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractInputs:
    """An adapter that was extracted, and the two models that it is the difference of."""

    made: AdapterDir
    stored: Weights
    manifest: Manifest
    model: ModelDir
    base: ModelDir

    @property
    def sources(self) -> tuple[ModelDir, ModelDir]:
        """The inputs that a report names."""
        return self.model, self.base

    @property
    def residuals(self) -> dict[str, float]:
        """Module → how far from the difference its ΔW was said to be."""
        return dict(_figures(self.manifest, "residual"))

    @property
    def transposed(self) -> bool:
        """Whether the models store the modules' weights [in, out]."""
        return self.made.config is not None and self.made.config.fan_in_fan_out

    @property
    def whole(self) -> dict[str, str]:
        """Tensor of the adapter that is no LoRA → its name in the model."""
        names = {
            name: key.tensor if key.part is Part.PLAIN else f"{key.module}.{key.leaf}"
            for name, key in self.made.keys.items()
            if key.part not in FACTORS
        }
        return {name: own for name, own in names.items() if own in self.model.tensors}

    def fingerprints(self) -> dict[str, str]:
        """Return the models' fingerprints by the names that the manifest gives them."""
        return {name: fingerprint(each.weights) for name, each in (("model", self.model), ("base", self.base))}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """An adapter that has a manifest."""

    made: AdapterDir
    stored: Weights
    """Its tensors as they are on the disk."""
    manifest: Manifest


def find_computed(
    folder: Reference, adapters: Sequence[Reference] = (), *, base: Reference | None = None
) -> SumInputs | ExtractInputs | None:
    """Return a computed adapter with what its manifest says it was computed from; None for anything else.

    `adapters` and `base` replace those that the manifest names. Raises `NotACheckpoint` for an input that does not exist
    any more, and as `open_checkpoint`.
    """
    written = _written(folder)
    if written is None:
        return None
    match written.manifest.raw.get("operation"), written.manifest.raw.get("to"):
        case ("combine" | "resize" | "prepare", _) | ("convert", "mlx"):
            require_whole(written.made)
            return _sum(written, adapters, base)
        case "extract", _:
            require_whole(written.made)
            return _extracted(written, base)
        case _:
            return None


def _written(folder: Reference) -> _Written | None:
    """Return the adapter of a folder that has a manifest, too; None of any other, which is not opened."""
    if not isinstance(folder, str | os.PathLike):
        made, mlx, path = folder, None, folder.root / manifest_format.FILE_NAME
    else:
        path = Path(folder) / manifest_format.FILE_NAME
        listed = read_folder(path.parent) if is_file(path) else None
        if listed is None or not (is_mlx(listed) or ADAPTER.recognise(listed) is not None):
            return None
        mlx = read_mlx(path.parent) if is_mlx(listed) else None
        made = mlx.adapter if mlx else ADAPTER.open(listed)
    if not isinstance(made, AdapterDir) or not is_file(path):
        return None
    return _Written(made=made, stored=mlx.stored if mlx else made.weights, manifest=read_manifest(path))


def _sum(written: _Written, adapters: Sequence[Reference], base: Reference | None) -> SumInputs:
    made, manifest = written.made, written.manifest
    recorded = tuple(_recorded(manifest))
    opened = tuple(map(opened_adapter, adapters)) or tuple(_adapter(entry, made) for entry in recorded)
    if len(opened) != len(recorded):
        raise NotACheckpoint(
            f"{made.root} was computed from {len(recorded)} adapters, but {len(opened)} were given",
            hint="give them in their order: --adapter A --adapter B",
        )
    named = manifest.input("base")
    model = (opened_model(base) if base is not None else _model(named, made)) if named else None
    return SumInputs(
        made=made,
        stored=written.stored,
        manifest=manifest,
        adapters=opened,
        weights=tuple(map(_weight, recorded)),
        base=model,
    )


def _extracted(written: _Written, base: Reference | None) -> ExtractInputs:
    made, manifest = written.made, written.manifest
    first = _model(manifest.input("base"), made) if base is None else opened_model(base)
    return ExtractInputs(
        made=made, stored=written.stored, manifest=manifest, model=_model(manifest.input("model"), made), base=first
    )


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


def _adapter(entry: Mapping[str, Any], made: AdapterDir) -> AdapterDir:
    return _opened(
        entry, open_adapter_at, made, "computed", f"lora-tool verify {shlex.quote(str(made.root))} --adapter ADAPTER"
    )


def _model(entry: Mapping[str, Any], made: AdapterDir) -> ModelDir:
    return _opened(entry, open_model, made, "extracted", None)


def _opened(
    entry: Mapping[str, Any], opens: Callable[[Path], Opened], made: AdapterDir, how: str, hint: str | None
) -> Opened:
    """Return the input that a manifest's entry names. Raises `NotACheckpoint` where it is not there any more."""
    hub_id, revision = entry.get("hub_id"), entry.get("revision")
    reference = f"hf://{hub_id}" if hub_id else str(entry.get("path"))
    try:
        return opens(resolve(reference, revision=revision if isinstance(revision, str) else None).path)
    except CheckpointError as error:
        raise NotACheckpoint(
            f"{made.root} was {how} from {hub_id or entry.get('path')}, which no longer exists: {error}", hint=hint
        ) from error
