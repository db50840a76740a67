"""The training state in one tag of a DeepSpeed checkpoint."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from lora_tool.checkpoint import ShardedDir
from lora_tool.display import counted
from lora_tool.formats.partitions import Role, assemble, entries, unaccounted
from lora_tool.formats.torch_zip import Record
from lora_tool.formats.zero import ZeroTag, read_tag
from lora_tool.sharded.faults import adapter_left_out, base_layers_left_out, frozen_left_out
from lora_tool.sharded.master_rounding import master_rounding
from lora_tool.sharded.state import TrainingState
from lora_tool.sharded.tags import choose_tag
from lora_tool.sharded.value_check import ValueCheck
from lora_tool.sharded.zero_checks import frozen_unknown, stale_latest, tag_faults
from lora_tool.tensors import Span, StoredTensor, TensorTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroState(TrainingState):
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
        if tag.first and any(names & set(group) for group in tag.first.param_shapes) and tag.stage:
            records += [states.file.record(group) for states in tag.optim.values() for group in states.groups]
            masters = (tag.masters or {}).items()
            records += [master.file.record(master.tensor) for name, master in masters if name in names]
        for states in tag.model.values():
            held = {**states.module, **(states.frozen or {})}
            records += [states.file.record(held[name]) for name in names if name in held and held[name].numel]
        used = {span.path for tensor in tensors.values() for span in tensor.spans}
        return frozenset(record for record in records if record.path in used)


def zero_state(checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> TrainingState:
    """Return the state that one tag of a DeepSpeed checkpoint holds; see `training_state`."""
    name = choose_tag(checkpoint, tag, or_newest=or_newest)
    folder = checkpoint.root if name == "." else checkpoint.root / name
    found = read_tag(folder, name)
    first, known = found.first, entries(found)
    lost = tuple(dict.fromkeys((*unaccounted(found, known), *base_layers_left_out(known))))
    left_out = frozen_left_out(first.path if first else folder, lost) if lost else frozen_unknown(found)
    older = stale_latest(checkpoint.root, checkpoint.latest, checkpoint.rank_files) if tag is None else ()
    masters = found.masters or {}
    files = [*(states.file for states in found.files), *(master.file for master in masters.values())]
    steps = first.global_steps if first else None
    return ZeroState(
        root=checkpoint.root,
        folder=folder,
        title=f"DeepSpeed ZeRO-{found.stage} checkpoint {folder}, {_cut(found)}, step {steps}",
        entries=known,
        shared=first.shared if first else {},
        without_values=lost,
        faults=(*tag_faults(found), *older, *left_out, *(adapter_left_out(folder, known) if first else ())),
        tag=found,
        stamps={file.path: file.stamp for file in files},
        facts={
            "format": f"DeepSpeed ZeRO-{found.stage}",
            "tag": name,
            "world_size": found.world_size,
            "global_steps": steps,
            "deepspeed": first.version if first else None,
            "serialization_ids": {str(file.path.relative_to(folder)): file.serialization_id for file in files},
        },
    )


def _cut(tag: ZeroTag) -> str:
    """Return in how many pieces the masters are, in words."""
    return (
        counted(tag.world_size, "rank")
        if tag.masters is None
        else f"universal, {counted(len(tag.masters), 'parameter')}"
    )
