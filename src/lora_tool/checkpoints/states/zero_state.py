"""The training state in one tag of a DeepSpeed checkpoint."""

from __future__ import annotations

import abc
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from lora_tool.checkpoints import ShardedDir
from lora_tool.checkpoints.states import zero_facts
from lora_tool.checkpoints.states.file_facts import AbsentFile, Amount, FileFacts, NumberedFiles
from lora_tool.checkpoints.states.master_rounding import master_rounding
from lora_tool.checkpoints.states.state import TrainingState, base_layers_left_out
from lora_tool.checkpoints.states.tags import choose_tag, saved_tags
from lora_tool.checkpoints.states.value_facts import ValueReader
from lora_tool.core.display import counted
from lora_tool.core.errors import IncompleteCheckpoint, UnsupportedCheckpoint
from lora_tool.core.keys import has_lora_factor
from lora_tool.core.tensors import FileStamp, Span, StoredTensor, TensorSpec, TensorTable
from lora_tool.formats.affine_maps import cut_pieces
from lora_tool.formats.partitions import Role, StateEntry, assemble, entries, unaccounted
from lora_tool.formats.pieces import assembled
from lora_tool.formats.torch_zip import Record
from lora_tool.formats.zero import ZeroTag, read_slices
from lora_tool.formats.zero_files import USE_DEEPSPEED, ZeroStage


class DeepSpeedState(TrainingState, frozen=True, kw_only=True):
    """A state in files of DeepSpeed, which say much about each other."""

    @property
    @abc.abstractmethod
    def slices_of_tag(self) -> tuple[ZeroTag, ...]:
        """The rank files, one `ZeroTag` for each rank of tensor parallelism."""

    def numbered_files(self) -> Iterator[NumberedFiles]:
        """See `TrainingState`."""
        return zero_facts.numbered_files(self.slices_of_tag)

    def absent_files(self) -> Iterator[AbsentFile]:
        """See `TrainingState`."""
        return (absent for tag in self.slices_of_tag for absent in zero_facts.absent_masters(tag))

    def files(self) -> Iterator[FileFacts]:
        """See `TrainingState`."""
        return zero_facts.file_facts(self.slices_of_tag)

    def contents(self) -> Iterator[tuple[Path, Hashable]]:
        """See `TrainingState`."""
        return (content for tag in self.slices_of_tag for content in zero_facts.contents(tag))

    def strangers(self) -> Iterator[tuple[Path, str]]:
        """See `TrainingState`."""
        return (stranger for tag in self.slices_of_tag for stranger in zero_facts.strangers(tag))

    def amounts(self) -> Iterator[Amount]:
        """See `TrainingState`."""
        return (amount for tag in self.slices_of_tag for amount in zero_facts.amounts(tag))

    @property
    def names_path(self) -> Path:
        """The first rank's model file."""
        first = self._first_tag.first
        return first.path if first else self.folder

    @property
    def hides_frozen(self) -> bool:
        """See `TrainingState`.

        Stages 2 and 3 write tables of frozen parameters, if only empty ones, without `exclude_frozen_parameters`.
        With LoRA the names of the adapted layers show the missing ones.
        """
        tag = self._first_tag
        first = tag.first
        if first is None or tag.stage < ZeroStage.GRADIENTS or first.frozen_shapes is not None:
            return False
        return not any(map(has_lora_factor, first.module))

    @property
    def lists_all_names(self) -> bool:
        """Whether a model file can be read: each has all names."""
        return self._first_tag.first is not None

    @property
    def _first_tag(self) -> ZeroTag:
        """The first of them with a readable model file."""
        return next((tag for tag in self.slices_of_tag if tag.first), self.slices_of_tag[0])


class ZeroState(DeepSpeedState, frozen=True, kw_only=True):
    """The state in one tag of rank files."""

    tag: ZeroTag

    @property
    def slices_of_tag(self) -> tuple[ZeroTag, ...]:
        return (self.tag,)

    def assemble(self, wanted: Container[str]) -> dict[str, StoredTensor]:
        """See `partitions.assemble`."""
        return assemble(self.tag, self.entries, wanted)

    def value_readers(self, tensors: TensorTable) -> tuple[ValueReader, ...]:
        """Return the readers of the values of `tensors`, and of the weights that were saved with the masters."""
        of_files = TrainingState.value_readers(self, tensors)
        trained = {name: tensor for name, tensor in tensors.items() if self.entries[name].role is Role.TRAINED}
        rounding = master_rounding(self.root, self.tag, trained)
        return (*of_files, rounding) if rounding.copies else of_files

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


class SlicedState(DeepSpeedState, frozen=True, kw_only=True):
    """The state in one tag of rank files under tensor parallelism: each rank's slice is a state of its own."""

    slices: tuple[ZeroState, ...]

    @property
    def slices_of_tag(self) -> tuple[ZeroTag, ...]:
        return tuple(state.tag for state in self.slices)

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

    def value_readers(self, tensors: TensorTable) -> tuple[ValueReader, ...]:
        """Return the readers of the values of `tensors` in every slice."""
        wanted = frozenset(tensors)
        return tuple(reader for state in self.slices for reader in state.value_readers(state.assemble(wanted)))


def zero_state(checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> TrainingState:
    """Return the state that one tag of a DeepSpeed checkpoint holds; see `training_state`."""
    name = choose_tag(checkpoint, tag, or_newest=or_newest)
    folder = checkpoint.root if name == "." else checkpoint.root / name
    tags = read_slices(folder, name)
    slices = tuple(_state_of(checkpoint, found) for found in tags)
    problems = tuple(problem for found in tags for problem in found.problems)
    saved = saved_tags(checkpoint) if tag is None else None
    first = next((state for state in slices if state.entries), slices[0])
    states = first.tag.first
    if states is None or (states.slices == 1 and len(slices) == 1):
        return replace(first, problems=problems, tags=saved)
    cuts = {name: cut.shape for name, cut in states.cuts.items()}
    return SlicedState(
        root=first.root,
        folder=folder,
        title=first.title,
        entries={name: replace(entry, shape=cuts.get(name, entry.shape)) for name, entry in first.entries.items()},
        shared=first.shared,
        without_values=first.without_values,
        problems=problems,
        tags=saved,
        slices=slices,
        stamps=_all_stamps(slices),
        facts={**first.facts, "tensor_parallel": states.slices, "serialization_ids": _all_ids(slices)},
    )


def _all_stamps(states: Iterable[ZeroState]) -> dict[Path, FileStamp]:
    return {path: stamp for state in states for path, stamp in state.stamps.items()}


def _all_ids(states: Iterable[ZeroState]) -> dict[str, str | None]:
    return {path: value for state in states for path, value in state.facts["serialization_ids"].items()}


def _state_of(checkpoint: ShardedDir, found: ZeroTag) -> ZeroState:
    """Return the state in the files of one slice."""
    folder = found.folder
    first, known = found.first, entries(found)
    lost = tuple(dict.fromkeys((*unaccounted(found, known), *base_layers_left_out(known))))
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
