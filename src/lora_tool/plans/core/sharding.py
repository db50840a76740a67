"""Which output tensor goes into which file: the base's own files kept, or new ones up to a size."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lora_tool.core.tensors import TensorTable
from lora_tool.formats.files import json_bytes
from lora_tool.plans.core.steps import Shard, SideFile, Step

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DEFAULT_MAX_SHARD_BYTES = 5_000_000_000
"""transformers' default `max_shard_size` was "5GB" up to v4; files of that size suit every host."""


def base_files(steps: Iterable[Step], base: TensorTable) -> dict[str, str]:
    """Return the base's file of each output that has one: of its tensor of that name, or of the tensor's source."""
    files = {path: path.name for path in {tensor.path for tensor in base.values()}}
    held = {step.out.name: files.get(base.get(step.out.name, step.op.source).path) for step in steps}
    return {name: file for name, file in held.items() if file is not None}


def lay_out(
    steps: Sequence[Step],
    *,
    homes: Mapping[str, str],
    max_shard_bytes: int | None,
    metadata: Mapping[str, str] | None = None,
) -> tuple[Shard, ...]:
    """Return shards that hold each step once, all with the same `metadata`, by default the usual.

    With `max_shard_bytes` None the base's own grouping is kept: `homes` gives the base's file of each output name,
    and names that the base does not have go to the last file. Otherwise files are filled in order up to the size;
    only a single larger tensor exceeds it.
    """
    groups = _by_home(steps, homes) if max_shard_bytes is None else _by_size(steps, max_shard_bytes)
    said = {} if metadata is None else {"metadata": metadata}
    if len(groups) == 1:
        return (Shard(filename=SINGLE, steps=tuple(groups[0]), **said),)
    total = len(groups)
    return tuple(
        Shard(filename=f"model-{number:05d}-of-{total:05d}.safetensors", steps=tuple(group), **said)
        for number, group in enumerate(groups, start=1)
    )


def _by_home(steps: Sequence[Step], homes: Mapping[str, str]) -> list[list[Step]]:
    groups: dict[str, list[Step]] = {}
    guests = []
    for step in steps:
        home = homes.get(step.out.name)
        if home is None:
            guests.append(step)
        else:
            groups.setdefault(home, []).append(step)
    ordered = [groups[home] for home in sorted(groups)]
    if not ordered:
        return [guests]
    ordered[-1].extend(guests)
    return ordered


def _by_size(steps: Sequence[Step], limit: int) -> list[list[Step]]:
    groups: list[list[Step]] = []
    room = 0
    for step in steps:
        if not groups or step.out.nbytes > room:
            groups.append([])
            room = limit
        groups[-1].append(step)
        room -= step.out.nbytes
    return groups


def index_files(shards: Sequence[Shard]) -> tuple[SideFile, ...]:
    """Return the index file that several shards need, with the true sum of tensor bytes as `total_size`; none for one or none."""
    if len(shards) <= 1:
        return ()
    weight_map = {step.out.name: shard.filename for shard in shards for step in shard.steps}
    table = {
        "metadata": {"total_size": sum(shard.data_bytes for shard in shards)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    content = json_bytes(table, indent=2)
    return (SideFile(filename=INDEX, content=content, reason="written for the new weights"),)
