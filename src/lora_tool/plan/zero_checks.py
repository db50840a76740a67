"""What can be wrong with a DeepSpeed checkpoint, found in names, shapes and counters alone: pure generators of faults.

`zero_to_fp32` accepts most of these without a word. `values` has the checks that read the weights.
"""

from __future__ import annotations

import enum
import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_tool.formats.partitions import leftover, unaccounted
from lora_tool.formats.zero import ModelStates, OptimStates, ZeroTag

_TAG = re.compile(r"global_step(\d+)\Z")


@enum.unique
class Severity(str, enum.Enum):
    """How bad a fault is. ERROR: the weights put together would not be those that were trained."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that is wrong, with the code of its rule."""

    code: str
    severity: Severity
    path: str
    message: str
    subject: str | None = None
    hint: str | None = None

    def __str__(self) -> str:
        where = f"{self.path}: `{self.subject}`" if self.subject else self.path
        return f"{self.code} {where}: {self.message}"


def _fault(code: str, path: Path, message: str, *, hint: str | None = None, warning: bool = False) -> Fault:
    severity = Severity.WARNING if warning else Severity.ERROR
    return Fault(code=code, severity=severity, path=str(path), message=message, hint=hint)


def missing_rank_files(tag: ZeroTag) -> Iterator[Fault]:
    """LT401: yield the ranks whose files are not there.

    Every node writes its own ranks' files: a folder copied from one node lacks the others'.
    """
    hint = "copy them from the other machines of the run: every node writes its own ranks"
    ranks = range(tag.world_size)
    present = {name for problem in tag.problems for name in [Path(problem.path).name]}
    optim = [rank for rank in ranks if tag.stage and rank not in tag.optim and not _broken(present, rank, "optim")]
    if optim:
        listed = ", ".join(map(str, optim[:8]))
        yield _fault(
            "LT401", tag.folder, f"of {tag.world_size} ranks the optimizer files of {listed} are missing", hint=hint
        )
    wanted = ranks if tag.stage == 3 else [0]  # noqa: PLR2004 - the stage
    model = [rank for rank in wanted if rank not in tag.model and not _broken(present, rank, "model")]
    if model:
        # without frozen parameters every rank's model file says the same, tied names apart, which rank 0 knows
        harmless = 0 not in model and not (tag.first and tag.first.frozen)
        listed = ", ".join(map(str, model[:8]))
        message = f"of {tag.world_size} ranks the model files of {listed} are missing"
        yield _fault("LT401", tag.folder, message, hint=hint, warning=harmless)


def _broken(names: Iterable[str], rank: int, sort: str) -> bool:
    return any(re.search(rf"zero_pp_rank_{rank}_mp_rank_00_{sort}_states", name) for name in names)


def unreadable_rank_files(tag: ZeroTag) -> Iterator[Fault]:
    """LT402: yield the rank files that are truncated, empty or no torch files."""
    for problem in tag.problems:
        yield _fault("LT402", Path(problem.path), problem.message, hint="copy it again, or use another tag: --tag T")


def wrong_world_size(tag: ZeroTag) -> Iterator[Fault]:
    """LT403: yield rank files beyond the world size, and ranks that count the world differently."""
    hint = "a run with more ranks was saved into the same folder: move its files away"
    for rank, states in tag.optim.items():
        if rank >= tag.world_size:
            message = f"is of rank {rank}, but the run had {tag.world_size} ranks"
            yield _fault("LT403", states.file.path, message, hint=hint)
        elif states.partition_count not in (None, tag.world_size):
            message = f"says that the run had {states.partition_count} ranks, others say {tag.world_size}"
            yield _fault("LT403", states.file.path, message, hint=hint)


def moved_rank_files(tag: ZeroTag) -> Iterator[Fault]:
    """LT404: yield rank files that were written under another name: swapped, or copied over another rank's.

    `torch.save` calls the archive's folder after the file; DeepSpeed's other writers call it ``archive``.
    """
    for states in _files(tag):
        root, stem = states.file.root, states.file.path.stem
        if root not in (stem, "archive"):
            message = f"was written as {root}.pt: rank files were swapped, copied or renamed"
            yield _fault("LT404", states.file.path, message, hint=f"give it its name back: {root}.pt")


def copied_rank_files(tag: ZeroTag) -> Iterator[Fault]:
    """LT405: yield optimizer files of two ranks with the same content."""
    seen: dict[Hashable, OptimStates] = {}
    for states in tag.optim.values():
        if not states.file.serialization_id or not any(group.numel for group in states.groups):
            continue
        crcs = tuple(group.record.crc for group in states.groups)
        other = seen.setdefault((states.file.serialization_id, crcs), states)
        if other is not states:
            yield _fault("LT405", states.file.path, f"has the same content as {other.file.path.name}, of another rank")


def different_steps(tag: ZeroTag) -> Iterator[Fault]:
    """LT406: yield rank files that were saved at another step than most."""
    hint = "the checkpoint mixes two saves; use another tag: --tag T"
    by_optim = {states.file.path: states.step for states in tag.optim.values() if states.step is not None}
    by_model = {s.file.path: s.global_steps for s in tag.model.values() if s.global_steps is not None}
    for steps, what in ((by_optim, "optimizer steps"), (by_model, "global steps")):
        for path, step, usual in _odd_ones_out(steps):
            yield _fault("LT406", path, f"was saved after {step:g} {what}, the other ranks after {usual:g}", hint=hint)


def different_runs(tag: ZeroTag) -> Iterator[Fault]:
    """LT407: yield rank files whose config, names or shapes are not those of the other ranks."""
    hint = "files of another run were mixed in: copy this run's again"
    for states in (tag.model, tag.optim):
        configs = {s.file.path: _comparable(s.config) for s in states.values()}
        for path, _, _ in _odd_ones_out(configs):
            yield _fault(
                "LT407", path, "was written under another DeepSpeed config than the other ranks' files", hint=hint
            )
    layouts = {
        s.file.path: _comparable([list(map(list, group.items())) for group in (*s.param_shapes, s.frozen_shapes or {})])
        for s in tag.model.values()
    }
    for path, _, _ in _odd_ones_out(layouts):
        yield _fault("LT407", path, "lists other parameters, or in another order, than the other ranks", hint=hint)


def _comparable(value: object) -> str:
    return json.dumps(value, sort_keys=isinstance(value, dict), default=lambda found: type(found).__name__)


def _odd_ones_out(values: Mapping[Path, Hashable]) -> Iterator[tuple[Path, Hashable, Hashable]]:
    """Yield the files whose value differs from the commonest, with both values."""
    if len(set(values.values())) > 1:
        ((usual, _),) = Counter(values.values()).most_common(1)
        yield from ((path, value, usual) for path, value in values.items() if value != usual)


def leftover_elements(tag: ZeroTag) -> Iterator[Fault]:
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
    for number, shapes in enumerate(first.param_shapes):
        sizes = [tag.optim[rank].groups[number].numel for rank in sorted(tag.optim)]
        over = leftover(shapes, sizes, tag.stage)
        if over is not None:
            what = f"{over:,} elements too many" if over > 0 else f"{-over:,} elements too few"
            yield _fault(
                "LT408", tag.folder, f"group {number} of the masters has {what} for its {len(shapes)} parameters"
            )


def newer_tag(root: Path, latest: str | None, tags: Iterable[str]) -> Iterator[Fault]:
    """LT409: yield a fault if `latest` names an older tag than the newest that is there."""
    steps = {name: int(match[1]) for name in tags if (match := _TAG.match(name))}
    newest = max(steps, key=steps.__getitem__, default=None)
    if latest in steps and newest is not None and steps[newest] > steps[latest]:
        message = (
            f"`latest` names {latest}, but {newest} is there too: was its saving interrupted, or `latest` restored?"
        )
        yield _fault("LT409", root, message, hint=f"to take the newer one: --tag {newest}", warning=True)


def frozen_not_saved(tag: ZeroTag) -> Iterator[Fault]:
    """LT410: yield a fault if parameters of the training module are not in the checkpoint.

    HF Trainer saves PEFT models with `exclude_frozen_parameters=True`; DeepSpeed before 0.9.1 never saved them.
    """
    first = tag.first
    if first is None:
        return
    trained = [name for group in first.param_shapes for name in group]
    adapted = {name.partition(".lora_A.")[0] for name in trained if ".lora_A." in name}
    held = {*(first.frozen or {}), *first.module}
    lost = [f"{module}.base_layer.weight" for module in sorted(adapted)]
    lost = [name for name in lost if name not in held] or list(unaccounted(tag))
    if lost:
        message = (
            f"frozen parameters were not saved, `{lost[0]}` and {len(lost) - 1} more"
            if len(lost) > 1
            else f"`{lost[0]}` was not saved"
        )
        hint = "the adapter can still be taken out; a new head that was frozen is lost"
        yield _fault("LT410", first.file.path, message, hint=hint, warning=True)


def _files(tag: ZeroTag) -> Iterator[ModelStates | OptimStates]:
    yield from tag.model.values()
    yield from tag.optim.values()


STRUCTURE: Mapping[str, Callable[[ZeroTag], Iterator[Fault]]] = {
    "LT401": missing_rank_files,
    "LT402": unreadable_rank_files,
    "LT403": wrong_world_size,
    "LT404": moved_rank_files,
    "LT405": copied_rank_files,
    "LT406": different_steps,
    "LT407": different_runs,
    "LT408": leftover_elements,
    "LT410": frozen_not_saved,
}
"""Code → check, for all that need only the structure of one tag."""


def structure_faults(tag: ZeroTag) -> Iterator[Fault]:
    """Yield everything that is wrong with the tag, no tensor read."""
    for check in STRUCTURE.values():
        yield from check(tag)
