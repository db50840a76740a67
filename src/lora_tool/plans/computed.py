"""Adapters that were computed or converted, with their inputs, so that verify can compute them again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import msgspec
from msgspec import Struct

from lora_tool.adapters.gguf import GgufLayout, is_gguf, read_gguf
from lora_tool.adapters.mlx import is_mlx, read_mlx
from lora_tool.adapters.view import AdapterView, view_of
from lora_tool.checkpoints import ADAPTER, AdapterDir, ModelDir, open_checkpoint, require_whole
from lora_tool.checkpoints.folders import read_folder
from lora_tool.checkpoints.sources import Reference, opened_adapter, opened_model
from lora_tool.core.display import counted
from lora_tool.core.errors import BadConfig, Defect, NotACheckpoint
from lora_tool.core.tensors import TensorTable
from lora_tool.formats import manifest as manifest_format
from lora_tool.formats.files import is_file
from lora_tool.formats.manifest import Manifest, fingerprint, read_manifest
from lora_tool.formats.weights import Weights
from lora_tool.plans.algebra.provenance import (
    ExtractInputs,
    SumInputs,
    WrittenAdapter,
    extract_inputs,
    recorded_adapter,
    recorded_input,
    recorded_model,
    sum_inputs,
)
from lora_tool.plans.convert.forms import AdapterForm
from lora_tool.plans.convert.labels import Asked
from lora_tool.plans.convert.peft_names import Convertible, convertible
from lora_tool.plans.convert.plan_convert import plan_convert
from lora_tool.plans.convert.plan_seq_cls import plan_seq_cls
from lora_tool.plans.core.manifest import input_name
from lora_tool.plans.core.plan import Plan


class ConvertInputs(WrittenAdapter, frozen=True, kw_only=True):
    """An adapter in another form, and the adapter that it was before."""

    form: AdapterForm
    before: Convertible
    base: ModelDir | None
    """The model whose modules or experts gave names; None where the adapter's own names were enough."""

    @property
    def sources(self) -> tuple[AdapterDir]:
        """The inputs that a report names."""
        return (self.before.adapter,)

    def fingerprints(self) -> dict[str, str]:
        """Return the inputs' fingerprints by the names that the manifest gives them."""
        own = {"adapter": fingerprint(self.before.adapter.weights)}
        return own if self.base is None else {**own, "base": fingerprint(self.base.weights)}

    def plan(self) -> Plan:
        """Return the plan of the same conversion, made now, without judging its input again. Raises as `plan_convert`."""
        return plan_convert(
            self.before.adapter,
            to=self.form,
            rebuilt=self.before.rebuilt,
            base=self.base,
            reward="value_head" in self.manifest.raw,
            ignore=("LT",),
        )


def convert_inputs(written: WrittenAdapter, adapters: Sequence[Reference], base: Reference | None) -> ConvertInputs:
    """Return the adapter that the manifest says was converted, or the one of `adapters`.

    Raises `NotACheckpoint` for an input that does not exist any more, and as `convertible`.
    """
    made, manifest = written.made, written.manifest
    if len(adapters) > 1:
        raise NotACheckpoint(
            f"{made.root} was converted from one adapter, but {len(adapters)} were given", hint="give one: `adapters=A`"
        )
    form = AdapterForm(str(manifest.raw["to"]))
    model = _base(manifest, made, form) if base is None else opened_model(base)
    if adapters:
        before = convertible(adapters[0], model)
    else:
        entry, again = manifest.input("adapter"), f"lora-tool verify {shlex.quote(str(made.root))} --adapter ADAPTER"
        before = recorded_input(entry, lambda path: convertible(path, model), made.root, "converted", again)
    return ConvertInputs(made=made, stored=written.stored, manifest=manifest, form=form, before=before, base=model)


def _base(manifest: Manifest, made: AdapterDir, form: AdapterForm) -> ModelDir | None:
    """Return the base that the manifest names; PEFT's names may be planned without one that does not exist any more."""
    named = manifest.input("base")
    if not named:
        return None
    try:
        return recorded_model(named, made.root, "converted")
    except NotACheckpoint:
        if form is not AdapterForm.PEFT:
            raise
        return None


class SeqClsInputs(Struct, frozen=True, kw_only=True):
    """A classifier that was converted from a judge or another classifier, an adapter or a model."""

    made: AdapterDir | ModelDir
    manifest: Manifest
    source: AdapterDir | ModelDir
    base: ModelDir | None
    asked: Asked

    @property
    def stored(self) -> Weights:
        """Its tensors as they are on the disk."""
        return self.made.weights

    @property
    def sources(self) -> tuple[AdapterDir | ModelDir]:
        """The inputs that a report names."""
        return (self.source,)

    def fingerprints(self) -> dict[str, str]:
        """Return the inputs' fingerprints by the names that the manifest gives them."""
        named = (("base", self.source),) if self.base is None else (("adapter", self.source), ("base", self.base))
        return {name: fingerprint(each.weights) for name, each in named}

    def plan(self) -> Plan:
        """Return the plan of the same conversion, made now, without judging its input again. Raises as `plan_seq_cls`."""
        return plan_seq_cls(self.source, self.base, self.asked, ignore=("LT",))


def seq_cls_inputs(
    made: AdapterDir | ModelDir, manifest: Manifest, adapters: Sequence[Reference], base: Reference | None
) -> SeqClsInputs:
    """Return the classifier with what its manifest says it was made of, or with `adapters` and `base`.

    Raises `NotACheckpoint` for an input that does not exist any more, `BadConfig` for a manifest that does not say what was
    asked for.
    """
    require_whole(made)
    if len(adapters) > isinstance(made, AdapterDir):
        what = "one adapter" if isinstance(made, AdapterDir) else "a model"
        raise NotACheckpoint(
            f"{made.root} was converted from {what}, but {counted(len(adapters), 'adapter')} came with it",
            hint="give one: `adapters=A`" if isinstance(made, AdapterDir) else "give it: `base=MODEL`",
        )
    try:
        asked = msgspec.convert(manifest.raw.get("asked"), Asked)
    except msgspec.ValidationError as error:
        raise BadConfig.of(manifest.path, Defect.BAD_FIELD, f"`asked`: {error}") from error
    model = recorded_model(manifest.input("base"), made.root, "converted") if base is None else opened_model(base)
    if isinstance(made, ModelDir):
        return SeqClsInputs(made=made, manifest=manifest, source=model, base=None, asked=asked)
    entry = manifest.input("adapter")
    source = opened_adapter(adapters[0]) if adapters else recorded_adapter(entry, made.root)
    return SeqClsInputs(made=made, manifest=manifest, source=source, base=model, asked=asked)


ComputedInputs: TypeAlias = SumInputs | ExtractInputs | ConvertInputs | SeqClsInputs
"""What was computed with its inputs: a sum, a difference of models, another form of one adapter, or a classifier."""


def find_computed(
    folder: Reference, adapters: Sequence[Reference] = (), *, base: Reference | None = None
) -> ComputedInputs | None:
    """Return a computed adapter, or a classifier, with what its manifest says it was computed from; None for anything else.

    `adapters` and `base` replace those that the manifest names. Raises `NotACheckpoint` for an input that does not
    exist any more, and as `open_checkpoint`.
    """
    written = _written(folder, adapters)
    if written is None:
        return None
    if not isinstance(written, WrittenAdapter):
        return seq_cls_inputs(*written, adapters, base)
    match written.manifest.raw.get("operation"), written.manifest.raw.get("to"):
        case ("combine" | "resize" | "prepare", _) | ("convert", "mlx"):
            require_whole(written.made)
            return sum_inputs(written, adapters, base)
        case "convert", "peft" | "peft-experts" | "peft-fused":
            require_whole(written.made)
            return convert_inputs(written, adapters, base)
        case "extract", _:
            require_whole(written.made)
            return extract_inputs(written, base)
        case _:
            return None


def _written(
    folder: Reference, adapters: Sequence[Reference]
) -> WrittenAdapter | tuple[AdapterDir | ModelDir, Manifest] | None:
    """Return the adapter of a folder that has a manifest, or the classifier with its manifest; None of any other, which
    is not opened.
    """
    opened, root = (None, Path(folder)) if isinstance(folder, str | os.PathLike) else (folder, folder.root)
    path = root / manifest_format.FILE_NAME
    listed = read_folder(path.parent) if is_file(path) else None
    if listed is None:
        return None
    if read_manifest(path).raw.get("to") == AdapterForm.SEQ_CLS.value:
        found = open_checkpoint(root) if opened is None else opened
        return (found, read_manifest(path)) if isinstance(found, AdapterDir | ModelDir) else None
    if opened is None and is_mlx(listed):
        manifest = read_manifest(path)
        mlx = read_mlx(path.parent, _experts_of(manifest, path.parent, adapters))
        return WrittenAdapter(made=mlx.adapter, stored=mlx.stored, manifest=manifest)
    if opened is None and is_gguf(listed):
        manifest = read_manifest(path)
        layout = GgufLayout.of_json(manifest.raw.get("gguf"), path)
        layers = _first_view(manifest, path.parent, adapters).layers
        gguf = read_gguf(listed, layout, {*(layer.target for layer in layers), *layout.names.ends})
        return WrittenAdapter(made=gguf.adapter, stored=gguf.stored, manifest=manifest)
    if opened is None and ADAPTER.recognise(listed) is not None:
        opened = ADAPTER.open(listed)
    if not isinstance(opened, AdapterDir):
        return None
    return WrittenAdapter(made=opened, stored=opened.weights, manifest=read_manifest(path))


def _experts_of(manifest: Manifest, root: Path, adapters: Sequence[Reference]) -> TensorTable:
    """Return the base's names of the weights under the first input's LoRA: MLX-LM's stack lacks the experts' names."""
    if not adapters and not manifest.input("adapter"):
        return {}
    return {f"{layer.target}.weight": layer.any_tensor for layer in _first_view(manifest, root, adapters).layers}


def _first_view(manifest: Manifest, root: Path, adapters: Sequence[Reference]) -> AdapterView:
    return view_of(opened_adapter(adapters[0]) if adapters else recorded_adapter(manifest.input(input_name(1)), root))
