"""The training state in one tag of a DeepSpeed checkpoint."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator
from pathlib import Path

from lora_tool.checkpoints import ShardedDir
from lora_tool.checkpoints.states import zero_facts
from lora_tool.checkpoints.states.file_facts import AbsentFile, Amount, FileFacts, NumberedFiles
from lora_tool.checkpoints.states.master_rounding import master_rounding
from lora_tool.checkpoints.states.state import TrainingState, base_layers_left_out
from lora_tool.checkpoints.states.tags import choose_tag, saved_tags
from lora_tool.checkpoints.states.value_facts import ValueReader
from lora_tool.core.display import counted
from lora_tool.core.keys import has_lora_factor
from lora_tool.core.tensors import Span, StoredTensor, TensorTable
from lora_tool.formats.partitions import Role, assemble, entries, unaccounted
from lora_tool.formats.torch_zip import Record
from lora_tool.formats.zero import ZeroTag, read_tag
from lora_tool.formats.zero_files import ZeroStage


class ZeroState(TrainingState, frozen=True, kw_only=True):
    """The state in one tag of rank files, which say much about each other."""

    tag: ZeroTag

    def numbered_files(self) -> Iterator[NumberedFiles]:
        """See `TrainingState`."""
        return zero_facts.numbered_files(self.tag)

    def absent_files(self) -> Iterator[AbsentFile]:
        """See `TrainingState`."""
        return zero_facts.absent_masters(self.tag)

    def files(self) -> Iterator[FileFacts]:
        """See `TrainingState`."""
        return zero_facts.file_facts(self.tag)

    def contents(self) -> Iterator[tuple[Path, Hashable]]:
        """See `TrainingState`."""
        return zero_facts.contents(self.tag)

    def strangers(self) -> Iterator[tuple[Path, str]]:
        """See `TrainingState`."""
        return zero_facts.strangers(self.tag)

    def amounts(self) -> Iterator[Amount]:
        """See `TrainingState`."""
        return zero_facts.amounts(self.tag)

    @property
    def names_path(self) -> Path:
        """The first rank's model file."""
        return self.tag.first.path if self.tag.first else self.folder

    @property
    def hides_frozen(self) -> bool:
        """See `TrainingState`.

        Stages 2 and 3 write tables of frozen parameters, if only empty ones, without `exclude_frozen_parameters`.
        With LoRA the names of the adapted layers show the missing ones.
        """
        first = self.tag.first
        if first is None or self.tag.stage < ZeroStage.GRADIENTS or first.frozen_shapes is not None:
            return False
        return not any(map(has_lora_factor, first.module))

    @property
    def lists_all_names(self) -> bool:
        """Whether a model file can be read: each has all names."""
        return self.tag.first is not None

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


def zero_state(checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> ZeroState:
    """Return the state that one tag of a DeepSpeed checkpoint holds; see `training_state`."""
    name = choose_tag(checkpoint, tag, or_newest=or_newest)
    folder = checkpoint.root if name == "." else checkpoint.root / name
    found = read_tag(folder, name)
    first, known = found.first, entries(found)
    lost = tuple(dict.fromkeys((*unaccounted(found, known), *base_layers_left_out(known))))
    files = [states.file for states in found.files]
    files += [master.file for master in (found.masters or {}).values()]
    steps = first.global_steps if first else None
    return ZeroState(
        root=checkpoint.root,
        folder=folder,
        title=f"DeepSpeed ZeRO-{found.stage} checkpoint {folder}, {_size(found)}, step {steps}",
        entries=known,
        shared=first.shared if first else {},
        without_values=lost,
        problems=found.problems,
        tags=saved_tags(checkpoint) if tag is None else None,
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


def _size(tag: ZeroTag) -> str:
    """Return in how many pieces the masters are, in words."""
    if tag.masters is not None:
        return f"universal, {counted(len(tag.masters), 'parameter')}"
    return counted(tag.world_size, "rank")
