"""The plan of a computed adapter, once its steps are known: files, ledger, manifest. Every input tensor is in it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.adapters.view import AdapterView, WholeTensor
from lora_tool.checkpoints import ADAPTER_WEIGHTS, AdapterDir, ModelDir
from lora_tool.checkpoints.sources import source_of
from lora_tool.core import keys
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.keys import Part
from lora_tool.core.report import Finding
from lora_tool.core.tensors import DType, FileStamp, StoredTensor, TensorAction, TensorSpec
from lora_tool.formats.manifest import fingerprint
from lora_tool.formats.stored import same_values
from lora_tool.models.ends import head_of
from lora_tool.models.text_classes import text_class_of
from lora_tool.plans.algebra.ranks import ModuleRank, rank_warnings, total_kept
from lora_tool.plans.core.factor_ops import averaged_heads, mean_of
from lora_tool.plans.core.manifest import adapters_in, describe_input, input_name
from lora_tool.plans.core.ops import Copy, Precision
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import InputRecord, Shard, SideFile, Step, copied_file
from lora_tool.rules.serving.together import path_with


def adapter_plan(
    adapters: Sequence[AdapterDir],
    weights: Sequence[float],
    steps: Sequence[Step],
    config: SideFile | None,
    *,
    dropped: Iterable[InputRecord],
    findings: tuple[Finding, ...],
    notes: Iterable[str],
    ranks: Sequence[ModuleRank],
    manifest: Mapping[str, Any],
    filename: str = ADAPTER_WEIGHTS,
    base: ModelDir | None = None,
    computed: Sequence[FileStamp] = (),
) -> Plan:
    """Return the plan of an adapter that is computed from `adapters`, with these steps and this config, or a single file.

    `manifest` says which operation it is, and with which arguments; `base` is the model that some of it was computed
    from, `computed` the stamps of the files with its factors. Raises `UnsupportedAdapter` for a tensor of an adapter
    that no step has, and that is not `dropped` by name.
    """
    side_files = (config, *tokenizer_files(adapters)) if config else ()
    leftovers = (*dropped, *_used(adapters, steps))
    _require_all(adapters, leftovers)
    inputs = {input_name(number): each for number, each in enumerate(adapters, start=1)}
    records = [described(each) for each in adapters]
    added = [
        (each, str(record["fingerprint"]))
        for each, record, weight in zip(adapters, records, weights, strict=True)
        if weight != 0
    ]
    return Plan(
        shards=(Shard(filename=filename, steps=tuple(steps)),),
        side_files=side_files,
        leftovers=leftovers,
        inputs=(*stamps_of((*adapters, *([base] if base else [])), side_files), *computed),
        precision=Precision.FLOAT64,
        findings=findings,
        input_names={each.root: name for name, each in inputs.items()} if len(inputs) > 1 else {},
        hashed=weights_of(adapters),
        warnings=tuple(rank_warnings(ranks)),
        notes=tuple(notes),
        manifest={
            **manifest,
            "merged_adapters": adapters_in(added),
            "inputs": {
                **{
                    name: {**record, "weight": weight}
                    for name, record, weight in zip(inputs, records, weights, strict=True)
                },
                **({} if base is None else {"base": described(base)}),
            },
            "kept": total_kept(ranks),
            "modules": [each.as_json() for each in ranks],
        },
    )


def described(checkpoint: AdapterDir | ModelDir) -> Mapping[str, Any]:
    """Return the manifest's entry for an input."""
    return describe_input(source_of(checkpoint.root), checkpoint.weights, fingerprint(checkpoint.weights))


def weights_of(inputs: Iterable[AdapterDir | ModelDir]) -> tuple[Path, ...]:
    """Return the inputs' files of weights, each once: the manifest has their hashes."""
    return tuple(dict.fromkeys(file.path for each in inputs for file in each.weights.files))


def tokenizer_files(inputs: Sequence[AdapterDir | ModelDir]) -> Iterator[SideFile]:
    """Yield the tokenizer's files of the first input that has some, and its named chat templates."""
    folder = next((each.folder for each in inputs if each.folder.tokenizer_files), None)
    if folder is None:
        return
    for name in (*folder.tokenizer_files, *folder.templates):
        yield copied_file(folder.root, name, folder.root)


def _used(adapters: Sequence[AdapterDir], steps: Sequence[Step]) -> Iterator[InputRecord]:
    """Yield every tensor of the adapters that is in an output."""
    places = {(tensor.path, tensor.name): step.out.name for step in steps for tensor in step.op.inputs}
    for adapter in adapters:
        for name, tensor in adapter.tensors.items():
            place = places.get((tensor.path, name))
            if place is not None:
                yield InputRecord(path=tensor.path, name=name, action=TensorAction.CONSUMED, reason=f"in {place}")


def _require_all(adapters: Sequence[AdapterDir], leftovers: Sequence[InputRecord]) -> None:
    """Raise unless every tensor of every adapter is in a step, or left out by name."""
    known = {(item.path, item.name) for item in leftovers}
    for adapter in adapters:
        for name, tensor in adapter.tensors.items():
            if (tensor.path, name) not in known:
                raise UnsupportedAdapter(
                    f"{tensor.path}: `{name}` has no place in the new adapter",
                    hint=f"lora-tool validate {shlex.quote(str(adapter.root))}",
                )


def stamps_of(inputs: Sequence[AdapterDir | ModelDir], side_files: Sequence[SideFile]) -> tuple[FileStamp, ...]:
    """Return the stamps of the inputs' weight files and of the copied side files, each once."""
    stamps = {stamp.path: stamp for each in inputs for stamp in each.weights.stamps}
    copied = {file.source: FileStamp.of(file.source) for file in side_files if file.source is not None}
    return tuple({**stamps, **copied}.values())


# The whole tensors of a sum of adapters: heads, saved modules, biases, trained tokens. They cannot be added.


class WholeTensors(Struct, frozen=True, kw_only=True):
    """The whole tensors of a sum, and those that are not in it."""

    steps: tuple[Step, ...]
    dropped: tuple[InputRecord, ...]
    means: tuple[str, ...] = ()
    """The names of those that are averaged."""


def whole_tensors(
    views: Sequence[AdapterView], *, head_of: AdapterView | None = None, weights: Sequence[float] | None = None
) -> WholeTensors:
    """Return every whole tensor of the adapters once: those that are the same wherever they are.

    If their values differ, those of `head_of` are taken; with `weights`, heads are averaged. Raises `UnsupportedAdapter` if they differ without `head_of`.
    """
    kept: dict[str, tuple[StoredTensor, AdapterView]] = {}
    dropped: list[InputRecord] = []
    means = {} if weights is None else {step.out.name: step for step in _means(views, weights)}
    ordered = sorted(views, key=lambda view: view is not head_of)
    for view in ordered:
        for name, tensor in _named(view, dropped):
            if name in means:
                continue
            first, whose = kept.setdefault(name, (tensor, view))
            if first is tensor:
                continue
            same = same_values(first, tensor)
            if not same and whose is not head_of:
                raise UnsupportedAdapter(
                    f"{tensor.path}: `{tensor.name}` differs from the one in {whose.adapter.root}, and whole tensors "
                    "cannot be added as ΔW can",
                    hint=f"choose which to keep: `head_of={shlex.quote(str(whose.adapter.root))}`",
                )
            why = "holds it with the same values" if same else "has the requested one"
            dropped.append(_dropped(tensor, f"{whose.adapter.root} {why}"))
    return WholeTensors(
        steps=(*(_copied(name, tensor, view) for name, (tensor, view) in kept.items()), *means.values()),
        dropped=tuple(dropped),
        means=tuple(means),
    )


def _means(views: Sequence[AdapterView], weights: Sequence[float]) -> Iterator[Step]:
    """Yield the steps that average heads which all adapters have, and whose values differ."""
    for name, held in averaged_heads([dict(_named(view, [])) for view in views]):
        dtype = DType.F64 if any(each.dtype is DType.F64 for each in held) else DType.F32
        out = TensorSpec(name=name, dtype=dtype, shape=held[0].shape)
        yield Step(out=out, op=mean_of(held, weights), action=TensorAction.COMPUTED, reason="the mean of all adapters'")


def magnitude_steps(view: AdapterView) -> Iterator[Step]:
    """Yield the steps that copy DoRA's magnitudes, each under the name that PEFT gives it."""
    for layer in view.layers:
        if layer.magnitude is not None:
            key = view.adapter.keys[layer.magnitude.name]
            yield _copied(replace(key, module=layer.module).canonical, layer.magnitude, view)


def _copied(name: str, tensor: StoredTensor, view: AdapterView) -> Step:
    reason = f"copied from {view.adapter.root}"
    out = replace(tensor.spec, name=name)
    return Step(out=out, op=Copy(source=tensor), action=TensorAction.COPIED, reason=reason)


def _named(view: AdapterView, dropped: list[InputRecord]) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the whole tensors by the names that PEFT gives them; note those that it does not load."""
    for name, first in view.repeats.items():
        dropped.append(_dropped(view.adapter.tensors[name], f"a copy of {first.name}, which is in the file too"))
    for item in view.whole:
        if item.tensor.name in view.repeats:
            continue
        if item.part is Part.ORIGINAL_MODULE:
            dropped.append(_dropped(item.tensor, "the frozen original of a saved module; PEFT does not load it either"))
        else:
            yield _peft_name(view, item), item.tensor


def _peft_name(view: AdapterView, item: WholeTensor) -> str:
    return replace(view.adapter.keys[item.tensor.name], module=item.module, leaf=item.leaf).canonical


def _dropped(tensor: StoredTensor, reason: str) -> InputRecord:
    return InputRecord(path=tensor.path, name=tensor.name, action=TensorAction.DROPPED, reason=reason)


# An adapter under the names that its modules have elsewhere: in the whole of a multimodal model, or in a server.


class Beginnings(Struct, frozen=True, kw_only=True):
    """What module paths begin with in the text class, and in the whole model; nothing where both are the same."""

    text: str = ""
    whole: str = ""
    parts: Mapping[str, str] = {}
    """Parts of paths that a server calls otherwise → what it calls them, the first that fits."""

    def path(self, module: str) -> str:
        """Return a module's path in the whole model; a new head has the same in both."""
        if head_of(module):
            return module
        module = path_with(module, self.parts) or module
        return self.whole + module.removeprefix(self.text) if module.startswith(self.text) else module

    def back(self, path: str) -> str:
        """Return a path of the whole model as the text class has it; so also the name of a tensor."""
        path = self.text + path.removeprefix(self.whole) if path.startswith(self.whole) else path
        return path_with(path, {theirs: ours for ours, theirs in self.parts.items()}) or path

    def steps(self, steps: Iterable[Step]) -> tuple[Step, ...]:
        """Return the steps that write an adapter's tensors, with the whole model's paths in the tensors' names."""
        if self == SAME:
            return tuple(steps)
        return tuple(replace(step, out=replace(step.out, name=self._name(step.out.name))) for step in steps)

    def base(self, base: ModelDir) -> ModelDir:
        """Return the whole model with the names that its tensors have in the text class, for those that are in it."""
        if self == SAME:
            return base
        tensors = {self.back(name): tensor for name, tensor in base.tensors.items()}
        return replace(base, weights=replace(base.weights, tensors=tensors))

    def _name(self, name: str) -> str:
        key = keys.parse(name)
        return replace(key, module=self.path(key.module)).canonical

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON data, for the manifest."""
        return {"text": self.text, "whole": self.whole, **({"parts": dict(self.parts)} if self.parts else {})}

    @classmethod
    def of_json(cls, data: object) -> Beginnings:
        """Return the beginnings in a manifest; without any those of no renaming."""
        known: dict[str, Any] = data if isinstance(data, dict) else {}
        parts = known.get("parts")
        named = {str(ours): str(theirs) for ours, theirs in parts.items()} if isinstance(parts, dict) else {}
        return cls(text=str(known.get("text", "")), whole=str(known.get("whole", "")), parts=named)


SAME = Beginnings()


def beginnings_of(view: AdapterView, base: ModelDir | None) -> Beginnings:
    """Return how module paths begin in the text class that the adapter was trained on, and in `base`; see `text_class_of`."""
    if base is None or base.config is None:
        return SAME
    modules = (layer.target for layer in view.layers)
    text = text_class_of(base.config.model_type or "", base.tensors, modules)
    return SAME if text is None else Beginnings(text=text.strip, whole=text.add)
