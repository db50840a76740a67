"""The parts of a plan: steps in weight files, other files, and input tensors without an output of that name; and which
output tensor goes into which file: the base's own files kept, or new ones up to a size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from pathlib import Path

from msgspec import Struct, field

from lora_tool.core.tensors import TensorAction, TensorSpec, TensorTable
from lora_tool.formats.files import json_bytes, require_own_file
from lora_tool.formats.safetensors import build_header
from lora_tool.plans.core.ops import Op


class Step(Struct, frozen=True, kw_only=True):
    """One output tensor: its spec, the operation that makes it, the action and the reason in words."""

    out: TensorSpec
    op: Op
    action: TensorAction
    reason: str


class InputRecord(Struct, frozen=True, kw_only=True):
    """An input tensor without an output tensor of the same name: dropped, or consumed by a step."""

    path: Path
    name: str
    action: TensorAction
    reason: str


class Shard(Struct, frozen=True, kw_only=True):
    """One output weights file: its tensors in file order."""

    filename: str
    steps: tuple[Step, ...]
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})

    @property
    def header(self) -> bytes:
        """The bytes before the data."""
        return build_header(map(attrgetter("out"), self.steps), self.metadata)

    @property
    def data_bytes(self) -> int:
        return sum(map(attrgetter("out.nbytes"), self.steps))

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self.header) + self.data_bytes


class SideFile(Struct, frozen=True, kw_only=True):
    """A file without weights: copied from `source`, or written with `content`."""

    filename: str
    reason: str
    source: Path | None = None
    content: bytes | None = None

    def __post_init__(self) -> None:
        if (self.source is None) == (self.content is None):
            raise ValueError(f"{self.filename}: a side file has either a source or a content")

    @property
    def nbytes(self) -> int:
        """The size of the file. Raises OSError."""
        return self.source.stat().st_size if self.source else len(self.content or b"")


def copied_file(root: Path, name: str, whose: object) -> SideFile:
    """Return the file `name` of the folder `root`, `whose` it is, to be copied as it is.

    Raises `CorruptFile` for a link out of the folder, and for one that is not a regular file or cannot be opened.
    """
    require_own_file(root, root / name)
    return SideFile(filename=name, source=root / name, reason=f"copied from {whose}")


# Which output tensor goes into which file.


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DEFAULT_MAX_SHARD_BYTES = 5_000_000_000
"""transformers' default `max_shard_size` was "5GB" up to v4; files of that size suit every host."""


def base_files(steps: Iterable[Step], base: TensorTable) -> dict[str, str]:
    """Return the base's file of each output that has one: of its tensor of that name, or of the tensor's source."""
    names: dict[Path, str] = {}
    for tensor in base.values():
        if tensor.path not in names:
            names[tensor.path] = tensor.path.name
    found = {}
    for step in steps:
        name = names.get(base.get(step.out.name, step.op.source).path)
        if name is not None:
            found[step.out.name] = name
    return found


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
    ordered = list(map(groups.__getitem__, sorted(groups)))
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
    weight_map: dict[str, str] = {}
    total = 0
    for shard in shards:
        weight_map |= dict.fromkeys(map(attrgetter("out.name"), shard.steps), shard.filename)
        total += shard.data_bytes
    table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    content = json_bytes(table, indent=2)
    return (SideFile(filename=INDEX, content=content, reason="written for the new weights"),)
