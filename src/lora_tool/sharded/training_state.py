"""A training checkpoint of any sort as one thing: names with roles, and a function that finds their bytes."""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lora_tool.checkpoint import DcpDir, ZeroDir
from lora_tool.errors import NotACheckpoint
from lora_tool.formats.partitions import Entry, Role, assemble, entries, unaccounted
from lora_tool.formats.torch_zip import Record
from lora_tool.formats.zero import ModelStates, OptimStates, ZeroTag, read_tag
from lora_tool.progress import Progress
from lora_tool.report import Finding
from lora_tool.sharded import zero_checks
from lora_tool.sharded.master_copies import saved_copies
from lora_tool.sharded.value_check import ValueCheck
from lora_tool.sharded.value_checks import value_faults
from lora_tool.tensors import FileStamp, Span, StoredTensor

Tensors = Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """The tensors of a training run at one step."""

    root: Path
    folder: Path
    """Where the rank files are: `root` or the tag's folder in it."""
    title: str
    """One line for people: what it is, of how many ranks, at which step."""
    entries: Mapping[str, Entry]
    shared: Mapping[str, str]
    """Tied tensors: other name → the name under which it is in `entries`."""
    beside: tuple[str, ...] = ()
    """Keys of the other states in the checkpoint, which are left there."""
    without_values: tuple[str, ...]
    """Names of frozen tensors that the module has and the checkpoint has not, as far as they are known."""
    faults: tuple[Finding, ...]
    """What its structure has wrong."""
    assemble: Callable[[Container[str]], dict[str, StoredTensor]]
    value_check: Callable[[Tensors], ValueCheck]
    """Prepares a look at the values of these tensors."""
    stamps: Mapping[Path, FileStamp]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the manifest records about it."""

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, about: what is not yet looked at counts as float32."""
        return sum(4 * math.prod(entry.shape) for entry in self.entries.values())

    @property
    def near(self) -> tuple[Path, ...]:
        """Where what belongs to it may lie: HF Trainer writes it beside the tags, others above or inside."""
        return tuple(dict.fromkeys((self.root, self.folder, self.root.absolute().parent)))


def zero_state(checkpoint: ZeroDir, *, tag: str | None = None) -> TrainingState:
    """Return the state that the tag `tag` of a DeepSpeed checkpoint holds; by default the one that `latest` names.

    Raises `NotACheckpoint` where there is no such tag, `UnsupportedCheckpoint` for layouts that are refused.
    """
    name = _choose_tag(checkpoint, tag)
    folder = checkpoint.root if name == "." else checkpoint.root / name
    found = read_tag(folder, name)
    older = zero_checks.latest_tag(checkpoint.root, name, checkpoint.rank_files) if tag is None else ()
    first = found.first
    known = entries(found)
    lost = tuple(dict.fromkeys((*unaccounted(found), *zero_checks.base_layers_left_out(known))))
    files: list[ModelStates | OptimStates] = [*found.model.values(), *found.optim.values()]
    steps = first.global_steps if first else None
    return TrainingState(
        root=checkpoint.root,
        folder=folder,
        title=f"DeepSpeed ZeRO-{found.stage} checkpoint {folder}, {found.world_size} ranks, step {steps}",
        entries=known,
        shared=first.shared if first else {},
        without_values=lost,
        faults=(
            *zero_checks.structure_faults(found),
            *older,
            *(
                zero_checks.frozen_not_saved(first.file.path if first else folder, lost)
                if lost
                else zero_checks.frozen_unknown(found)
            ),
        ),
        assemble=lambda wanted: assemble(found, wanted),
        value_check=lambda tensors: _value_check(checkpoint.root, found, tensors),
        stamps={states.file.path: states.file.stamp for states in files},
        facts={
            "format": f"DeepSpeed ZeRO-{found.stage}",
            "tag": name,
            "world_size": found.world_size,
            "global_steps": steps,
            "deepspeed": first.version if first else None,
            "serialization_ids": {states.file.path.name: states.file.serialization_id for states in files},
        },
    )


def training_state(checkpoint: ZeroDir | DcpDir, *, tag: str | None = None) -> TrainingState:
    """Return the state of a checkpoint of either sort; see `zero_state` and `dcp_state`."""
    if isinstance(checkpoint, DcpDir):
        from lora_tool.sharded.dcp_state import dcp_state  # noqa: PLC0415 - half as much to import for each sort

        return dcp_state(checkpoint, part=tag)
    return zero_state(checkpoint, tag=tag)


def _choose_tag(checkpoint: ZeroDir, tag: str | None) -> str:
    tags = tuple(checkpoint.rank_files)
    wanted = tag or checkpoint.latest or (tags[0] if len(tags) == 1 else None)
    listed = ", ".join(tags)
    if wanted in tags:
        return str(wanted)
    if wanted is None:
        raise NotACheckpoint(
            f"{checkpoint.root} has several tags and no file `latest`: {listed}", hint="choose: --tag T"
        )
    says = "" if tag else "`latest` names "
    raise NotACheckpoint(
        f"{checkpoint.root}: {says}{wanted}, which is not there; there is: {listed}",
        hint=f"--tag {shlex.quote(tags[-1])}",
    )


def _value_check(root: Path, tag: ZeroTag, tensors: Tensors) -> ValueCheck:
    known = entries(tag)
    masters = frozenset(name for name in tensors if known[name].role is Role.TRAINED)

    def rounding(_: Progress) -> list[Finding]:
        saved = saved_copies(root, tag, tensors)
        if not saved.copies:
            return []
        from lora_tool.sharded.master_checks import rounding_faults  # noqa: PLC0415 - numpy, only where it is needed

        return list(rounding_faults(saved))

    of_files = check_of_files(tensors, _records(tag, tensors), masters=masters)
    return replace(of_files, parts=(*of_files.parts, rounding))


def check_of_files(tensors: Tensors, records: Collection[Record], *, masters: frozenset[str]) -> ValueCheck:
    """Return the check of each file's values; `records` hold the tensors, `masters` are the trained ones."""
    by_path: dict[Path, list[Record]] = defaultdict(list)
    for record in records:
        by_path[record.path].append(record)
    pieces: dict[Path, list[tuple[Span, StoredTensor]]] = defaultdict(list)
    for tensor in tensors.values():
        for span in tensor.spans:
            pieces[span.path].append((span, tensor))

    def part(path: Path, advance: Progress) -> list[Finding]:
        return value_faults(path, by_path[path], pieces[path], masters=masters, advance=advance)

    nbytes = sum(record.nbytes for record in records)
    return ValueCheck(nbytes=nbytes, parts=tuple(partial(part, path) for path in sorted(by_path)))


def _records(tag: ZeroTag, tensors: Tensors) -> frozenset[Record]:
    """Return the archive members that hold the tensors."""
    records = []
    names = set(tensors)
    if tag.first and any(names & set(group) for group in tag.first.param_shapes) and tag.stage:
        records += [states.file.record(group) for states in tag.optim.values() for group in states.groups]
    for states in tag.model.values():
        held = {**states.module, **(states.frozen or {})}
        records += [states.file.record(held[name]) for name in names if name in held and held[name].numel]
    used = {span.path for tensor in tensors.values() for span in tensor.spans}
    return frozenset(record for record in records if record.path in used)
