"""LT406 to LT408, LT410, LT416: what rank files hold, judged by steps, configs, names and shapes.

No weight is read. `lora-tool consolidate` refuses on the same findings.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from lora_tool.core.display import and_more, counted, some
from lora_tool.core.keys import PREFIX, has_lora_factor
from lora_tool.core.report import Severity
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.training.sharded_subject import ShardedSubject, another_save

if TYPE_CHECKING:
    from lora_tool.checkpoints.states.file_facts import FileFacts
    from lora_tool.checkpoints.states.state import TrainingState

V = TypeVar("V", bound=Hashable)


@rule("LT406", Severity.ERROR, on=ShardedSubject)
def other_step(subject: ShardedSubject) -> Iterator[Fault]:
    """A rank file from another step.

    What it does: Compares the step counters of all rank files.
    Why it matters: Weights assembled from two steps were never trained; zero_to_fp32 silently assembles them.
    Example: Saving was interrupted: two ranks hold step 200, the other two still step 100.
    What to do: Use another save: `lora-tool consolidate CKPT --tag T`, or another `checkpoint-N`.
    """
    for files in _grouped(subject.state.files()):
        for file, usual in _odd_ones_out(files, attrgetter("step")):
            message = f"was saved after {file.step:g} {file.counts}, but the other {file.unit}s after {usual:g}"
            yield Fault(
                path=file.path, message=message, hint=f"the checkpoint mixes two saves; {another_save(file.path)}"
            )


@rule("LT407", Severity.ERROR, on=ShardedSubject)
def other_run(subject: ShardedSubject) -> Iterator[Fault]:
    """A rank file from another run.

    What it does: Compares the DeepSpeed config and the parameters that each rank file lists, and under HSDP the values
    of ranks that should hold the same.
    Why it matters: Parts of two models of the same shape fit together but make nonsense.
    Example: Somebody mixed the files of two runs while collecting them from several machines.
    What to do: Copy the files again, all from one run.
    """
    state = subject.state
    for files in _grouped(state.files()):
        for file, _ in _odd_ones_out(files, attrgetter("config")):
            yield _foreign(file.path, "was written under another DeepSpeed config than the other ranks' files")
        for file, _ in _odd_ones_out(files, attrgetter("names")):
            yield _foreign(file.path, "holds other tensors than the other ranks' files, or in another order")
        if len({file.names for file in files}) == 1:
            for file, _ in _odd_ones_out(files, attrgetter("shapes")):
                yield _foreign(file.path, "holds tensors of other shapes than the other ranks' files")
    for path, name in state.strangers():
        yield _foreign(path, "belongs to no parameter of the module", name)
    yield from _other_values(state)


def _other_values(state: TrainingState) -> Iterator[Fault]:
    """Yield the files whose parts of a tensor do not fit the other files' parts, each once."""
    seen: set[Path] = set()
    for name, types in state.types():
        for path, usual in _odd_paths(types):
            if path not in seen:
                seen.add(path)
                yield _foreign(path, f"holds {types[path]}, but the other ranks' files hold {usual}", name)
    for name, first, other in state.unequal_replicas():
        if other not in seen:
            seen.add(other)
            yield _foreign(other, f"is a replica of {first.name}, but holds other values", name)


def _foreign(path: Path, message: str, name: str | None = None) -> Fault:
    hint = "files from another run or step were mixed in: copy this run's again"
    return Fault(path=path, message=message, subject=name, hint=hint)


@rule("LT408", Severity.ERROR, on=ShardedSubject, needs=[Need.ALL_NAMES])
def other_number_of_elements(subject: ShardedSubject) -> Iterator[Fault]:
    """Partitions with a wrong number of elements.

    What it does: Adds up the elements of every parameter group and compares them with its shapes, allowing for padding.
    It checks every rank's piece of a frozen parameter in the same way, and in an FSDP checkpoint the rows of every
    tensor.
    Why it matters: If they differ, every parameter after the difference is read from the wrong place.
    Example: A group of 3 parameters needs 1,024 elements, but its partitions hold 1,536.
    What to do: Use another save of the run. If DeepSpeed resumes from the checkpoint without an error, please report it
    as a bug.
    """
    state = subject.state
    for amount in state.amounts():
        if amount.over:
            number = f"{counted(abs(amount.over), amount.unit)} too {'many' if amount.over > 0 else 'few'}"
            hint = f"it is another parameter's, or from another run: copy it again, or {another_save(amount.path)}"
            yield Fault(
                path=amount.path,
                message=f"{amount.of} has {number}{amount.needed_for}",
                subject=amount.subject,
                hint=hint if amount.subject else None,
            )
    for path, name, gap in state.gaps():
        hint = "copy the rank files again, or use another step"
        yield Fault(path=path, message=gap, subject=name, hint=hint)


@rule("LT410", Severity.INFO, on=ShardedSubject, needs=[Need.ALL_NAMES])
def frozen_weights_absent(subject: ShardedSubject) -> Iterator[Fault]:
    """Frozen weights that are not in the checkpoint.

    What it does: Compares the parameters of the training module with those whose values were saved.
    Why it matters: With LoRA the frozen base exists elsewhere. But a new score head under LoRA is frozen, too, and its
    random values exist only here: if they are not saved, the rewards are lost.
    Example: The HF Trainer saves PEFT models with `exclude_frozen_parameters=True`.
    What to do: Put a new head into `modules_to_save`, so that PEFT trains and saves it.
    """
    state = subject.state
    lost, path = state.without_values, str(state.names_path)
    if lost and subject.as_model:
        yield Fault(
            path=state.folder,
            message=f"the model would lack it{and_more(len(lost) - 1)}: frozen parameters were not saved",
            subject=lost[0],
            hint='look for a tag that was saved without exclude_frozen_parameters; `what="state"` writes the tensors that exist',
            severity=Severity.ERROR,
        )
    elif lost and state.has_module_names:
        more = f" and {len(lost) - 1} more were" if len(lost) > 1 else " was"
        hint = "consolidate can still write the adapter; a new head that was frozen is lost"
        yield Fault(path=path, message=f"`{lost[0]}`{more} frozen and not saved", hint=hint)
    elif state.hides_frozen:
        message = "was saved with exclude_frozen_parameters: frozen weights are missing, and no file lists their names"
        hint = "the model that the run began with has them"
        yield Fault(path=path, message=message, hint=hint, severity=Severity.WARNING)


@rule("LT416", Severity.ERROR, on=ShardedSubject, needs=[Need.ALL_NAMES])
def without_adapter(subject: ShardedSubject) -> Iterator[Fault]:
    """A checkpoint without its adapter.

    What it does: Looks for LoRA among the tensors of a PEFT model, and for any tensor at all.
    Why it matters: The checkpoint lacks the trained weights, and resuming from it starts with a new adapter. PEFT 0.21
    under FSDP1 does not recognise the adapter's tensors: saving succeeds, but the folder holds nothing, or only the
    head.
    Example: `pytorch_model_fsdp_0` of a LoRA run holds only `base_model.model.score.weight`.
    What to do: Stop the run. Train with FSDP2 (`fsdp_version: 2`), or with PEFT 0.20.
    """
    state = subject.state
    names = state.entries
    if not (state.lists_all_names and state.has_module_names):
        return
    if not names and state.beside:
        message = f"holds no weights, but what training goes on from beside them: {some(state.beside)}"
        yield Fault(path=state.folder, message=message, hint="look for the weights among the other files of this save")
        return
    if not names:
        why = "holds no tensor"
    elif all(PREFIX in name for name in names) and not any(map(has_lora_factor, names)):
        held = f"none of its {len(names)} tensors is" if len(names) > 1 else "its one tensor is not"
        why = f"holds a PEFT model, but {held} LoRA: `{min(names)}`"
    else:
        return
    message = f"{why}. PEFT 0.21 saves such a file under FSDP1, whose wrappers hide the adapter from it"
    yield Fault(path=state.folder, message=message)


def _grouped(files: Iterable[FileFacts]) -> Iterable[Sequence[FileFacts]]:
    """Return the files that should say the same, together."""
    groups: dict[str, list[FileFacts]] = defaultdict(list)
    for file in files:
        groups[file.group].append(file)
    return groups.values()


def _odd_ones_out(files: Sequence[FileFacts], value: Callable[[FileFacts], V | None]) -> Iterator[tuple[FileFacts, V]]:
    """Yield the files that say something else than most, with what most say; those that say nothing do not count."""
    said = {file.path: found for file in files if (found := value(file)) is not None}
    odd = dict(_odd_paths(said))
    for file in files if odd else ():
        if file.path in odd:
            yield file, odd[file.path]


def _odd_paths(values: Mapping[Path, V]) -> Iterator[tuple[Path, V]]:
    """Yield the files whose value differs from the commonest, with that one."""
    if len(set(values.values())) > 1:
        ((usual, _),) = Counter(values.values()).most_common(1)
        yield from ((path, usual) for path, value in values.items() if value != usual)
