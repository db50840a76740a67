"""Facts from the files of a DeepSpeed checkpoint, about themselves and each other: names, shapes and counters.

`zero_to_fp32` accepts most contradictions silently. `file_values` and `master_rounding` read the weights.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path

from lora_tool.checkpoints.states.file_facts import AbsentFile, Amount, FileFacts, NumberedFiles
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.partitions import groups_of, leftover
from lora_tool.formats.stored import read_part
from lora_tool.formats.universal import FILE, FOLDER, Master
from lora_tool.formats.zero import ZeroTag
from lora_tool.formats.zero_files import ModelStates, ZeroStage

_BEGINNING = 4096


def numbered_files(tag: ZeroTag) -> Iterator[NumberedFiles]:
    """Yield the files of each rank."""
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


def absent_masters(tag: ZeroTag) -> Iterator[AbsentFile]:
    """Yield the files that a universal checkpoint lacks of the parameters that were trained."""
    if tag.masters is None or tag.first is None:
        return
    zero = tag.folder / FOLDER
    broken = {problem.path for problem in tag.problems}
    for name in tag.first.trained_shapes.keys() - tag.masters.keys():
        if not any(path.startswith(f"{zero / name}/") for path in broken):
            yield AbsentFile(zero / name / FILE, "but the parameter was trained")


def file_facts(tag: ZeroTag) -> Iterator[FileFacts]:
    """Yield each file's facts about itself and the run."""
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


def contents(tag: ZeroTag) -> Iterator[tuple[Path, Hashable]]:
    """Yield the files with masters, each with a key of their values."""
    for states in tag.optim.values():
        if any(group.numel for group in states.groups):
            crcs = (states.file.record(group).crc for group in states.groups)
            yield states.path, (states.file.serialization_id, *crcs)
    for master in (tag.masters or {}).values():
        if _varies(master.file.stored(master.tensor, FILE)):
            yield master.file.path, (master.tensor.shape, master.file.record(master.tensor).crc)


def strangers(tag: ZeroTag) -> Iterator[tuple[Path, str]]:
    """Yield the folders of a universal checkpoint's parameters that the module does not have."""
    first = tag.first
    if first is not None and tag.masters is not None:
        known = {*first.module, *first.trained_shapes, *first.shared, *(first.frozen_shapes or {})}
        yield from ((tag.folder / FOLDER / name, name) for name in tag.masters.keys() - known)


def amounts(tag: ZeroTag) -> Iterator[Amount]:
    """Yield how much the files hold of each group of masters and each frozen parameter, as far as all are there."""
    first = tag.first
    if first is None:
        return
    if tag.masters is not None:
        yield from _of_masters(first, tag.masters)
    elif tag.stage != ZeroStage.DISABLED and tag.optim.keys() == set(range(tag.world_size)):
        groups = list(_numbers_of_groups(tag, first))
        yield from groups
        if not any(group.over for group in groups):
            yield from _of_frozen(tag)
            yield from _of_groups(tag)


def _of_masters(first: ModelStates, masters: Mapping[str, Master]) -> Iterator[Amount]:
    for name, shape in first.trained_shapes.items():
        if name in masters:
            held = masters[name]
            over = held.tensor.numel - math.prod(shape)
            yield Amount(path=held.file.path, of=f"the master of {list(shape)}", over=over, subject=name)


def _numbers_of_groups(tag: ZeroTag, first: ModelStates) -> Iterator[Amount]:
    for states in tag.optim.values():
        over = len(states.groups) - len(first.param_shapes)
        yield Amount(path=states.path, of="the file", unit="group of masters", over=over)


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


def _varies(tensor: StoredTensor) -> bool:
    """Return whether the first elements differ from each other: parameters may well hold the same constant."""
    data, size = read_part(tensor, 0, min(tensor.nbytes, _BEGINNING)), tensor.dtype.bits // 8
    return data[size:] != data[:-size]
