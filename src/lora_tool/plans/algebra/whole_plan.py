"""The plan of a computed adapter, once its steps are known: files, ledger, manifest. Every input tensor is in it."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from lora_tool.checkpoints import ADAPTER_WEIGHTS, AdapterDir, ModelDir
from lora_tool.checkpoints.sources import source_of
from lora_tool.core.actions import TensorAction
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.report import Finding
from lora_tool.core.tensors import FileStamp
from lora_tool.formats.fingerprint import fingerprint
from lora_tool.plans.algebra.ranks import ModuleRank, rank_warnings
from lora_tool.plans.core.manifest import adapters_in, describe_input, input_name
from lora_tool.plans.core.ops import Precision
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import InputRecord, Shard, SideFile, Step, copied_file


def adapter_plan(
    adapters: Sequence[AdapterDir],
    weights: Sequence[float],
    steps: Sequence[Step],
    config: SideFile,
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
    """Return the plan of an adapter that is computed from `adapters`, with these steps and this config.

    `manifest` says which operation it is, and with which arguments; `base` is the model that some of it was computed
    from, `computed` what the files are like in which that lies. Raises `UnsupportedAdapter` for a tensor of an adapter
    that no step has, and that is not `dropped` by name.
    """
    side_files = (config, *tokenizer_files(adapters))
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
            "modules": [each.as_json() for each in ranks],
        },
    )


def described(checkpoint: AdapterDir | ModelDir) -> Mapping[str, Any]:
    """Return what the manifest says of an input."""
    return describe_input(source_of(checkpoint.root), checkpoint.weights, fingerprint(checkpoint.weights))


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
    """Return what the files are like that the inputs' weights and the copied side files are in, each once."""
    stamps = {stamp.path: stamp for each in inputs for stamp in each.weights.stamps}
    copied = {file.source: FileStamp.of(file.source) for file in side_files if file.source is not None}
    return tuple({**stamps, **copied}.values())
