"""The training state in one tag of a DeepSpeed checkpoint."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from pathlib import Path

from msgspec.structs import replace

from lora_tool.checkpoint import ShardedDir
from lora_tool.display import counted
from lora_tool.errors import IncompleteCheckpoint, UnsupportedCheckpoint
from lora_tool.formats.affine_maps import cut_pieces
from lora_tool.formats.partitions import Role, StateEntry, assemble, entries, unaccounted
from lora_tool.formats.pieces import assembled
from lora_tool.formats.torch_zip import Record
from lora_tool.formats.zero import ZeroTag, read_slices
from lora_tool.formats.zero_files import USE_DEEPSPEED
from lora_tool.sharded.faults import adapter_left_out, base_layers_left_out, frozen_left_out
from lora_tool.sharded.master_rounding import master_rounding
from lora_tool.sharded.state import TrainingState
from lora_tool.sharded.tags import choose_tag, stale_latest
from lora_tool.sharded.value_check import ValueCheck
from lora_tool.sharded.zero_checks import frozen_unknown, tag_faults
from lora_tool.tensors import FileStamp, Span, StoredTensor, TensorSpec, TensorTable


class ZeroState(TrainingState, frozen=True, kw_only=True):
    """The state in one tag of rank files."""

    tag: ZeroTag

    def assemble(self, wanted: Container[str]) -> dict[str, StoredTensor]:
        """See `partitions.assemble`."""
        return assemble(self.tag, self.entries, wanted)

    def value_check(self, tensors: TensorTable) -> ValueCheck:
        """Return the check of the values of `tensors`, and of the weights that were saved with the masters."""
        of_files = TrainingState.value_check(self, tensors)
        trained = {name: tensor for name, tensor in tensors.items() if self.entries[name].role is Role.TRAINED}
        rounding = master_rounding(self.root, self.tag, trained)
        return replace(of_files, parts=(*of_files.parts, rounding)) if rounding.copies else of_files

    def records(self, tensors: TensorTable) -> frozenset[Record | Span]:
        """Return the archive members that hold the tensors."""
        tag, names = self.tag, set(tensors)
        records = []
        if any(self.entries[name].role is Role.TRAINED for name in names):
            records += [states.file.record(group) for states in tag.optim.values() for group in states.groups]
            masters = (tag.masters or {}).items()
            records += [master.file.record(master.tensor) for name, master in masters if name in names]
        for states in tag.model.values():
            held = {**states.module, **(states.frozen or {})}
            records += [states.file.record(held[name]) for name in names if name in held and held[name].numel]
        used = {span.path for tensor in tensors.values() for span in tensor.spans}
        return frozenset(record for record in records if record.path in used)


class SlicedState(TrainingState, frozen=True, kw_only=True):
    """The state in one tag of rank files under tensor parallelism: each rank's slice is a state of its own."""

    slices: tuple[ZeroState, ...]

    def assemble(self, wanted: Container[str]) -> dict[str, StoredTensor]:
        """See `affine_maps`; a parameter that was not cut is taken from the first rank."""
        parts = {state.tag.slice_: state.assemble(wanted) for state in self.slices}
        return {name: self._joined(name, entry, parts) for name, entry in self.entries.items() if name in wanted}

    def _joined(self, name: str, entry: StateEntry, parts: Mapping[int, TensorTable]) -> StoredTensor:
        first = self.slices[0].tag.first
        held = {at: of_rank[name] for at, of_rank in parts.items() if name in of_rank}
        cut = first.cuts.get(name) if first else None
        if first is None or held.keys() != set(range(first.slices)):
            raise IncompleteCheckpoint(f"{self.folder}: `{name}` is not in the files of every tensor-parallel rank")
        if cut is None and entry.role is Role.BUFFER:
            return held[0]
        if cut is None or any(block.scale != 1 for blocks in cut.blocks.values() for block in blocks):
            why = (
                "the files do not record how it was cut"
                if cut is None
                else "AutoTP stores it divided by the number of ranks"
            )
            message = f"{self.folder}: `{name}` cannot be put together from its slices: {why}"
            raise UnsupportedCheckpoint(message, hint=USE_DEEPSPEED)
        pieces = []
        for at, part in held.items():
            if cut.slices.get(at) != part.shape or part.dtype is not held[0].dtype:
                message = f"`{name}` is {part.dtype} {list(part.shape)}, but the map of the cuts says {list(cut.slices.get(at, ()))}"
                raise IncompleteCheckpoint(f"{part.path}: {message}")
            pieces += [piece for block in cut.blocks[at] if block.owner == at for piece in cut_pieces(block, part)]
        try:
            return assembled(TensorSpec(name=name, dtype=held[0].dtype, shape=cut.shape), pieces)
        except ValueError as error:
            raise IncompleteCheckpoint(f"{self.folder}: `{name}` {list(cut.shape)}: {error}") from error

    def value_check(self, tensors: TensorTable) -> ValueCheck:
        """Return the look at the values of `tensors` in every slice."""
        return _together(state.value_check(state.assemble(frozenset(tensors))) for state in self.slices)


def _together(checks: Iterable[ValueCheck]) -> ValueCheck:
    """Return the checks as one."""
    every = list(checks)
    return ValueCheck(
        nbytes=sum(check.nbytes for check in every), parts=tuple(part for check in every for part in check.parts)
    )


def zero_state(checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> TrainingState:
    """Return the state that one tag of a DeepSpeed checkpoint holds; see `training_state`."""
    name = choose_tag(checkpoint, tag, or_newest=or_newest)
    folder = checkpoint.root if name == "." else checkpoint.root / name
    tags = read_slices(folder, name)
    older = stale_latest(checkpoint.root, checkpoint.latest, checkpoint.rank_files) if tag is None else ()
    faults = (*tag_faults(tags), *older)
    slices = tuple(_state_of(checkpoint, found) for found in tags)
    first = next((state for state in slices if state.entries), slices[0])
    states = first.tag.first
    if states is None or (states.slices == 1 and len(slices) == 1):
        return replace(first, faults=(*faults, *first.faults))
    cuts = {name: cut.shape for name, cut in states.cuts.items()}
    return SlicedState(
        root=first.root,
        folder=folder,
        title=first.title,
        entries={name: replace(entry, shape=cuts.get(name, entry.shape)) for name, entry in first.entries.items()},
        shared=first.shared,
        without_values=first.without_values,
        faults=(*faults, *first.faults),
        slices=slices,
        stamps=_all_stamps(slices),
        facts={**first.facts, "tensor_parallel": states.slices, "serialization_ids": _all_ids(slices)},
    )


def _all_stamps(states: Iterable[ZeroState]) -> dict[Path, FileStamp]:
    return {path: stamp for state in states for path, stamp in state.stamps.items()}


def _all_ids(states: Iterable[ZeroState]) -> dict[str, str | None]:
    return {path: value for state in states for path, value in state.facts["serialization_ids"].items()}


def _state_of(checkpoint: ShardedDir, found: ZeroTag) -> ZeroState:
    """Return the state in the files of one slice, with what is wrong with the names in it alone."""
    folder = found.folder
    first, known = found.first, entries(found)
    lost = tuple(dict.fromkeys((*unaccounted(found, known), *base_layers_left_out(known))))
    left_out = frozen_left_out(first.path if first else folder, lost) if lost else frozen_unknown(found)
    files = [states.file for states in found.files]
    files += [master.file for master in (found.masters or {}).values()]
    steps = first.global_steps if first else None
    return ZeroState(
        root=checkpoint.root,
        folder=folder,
        title=f"DeepSpeed ZeRO-{found.stage} checkpoint {folder}, {_cut(found)}, step {steps}",
        entries=known,
        shared=first.shared if first else {},
        without_values=lost,
        faults=(*left_out, *(adapter_left_out(folder, known) if first else ())),
        tag=found,
        stamps={file.path: file.stamp for file in files},
        facts={
            "format": f"DeepSpeed ZeRO-{found.stage}",
            "tag": found.name,
            "world_size": found.world_size,
            "global_steps": steps,
            "deepspeed": first.version if first else None,
            "serialization_ids": {str(file.path.relative_to(folder)): file.serialization_id for file in files},
        },
    )


def _cut(tag: ZeroTag) -> str:
    """Return in how many pieces the masters are, in words."""
    if tag.masters is not None:
        return f"universal, {counted(len(tag.masters), 'parameter')}"
    ranks = counted(tag.world_size, "rank")
    return (
        ranks if tag.first is None or tag.first.slices == 1 else f"{ranks} × {tag.first.slices} of tensor parallelism"
    )
