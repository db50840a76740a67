"""What can be wrong with a DeepSpeed checkpoint, found in names, shapes and counters: pure generators of findings.

`zero_to_fp32` accepts most of these silently. `file_values` and `master_rounding` read the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from lora_tool.display import counted, some
from lora_tool.formats.partitions import groups_of, leftover
from lora_tool.formats.zero import ZeroTag
from lora_tool.formats.zero_files import ModelStates, OptimStates, ZeroStage
from lora_tool.keys import has_lora_factor
from lora_tool.report import Finding, Severity
from lora_tool.sharded.faults import (
    COPY,
    another_save,
    fault,
    moved_files,
    odd_ones_out,
    repeated_files,
    unreadable_files,
)
from lora_tool.sharded.universal_checks import master_faults

_MOST_SLICES = 1 << 16
"""More than any run has; a broken file may say anything."""


def missing_ranks(tag: ZeroTag) -> Iterator[Finding]:
    """LT401: yield the ranks whose files are not there.

    Every node writes its own ranks' files: a folder copied from one node lacks the others'.
    """
    ranks = range(tag.world_size)
    optim = [rank for rank in ranks if tag.stage and tag.masters is None and rank not in tag.optim_files]
    model = [rank for rank in (ranks if tag.stage == ZeroStage.WEIGHTS else [0]) if rank not in tag.model_files]
    # without frozen parameters every rank's model file says the same, tied names apart, which rank 0 knows
    harmless = 0 not in model and tag.first is not None and not tag.first.frozen
    of_model = Severity.WARNING if harmless else Severity.ERROR
    for what, lost, severity in (("optimizer", optim, Severity.ERROR), ("model", model, of_model)):
        if lost:
            one = f"file of rank {lost[0]} is missing" if len(lost) == 1 else f"files of ranks {some(lost)} are missing"
            message = f"the {what} {one} ({counted(tag.world_size, 'rank')}: 0-{tag.world_size - 1}){_of_slice(tag)}"
            yield fault("LT401", tag.folder, message, hint=COPY, severity=severity)


def missing_slices(tags: Sequence[ZeroTag]) -> Iterator[Finding]:
    """LT401 and LT403: yield the ranks of tensor parallelism that have no file, and those that the run did not have."""
    first = next((tag.first for tag in tags if tag.first), None)
    count = first.slices if first else 1
    there = {tag.slice_ for tag in tags}
    lost = [at for at in range(min(count, _MOST_SLICES)) if at not in there]
    if lost:
        message = f"the files of tensor-parallel rank{'' if len(lost) == 1 else 's'} {some(lost)} are missing"
        yield fault("LT401", tags[0].folder, message, hint=COPY)
    for tag in tags:
        if tag.slice_ >= count and first:
            message = f"are of tensor-parallel rank {tag.slice_}, but the run had {count}"
            hint = "a run with more ranks was saved into the same folder: move its files away"
            yield fault("LT403", tag.folder / f"*mp_rank_{tag.slice_:02d}*", message, hint=hint)


def _of_slice(tag: ZeroTag) -> str:
    sliced = tag.slice_ or (tag.first is not None and tag.first.slices > 1)
    return f" of tensor-parallel rank {tag.slice_}" if sliced else ""


def other_world_sizes(tag: ZeroTag) -> Iterator[Finding]:
    """LT403: yield rank files beyond the world size, and files that count the ranks differently."""
    for file in tag.files:
        if isinstance(file, OptimStates) and file.rank >= tag.world_size:
            message = f"is from rank {file.rank}, but the run had {tag.world_size} ranks"
            hint = "a run with more ranks was saved into the same folder: move its files away"
            yield fault("LT403", file.path, message, hint=hint)
        elif tag.stage and tag.optim and file.world_size not in (None, tag.world_size):
            message = f"says that the run had {file.world_size} ranks, but the other files say {tag.world_size}"
            yield fault("LT403", file.path, message, hint="it is from another run: copy this run's file again")


def other_steps(tags: Sequence[ZeroTag]) -> Iterator[Finding]:
    """LT406: yield rank files that were saved at another step than most."""
    by_optim = {file.path: file.step for tag in tags for file in tag.optim.values() if file.step is not None}
    by_model = {
        file.path: file.global_steps for tag in tags for file in tag.model.values() if file.global_steps is not None
    }
    for steps, what in ((by_optim, "optimizer steps"), (by_model, "global steps")):
        for path, step, usual in odd_ones_out(steps):
            message = f"was saved after {step:g} {what}, but the other ranks after {usual:g}"
            yield fault("LT406", path, message, hint=f"the checkpoint mixes two saves; {another_save(path)}")


def other_runs(tags: Sequence[ZeroTag]) -> Iterator[Finding]:
    """LT407: yield rank files whose config, names or shapes are not those of the other ranks."""
    hint = "files from another run were mixed in: copy this run's again"
    models = {file.path: file for tag in tags for file in tag.model.values()}
    optims = {file.path: file for tag in tags for file in tag.optim.values()}
    for files in (models, optims):
        for path, _, _ in odd_ones_out({path: file.config for path, file in files.items()}):
            message = "was written under another DeepSpeed config than the other ranks' files"
            yield fault("LT407", path, message, hint=hint)
    if len(tags) == 1:  # under tensor parallelism each has shapes of its own
        for path, _, _ in odd_ones_out({path: _layout(file) for path, file in models.items()}):
            yield fault("LT407", path, "lists other parameters than the other ranks, or in another order", hint=hint)


def _layout(states: ModelStates) -> tuple[object, ...]:
    """Return the names and shapes in their order, in a form that can be compared."""
    return tuple(tuple(group.items()) for group in (*states.param_shapes, states.frozen_shapes or {}))


def misfit_partitions(tag: ZeroTag) -> Iterator[Finding]:
    """LT408: yield groups whose flat partitions do not have as many elements as the shapes need."""
    first = tag.first
    if (
        first is None
        or tag.stage == ZeroStage.DISABLED
        or tag.masters is not None
        or tag.optim.keys() != set(range(tag.world_size))
    ):
        return
    for states in tag.optim.values():
        if len(states.groups) != len(first.param_shapes):
            message = f"has {len(states.groups)} groups of masters, but the model file has the shapes of {len(first.param_shapes)}"
            yield fault("LT408", states.path, message)
            return
    yield from _misfit_frozen(tag)
    for group in groups_of(tag):
        sizes = [tag.optim[rank].groups[group.number].numel for rank in range(tag.world_size)]
        over = leftover(group.shapes, sizes, tag.stage)
        if over is not None:
            what = f"{abs(over):,} elements too {'many' if over > 0 else 'few'}"
            message = f"group {group.number} of the masters has {what} for its {len(group.shapes)} parameters"
            yield fault("LT408", tag.folder, message)


def _misfit_frozen(tag: ZeroTag) -> Iterator[Finding]:
    """LT408: yield model files whose pieces of frozen parameters are not as long as the shapes and ranks need."""
    checked = set()
    for states in tag.model.values():
        if tag.stage != ZeroStage.WEIGHTS or not states.frozen or id(states.frozen) in checked:
            continue
        checked.add(id(states.frozen))  # files that say the same share it
        for name, shape in (states.frozen_shapes or {}).items():
            piece = states.frozen.get(name)
            need = -(-math.prod(shape) // tag.world_size)
            if piece is not None and piece.numel != need:
                message = f"holds {piece.numel:,} elements of frozen `{name}`, but this rank's part is {need:,}"
                yield fault("LT408", states.path, message)
                break


def tag_faults(tags: Sequence[ZeroTag]) -> Iterator[Finding]:
    """Yield what is wrong with the rank files of one tag, no tensor read: LT401 to LT408.

    `tags` are its slices, one for each rank of tensor parallelism.
    """
    yield from missing_slices(tags)
    for tag in tags:
        yield from missing_ranks(tag)
        yield from unreadable_files(tag.problems)
        yield from other_world_sizes(tag)
    yield from moved_files(states.file for tag in tags for states in tag.files)
    yield from repeated_files(
        (states.path, (states.file.serialization_id, *(states.file.record(group).crc for group in states.groups)))
        for tag in tags
        for states in tag.optim.values()
        if any(group.numel for group in states.groups)
    )
    yield from other_steps(tags)
    yield from other_runs(tags)
    for tag in tags:
        yield from misfit_partitions(tag)
        if tag.masters is not None and tag.first is not None:
            yield from master_faults(tag, tag.first, tag.masters)


def frozen_unknown(tag: ZeroTag) -> Iterator[Finding]:
    """LT410: yield a finding if frozen parameters were left out of everything, their names too.

    Stages 2 and 3 write tables of them, if only empty ones, unless told `exclude_frozen_parameters`. With LoRA the
    names of the adapted layers tell what is missing.
    """
    first = tag.first
    if (
        first
        and tag.stage >= ZeroStage.GRADIENTS
        and first.frozen_shapes is None
        and not any(map(has_lora_factor, first.module))
    ):
        message = "was saved with exclude_frozen_parameters: frozen weights are missing, and no file lists their names"
        hint = "the model that the run began with has them"
        yield fault("LT410", first.path, message, hint=hint, severity=Severity.WARNING)
