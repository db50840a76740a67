"""A training checkpoint of any sort as one thing: names with roles, and a function that finds their bytes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from lora_tool.checkpoint import DcpDir, ZeroDir
from lora_tool.errors import CorruptFile, NotACheckpoint
from lora_tool.formats.dcp import DcpFolder, assemble_dcp, read_dcp, read_pieces, stamps
from lora_tool.formats.partitions import Entry, Role, assemble, entries, unaccounted
from lora_tool.formats.torch_zip import Record
from lora_tool.formats.zero import ModelStates, OptimStates, ZeroTag, read_tag
from lora_tool.plan import dcp_checks, zero_checks
from lora_tool.plan.checking import ValueCheck
from lora_tool.plan.saved_copies import saved_copies
from lora_tool.plan.value_checks import value_faults
from lora_tool.progress import Progress
from lora_tool.report import Finding
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


def dcp_state(checkpoint: DcpDir, *, part: str | None = None) -> TrainingState:
    """Return the state of the module in a folder of torch distributed checkpoints; `part` is the sub-folder.

    Raises `NotACheckpoint` where it is not clear which sub-folder is the model's, `UnsupportedCheckpoint` for layouts
    that are refused.
    """
    # accelerate and the HF Trainer write pytorch_model_fsdp_0 and optimizer_0 side by side
    parts = [name for name in checkpoint.parts if not name.startswith("optimizer")] if part is None else [part]
    if len(parts) != 1 or parts[0] not in checkpoint.parts:
        listed = ", ".join(checkpoint.parts)
        raise NotACheckpoint(f"{checkpoint.root}: which of these is the model's? {listed}", hint="choose: --tag FOLDER")
    folder = checkpoint.root / parts[0] if parts[0] != "." else checkpoint.root
    try:
        found = read_dcp(folder)
    except CorruptFile as error:
        found = DcpFolder(folder=folder, tensors={})
        faults = tuple(dcp_checks.unreadable([error.problem]))
        return _dcp_state(checkpoint, parts[0], found, faults)
    return _dcp_state(checkpoint, parts[0], found)


def _dcp_state(checkpoint: DcpDir, part: str, found: DcpFolder, faults: tuple[Finding, ...] = ()) -> TrainingState:
    pieces, problems = read_pieces(found)
    lost = zero_checks.base_layers_left_out(found.tensors)

    def value_check(tensors: Tensors) -> ValueCheck:
        records = frozenset(piece.record for name in tensors for piece in pieces[name])
        return _check_of_files(tensors, records, masters=frozenset())

    return TrainingState(
        root=checkpoint.root,
        folder=found.folder,
        title=f"FSDP2 checkpoint {found.folder}, {len(found.filenames)} files",
        entries={name: Entry(role=Role.SAVED, shape=tensor.shape) for name, tensor in found.tensors.items()},
        shared={},
        beside=found.beside,
        without_values=lost,
        faults=(
            *faults,
            *dcp_checks.structure_faults(found, pieces, problems),
            *zero_checks.frozen_not_saved(found.folder, lost),
        ),
        assemble=lambda wanted: assemble_dcp(found, pieces, wanted),
        value_check=value_check,
        stamps=stamps(found),
        facts={"format": "torch distributed checkpoint", "tag": part, "save_id": found.save_id},
    )


def training_state(checkpoint: ZeroDir | DcpDir, *, tag: str | None = None) -> TrainingState:
    """Return the state of a checkpoint of either sort; see `zero_state` and `dcp_state`."""
    if isinstance(checkpoint, DcpDir):
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
        f"{checkpoint.root}: {says}{wanted}, which is not there; there is: {listed}", hint=f"--tag {tags[-1]}"
    )


def _value_check(root: Path, tag: ZeroTag, tensors: Tensors) -> ValueCheck:
    known = entries(tag)
    masters = frozenset(name for name in tensors if known[name].role is Role.TRAINED)

    def rounding(_: Progress) -> list[Finding]:
        saved = saved_copies(root, tag, tensors)
        if not saved.copies:
            return []
        from lora_tool.plan.rounding import rounding_faults  # noqa: PLC0415 - numpy, only where it is needed

        return list(rounding_faults(saved))

    of_files = _check_of_files(tensors, _records(tag, tensors), masters=masters)
    return replace(of_files, parts=(*of_files.parts, rounding))


def _check_of_files(tensors: Tensors, records: Collection[Record], *, masters: frozenset[str]) -> ValueCheck:
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
