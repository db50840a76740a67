"""The training state in one tag of a DeepSpeed checkpoint, with the facts that its files state about each other.

`zero_to_fp32` accepts most contradictions silently. `file_values` and `master_rounding` read the weights.
"""

from __future__ import annotations

import math
from collections.abc import Container, Hashable, Iterator, Mapping
from pathlib import Path

from lora_tool.checkpoints import ShardedDir
from lora_tool.checkpoints.states.file_facts import Amount, FileFacts, NumberedFiles, SavedTags
from lora_tool.checkpoints.states.file_values import ValueReader
from lora_tool.checkpoints.states.master_rounding import master_rounding
from lora_tool.checkpoints.states.state import TrainingState, base_layers_left_out, varies
from lora_tool.checkpoints.states.tags import choose_tag
from lora_tool.core.display import counted
from lora_tool.core.keys import has_lora_factor
from lora_tool.core.tensors import Span, StoredTensor, TensorTable
from lora_tool.formats.partitions import Role, assemble, entries, groups_of, leftover, unaccounted
from lora_tool.formats.torch_zip import Record
from lora_tool.formats.zero import ZeroTag, read_tag
from lora_tool.formats.zero_files import FILE, FOLDER, Master, ModelStates, ZeroStage


class ZeroState(TrainingState, frozen=True, kw_only=True):
    """The state in one tag of rank files, which say much about each other."""

    tag: ZeroTag

    def numbered_files(self) -> Iterator[NumberedFiles]:
        """Yield the files of each rank."""
        tag = self.tag
        ranks = range(tag.world_size)
        if tag.stage and tag.masters is None:
            yield NumberedFiles(
                folder=tag.folder,
                one="optimizer file",
                several="optimizer files",
                numbers=ranks,
                there=tag.optim_files.keys(),
            )
        yield NumberedFiles(
            folder=tag.folder,
            one="model file",
            several="model files",
            numbers=ranks if tag.stage == ZeroStage.WEIGHTS else range(1),
            there=tag.model_files.keys(),
            # without frozen parameters every rank's model file says the same, tied names apart, which rank 0 knows
            spare=0 in tag.model_files and tag.first is not None and not tag.first.frozen,
        )

    def absent_files(self) -> Iterator[tuple[Path, str]]:
        """Yield the files that a universal checkpoint lacks of the parameters that were trained."""
        tag = self.tag
        if tag.masters is None or tag.first is None:
            return
        zero = tag.folder / FOLDER
        broken = {problem.path for problem in self.broken}
        for name in tag.first.trained_shapes.keys() - tag.masters.keys():
            if not any(path.startswith(f"{zero / name}/") for path in broken):
                yield zero / name / FILE, "but the parameter was trained"

    def files(self) -> Iterator[FileFacts]:
        """Yield each file's facts about itself and the run."""
        tag = self.tag
        for model in tag.model.values():
            yield FileFacts(
                path=model.path,
                group="model",
                archive=model.file.root,
                ranks=model.world_size if tag.stage and tag.optim else None,
                all_ranks=tag.world_size,
                step=model.global_steps,
                counts="global steps",
                config=model.config,
                names=_layout(model),
            )
        for optim in tag.optim.values():
            yield FileFacts(
                path=optim.path,
                group="optimizer",
                archive=optim.file.root,
                rank=optim.rank,
                ranks=optim.world_size if tag.stage else None,
                all_ranks=tag.world_size,
                step=optim.step,
                counts="optimizer steps",
                config=optim.config,
            )
        for master in (tag.masters or {}).values():
            folder = master.file.path.parent
            yield FileFacts(path=folder, unit="parameter", group="master", step=master.step, counts="optimizer steps")

    def contents(self) -> Iterator[tuple[Path, Hashable]]:
        """Yield the files with masters, each with a key of their values."""
        for states in self.tag.optim.values():
            if any(group.numel for group in states.groups):
                crcs = (states.file.record(group).crc for group in states.groups)
                yield states.path, (states.file.serialization_id, *crcs)
        for master in (self.tag.masters or {}).values():
            if varies(master.file.stored(master.tensor, FILE)):
                yield master.file.path, (master.tensor.shape, master.file.record(master.tensor).crc)

    def strangers(self) -> Iterator[tuple[Path, str]]:
        """Yield the folders of a universal checkpoint's parameters that the module does not have."""
        tag = self.tag
        first = tag.first
        if first is not None and tag.masters is not None:
            known = {*first.module, *first.trained_shapes, *first.shared, *(first.frozen_shapes or {})}
            for name in tag.masters.keys() - known:
                yield tag.folder / FOLDER / name, name

    def amounts(self) -> Iterator[Amount]:
        """Yield how much the files hold of each group of masters and each frozen parameter, as far as all are there."""
        tag = self.tag
        first = tag.first
        if first is None:
            return
        if tag.masters is not None:
            yield from _of_masters(first, tag.masters)
        elif tag.stage != ZeroStage.DISABLED and tag.optim.keys() == set(range(tag.world_size)):
            wrong = False
            for states in tag.optim.values():
                over = len(states.groups) - len(first.param_shapes)
                wrong = wrong or over != 0
                yield Amount(path=states.path, of="the file", unit="group of masters", over=over)
            if not wrong:
                yield from _of_frozen(tag)
                yield from _of_groups(tag)

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


def _of_masters(first: ModelStates, masters: Mapping[str, Master]) -> Iterator[Amount]:
    for name, shape in first.trained_shapes.items():
        if name in masters:
            held = masters[name]
            over = held.tensor.numel - math.prod(shape)
            yield Amount(path=held.file.path, of=f"the master of {list(shape)}", over=over, subject=name)


def _of_frozen(tag: ZeroTag) -> Iterator[Amount]:
    checked = set()
    for states in tag.model.values():
        if tag.stage != ZeroStage.WEIGHTS or not states.frozen or id(states.frozen) in checked:
            continue
        checked.add(id(states.frozen))  # files that say the same share it
        for name, shape in (states.frozen_shapes or {}).items():
            if name in states.frozen:
                over = states.frozen[name].numel - -(-math.prod(shape) // tag.world_size)
                yield Amount(path=states.path, of=f"this rank's part of frozen `{name}`", over=over)


def _of_groups(tag: ZeroTag) -> Iterator[Amount]:
    for number, shapes in enumerate(groups_of(tag)):
        sizes = [tag.optim[rank].groups[number].numel for rank in range(tag.world_size)]
        yield Amount(
            path=tag.folder,
            of=f"group {number} of the masters",
            over=leftover(shapes, sizes, tag.stage) or 0,
            needed_for=f" for its {len(shapes)} parameters",
        )


def _layout(states: ModelStates) -> Hashable:
    """Return the names and shapes in their order, in a form that can be compared."""
    return tuple(tuple(group.items()) for group in (*states.param_shapes, states.frozen_shapes or {}))


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
    saved = SavedTags(root=checkpoint.root, names=tuple(checkpoint.rank_files), latest=checkpoint.latest)
    return ZeroState(
        root=checkpoint.root,
        folder=folder,
        title=f"DeepSpeed ZeRO-{found.stage} checkpoint {folder}, {_size(found)}, step {steps}",
        entries=known,
        shared=first.shared if first else {},
        without_values=lost,
        problems=found.problems,
        tags=saved if tag is None else None,
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
