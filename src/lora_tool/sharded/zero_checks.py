"""What can be wrong with a DeepSpeed checkpoint, found in names, shapes and counters alone: pure generators of findings.

`zero_to_fp32` accepts most of these without a word. `value_checks` and `rounding` read the weights.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from lora_tool.formats.partitions import leftover
from lora_tool.formats.zero import ModelStates, OptimStates, ZeroTag
from lora_tool.report import Finding, Severity

_TAG = re.compile(r"global_step(\d+)\Z")
_LORA = re.compile(r"\.lora_(embedding_)?A\.")
_BASE = re.compile(r"\.base_layer(?=\.)")


def _fault(code: str, path: Path, message: str, *, hint: str | None = None, warning: bool = False) -> Finding:
    severity = Severity.WARNING if warning else Severity.ERROR
    return Finding(code=code, severity=severity, path=str(path), subject=None, message=message, hint=hint)


def missing_rank_files(tag: ZeroTag) -> Iterator[Finding]:
    """LT401: yield the ranks whose files are not there.

    Every node writes its own ranks' files: a folder copied from one node lacks the others'.
    """
    hint = "copy them from the other machines of the run: every node writes its own ranks"
    ranks = range(tag.world_size)
    optim = [rank for rank in ranks if tag.stage and rank not in tag.optim_files]
    if optim:
        message = f"of {tag.world_size} ranks the optimizer files of {_some(optim)} are missing"
        yield _fault("LT401", tag.folder, message, hint=hint)
    model = [rank for rank in (ranks if tag.stage == 3 else [0]) if rank not in tag.model_files]  # noqa: PLR2004 - the stage
    if model:
        # without frozen parameters every rank's model file says the same, tied names apart, which rank 0 knows
        harmless = 0 not in model and tag.first is not None and not tag.first.frozen
        message = f"of {tag.world_size} ranks the model files of {_some(model)} are missing"
        yield _fault("LT401", tag.folder, message, hint=hint, warning=harmless)


def _some(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")  # noqa: PLR2004 - enough to recognise


def unreadable_rank_files(tag: ZeroTag) -> Iterator[Finding]:
    """LT402: yield the rank files that are truncated, empty or no torch files."""
    for problem in tag.problems:
        yield _fault("LT402", Path(problem.path), problem.message, hint="copy it again, or use another tag: --tag T")


def wrong_world_size(tag: ZeroTag) -> Iterator[Finding]:
    """LT403: yield rank files beyond the world size, and ranks that count the world differently."""
    hint = "a run with more ranks was saved into the same folder: move its files away"
    for rank, states in tag.optim.items():
        if rank >= tag.world_size:
            message = f"is of rank {rank}, but the run had {tag.world_size} ranks"
            yield _fault("LT403", states.file.path, message, hint=hint)
        elif states.partition_count not in (None, tag.world_size):
            yield _other_world(states.file.path, states.partition_count, tag.world_size)
    for model in tag.model.values():
        if tag.stage and tag.optim and model.dp_world_size not in (None, tag.world_size):
            yield _other_world(model.file.path, model.dp_world_size, tag.world_size)


def _other_world(path: Path, found: int | None, usual: int) -> Finding:
    message = f"says that the run had {found} ranks, others say {usual}"
    return _fault("LT403", path, message, hint="it is of another run: copy this run's file again")


def moved_rank_files(tag: ZeroTag) -> Iterator[Finding]:
    """LT404: yield rank files that were written under another name: swapped, or copied over another rank's.

    `torch.save` calls the archive's folder after the file; DeepSpeed's other writers call it ``archive``.
    """
    for states in _files(tag):
        root, stem = states.file.root, states.file.path.stem
        if root not in (stem, "archive"):
            message = f"was written as {root}.pt: rank files were swapped, copied or renamed"
            yield _fault("LT404", states.file.path, message, hint=f"give it its name back: {root}.pt")


def copied_rank_files(tag: ZeroTag) -> Iterator[Finding]:
    """LT405: yield optimizer files of two ranks with the same content."""
    seen: dict[Hashable, OptimStates] = {}
    for states in tag.optim.values():
        if not any(group.numel for group in states.groups):
            continue
        crcs = tuple(states.file.record(group).crc for group in states.groups)
        other = seen.setdefault((states.file.serialization_id, crcs), states)
        if other is not states:
            yield _fault("LT405", states.file.path, f"has the same content as {other.file.path.name}, of another rank")


def different_steps(tag: ZeroTag) -> Iterator[Finding]:
    """LT406: yield rank files that were saved at another step than most."""
    hint = "the checkpoint mixes two saves; use another tag: --tag T"
    by_optim = {states.file.path: states.step for states in tag.optim.values() if states.step is not None}
    by_model = {s.file.path: s.global_steps for s in tag.model.values() if s.global_steps is not None}
    for steps, what in ((by_optim, "optimizer steps"), (by_model, "global steps")):
        for path, step, usual in _odd_ones_out(steps):
            yield _fault("LT406", path, f"was saved after {step:g} {what}, the other ranks after {usual:g}", hint=hint)


def different_runs(tag: ZeroTag) -> Iterator[Finding]:
    """LT407: yield rank files whose config, names or shapes are not those of the other ranks."""
    hint = "files of another run were mixed in: copy this run's again"
    for states in (tag.model, tag.optim):
        configs = {s.file.path: s.config for s in states.values()}
        for path, _, _ in _odd_ones_out(configs):
            yield _fault(
                "LT407", path, "was written under another DeepSpeed config than the other ranks' files", hint=hint
            )
    layouts = {s.file.path: _layout(s) for s in tag.model.values()}
    for path, _, _ in _odd_ones_out(layouts):
        yield _fault("LT407", path, "lists other parameters, or in another order, than the other ranks", hint=hint)


def _layout(states: ModelStates) -> tuple[object, ...]:
    """Return the names and shapes in their order, in a form that can be compared."""
    return tuple(tuple(group.items()) for group in (*states.param_shapes, states.frozen_shapes or {}))


def _odd_ones_out(values: Mapping[Path, Hashable]) -> Iterator[tuple[Path, Hashable, Hashable]]:
    """Yield the files whose value differs from the commonest, with both values."""
    if len(set(values.values())) > 1:
        ((usual, _),) = Counter(values.values()).most_common(1)
        yield from ((path, value, usual) for path, value in values.items() if value != usual)


def leftover_elements(tag: ZeroTag) -> Iterator[Finding]:
    """LT408: yield groups whose flat partitions do not have as many elements as the shapes need."""
    first = tag.first
    if first is None or tag.stage == 0 or len(tag.optim) != tag.world_size:
        return
    for rank, states in tag.optim.items():
        if len(states.groups) != len(first.param_shapes):
            message = f"has {len(states.groups)} groups of masters, the shapes of {len(first.param_shapes)} are known"
            yield _fault("LT408", states.file.path, message)
            return
        if rank >= tag.world_size:
            return
    yield from _leftover_frozen(tag)
    for number, shapes in enumerate(first.param_shapes):
        sizes = [tag.optim[rank].groups[number].numel for rank in sorted(tag.optim)]
        over = leftover(shapes, sizes, tag.stage)
        if over is not None:
            what = f"{over:,} elements too many" if over > 0 else f"{-over:,} elements too few"
            yield _fault(
                "LT408", tag.folder, f"group {number} of the masters has {what} for its {len(shapes)} parameters"
            )


def _leftover_frozen(tag: ZeroTag) -> Iterator[Finding]:
    """LT408: yield model files whose pieces of frozen parameters are not as long as the shapes and ranks need."""
    checked = set()
    for states in tag.model.values():
        if tag.stage != 3 or not states.frozen or id(states.frozen) in checked:  # noqa: PLR2004 - the stage
            continue
        checked.add(id(states.frozen))  # files that say the same share it
        for name, shape in (states.frozen_shapes or {}).items():
            piece = states.frozen.get(name)
            need = -(-math.prod(shape) // tag.world_size)
            if piece is not None and piece.numel != need:
                message = f"holds {piece.numel:,} elements of frozen `{name}`, {need:,} are this rank's part"
                yield _fault("LT408", states.file.path, message)
                break


def latest_tag(root: Path, latest: str | None, tags: Collection[str]) -> Iterator[Finding]:
    """LT409: yield a finding if `latest` does not name the newest tag that is there."""
    steps = {name: int(match[1]) for name in tags if (match := _TAG.match(name))}
    newest = max(steps, key=steps.__getitem__, default=None)
    listed = ", ".join(tags)
    if latest is None and len(tags) > 1:
        message = f"there is no file `latest`, and several tags: {listed}"
        yield _fault("LT409", root, message, hint="choose one: lora-tool consolidate CKPT --tag T", warning=True)
    elif latest is not None and latest not in tags:
        message = f"`latest` names {latest}, which is not there; there is: {listed}"
        yield _fault("LT409", root, message, hint="copy that tag too, or choose one that is there: --tag T")
    elif latest in steps and newest is not None and steps[newest] > steps[latest]:
        message = (
            f"`latest` names {latest}, but {newest} is there too: was its saving interrupted, or `latest` restored?"
        )
        yield _fault("LT409", root, message, hint=f"to take the newer one: --tag {newest}", warning=True)


def frozen_not_saved(path: Path, lost: Sequence[str]) -> Iterator[Finding]:
    """LT410: yield a finding if there are parameters, `lost`, that the module has and the checkpoint has not.

    HF Trainer saves PEFT models with `exclude_frozen_parameters=True`; DeepSpeed before 0.9.1 never saved them.
    """
    if lost:
        more = f" and {len(lost) - 1} more were" if len(lost) > 1 else " was"
        hint = "the adapter can still be taken out; a new head that was frozen is lost"
        found = _fault("LT410", path, f"`{lost[0]}`{more} frozen and not saved", hint=hint)
        yield replace(found, severity=Severity.INFO)


def frozen_unknown(tag: ZeroTag) -> Iterator[Finding]:
    """LT410: yield a finding if frozen parameters were left out of everything, their names too.

    Stages 2 and 3 write tables of them, if only empty ones, unless told `exclude_frozen_parameters`. With LoRA the
    names of the adapted layers tell what is missing.
    """
    first = tag.first
    if first is None or tag.stage < 2 or first.frozen_shapes is not None or any(map(_LORA.search, first.module)):  # noqa: PLR2004 - the stage
        return
    message = "was saved with exclude_frozen_parameters: if any were frozen, the weights are not whole, and nothing tells which"
    hint = "take what is missing from the model that the run began with"
    yield _fault("LT410", first.file.path, message, hint=hint, warning=True)


def base_layers_left_out(names: Collection[str]) -> tuple[str, ...]:
    """Return the names that the frozen weights under LoRA would have, without those that are among `names`."""
    adapted = {name[: match.start()] for name in names if (match := _LORA.search(name))}
    # under `target_parameters` the base's parameter has a name of its own: experts.base_layer.gate_up_proj
    held = {name[: match.start()] for name in names if ".lora_" not in name for match in _BASE.finditer(name)}
    return tuple(f"{module}.base_layer.weight" for module in sorted(adapted - held))


def _files(tag: ZeroTag) -> Iterator[ModelStates | OptimStates]:
    yield from tag.model.values()
    yield from tag.optim.values()


_CHECKS = (
    missing_rank_files,
    unreadable_rank_files,
    wrong_world_size,
    moved_rank_files,
    copied_rank_files,
    different_steps,
    different_runs,
    leftover_elements,
)


def structure_faults(tag: ZeroTag) -> Iterator[Finding]:
    """Yield what is wrong with the rank files of one tag, no tensor read."""
    for check in _CHECKS:
        yield from check(tag)
