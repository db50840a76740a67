"""LT401 to LT405 and LT409: the files of checkpoints in pieces, judged by their names, numbers and checksums.

No weight is read. `lora-tool consolidate` refuses on the same findings.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lora_tool.core.display import counted, some
from lora_tool.core.errors import Defect
from lora_tool.core.report import Severity
from lora_tool.formats import model_config
from lora_tool.formats.files import way_to_open
from lora_tool.rules.engine.registry import Fault, rule
from lora_tool.rules.training.sharded_subject import COPY, ShardedSubject, another_save

if TYPE_CHECKING:
    from lora_tool.checkpoints.states.state import TrainingState

_NO_NAME = "archive"
"""The folder in files that DeepSpeed's other writers made, whatever they called the file."""
_TAG = re.compile(r"(?:global_step_?|iter_)(\d+)(?:/.+)?\Z")


@rule("LT401", Severity.ERROR, on=ShardedSubject)
def rank_file_missing(subject: ShardedSubject) -> Iterator[Fault]:
    """Rank files are missing.

    What it does: Compares the rank files with the world size that they state, and the `.distcp` files with those that
    `.metadata` names. A file with one rank's slices under the name of the whole model also counts. Under HSDP, where
    other ranks hold the same values, a missing file is a warning.
    Why it matters: Under ZeRO and FSDP each process holds a part of every weight, so without one file no weight is
    complete.
    Example: The optimizer files of ranks 2 and 3 of 4 are missing, because only the first of two machines was copied.
    What to do: Copy them from the other machines of the run: every node writes the files of its own ranks.
    """
    state = subject.state
    yield from _lost_numbers(state)
    yield from (Fault(path=path, message=f"is missing, {why}", hint=COPY) for path, why in state.absent_files())
    for path, rank, ranks in state.ungathered_files():
        message = (
            f"holds what rank {rank} of {ranks} had of each tensor: the ranks' parts were not gathered before saving"
        )
        hint = "the parts of the other ranks were never saved: use an adapter beside it, or another step"
        yield Fault(path=path, message=message, hint=hint)
    rows = state.known_rows()
    if rows is not None:
        yield from _lost_ends(state, tuple(rows))


def _lost_numbers(state: TrainingState) -> Iterator[Fault]:
    """Yield the files that are missing by their numbers."""
    for files in state.numbered_files():
        lost = [number for number in files.numbers if number not in files.there]
        if lost:
            one, several = f"{files.one} of {files.of} {lost[0]} is", f"{files.several} of {files.of}s {some(lost)} are"
            all_ = f"{counted(len(files.numbers), files.of)}: {files.numbers[0]}-{files.numbers[-1]}"
            rest = "; the other ranks hold all of its content" if files.spare else ""
            yield Fault(
                path=files.folder,
                message=f"the {one if len(lost) == 1 else several} missing ({all_}){rest}",
                hint=COPY,
                severity=Severity.WARNING if files.spare else None,
            )


def _lost_ends(state: TrainingState, rows: Sequence[tuple[str, int, int]]) -> Iterator[Fault]:
    """Yield a fault if the last files are missing, which only the model's config can tell."""
    for name, held, wanted in rows:
        if held < wanted:
            message = f"ends after {held:,} of {wanted:,} rows: the files of the last ranks are missing"
            yield Fault(path=state.folder, message=message, subject=name, hint=COPY)
            return
    if not rows:
        message = "does not say how many ranks saved it, so lora-tool cannot tell whether the last files are missing"
        hint = f"put the model's {model_config.FILE_NAME} beside the files, or compare with the base: lora-tool validate --base"
        yield Fault(path=state.folder, message=message, hint=hint, severity=Severity.INFO)


@rule("LT402", Severity.ERROR, on=ShardedSubject)
def rank_file_unreadable(subject: ShardedSubject) -> Iterator[Fault]:
    """A rank file that cannot be read.

    What it does: Reads the directory and the structure of every rank file, without running any code in it.
    Why it matters: If a file is truncated, empty or of another format, the weights of its rank are gone.
    Example: `zero_pp_rank_1_mp_rank_00_model_states.pt` is 0 bytes because the disk was full.
    What to do: Copy it again from where it was written, or use another save: `lora-tool consolidate CKPT --tag T`, or
    another `checkpoint-N`.
    """
    for problem in subject.state.broken:
        hint = f"copy it again, or {another_save(Path(problem.path))}"
        if problem.defect is Defect.PICKLE and not problem.path.endswith(".metadata"):
            hint = "copy it again; if it is the same then, write it anew with the torch that saved it: torch.save(torch.load(FILE), NEW)"
        way = way_to_open(problem.path, problem.message)
        yield Fault(path=problem.path, message=problem.message, subject=problem.subject, hint=way or hint)


@rule("LT403", Severity.ERROR, on=ShardedSubject)
def world_size(subject: ShardedSubject) -> Iterator[Fault]:
    """Rank files that disagree about the world size.

    What it does: Compares the world size that each file states, and looks for files of ranks beyond it.
    Why it matters: Parts written by 4 processes do not fit together with parts written by 8.
    Example: A run was resumed on 8 GPUs into the folder of a run on 4, with the same tag.
    What to do: Tell the two saves apart by the modification times of their files, and keep the files of one.
    """
    for file in subject.state.files():
        if file.rank is not None and file.rank >= file.all_ranks:
            message = f"is from {file.unit} {file.rank}, but the run had {counted(file.all_ranks, file.unit)}"
            hint = "a run with more ranks was saved into the same folder: move its files away"
        elif file.ranks in (None, file.all_ranks):
            continue
        elif file.is_extra:
            message = f"is from a run of {file.ranks} ranks, but the checkpoint has {file.all_ranks}"
            hint = "two runs were saved into one folder: move the files of one of them away"
        else:
            message = f"says that the run had {file.ranks} ranks, but the other files say {file.all_ranks}"
            hint = "it is from another run: copy this run's file again"
        yield Fault(path=file.path, message=message, hint=hint)


@rule("LT404", Severity.ERROR, on=ShardedSubject)
def rank_file_moved(subject: ShardedSubject) -> Iterator[Fault]:
    """A renamed rank file.

    What it does: Compares the name of each file with the name of the folder inside it, which torch gives it on saving.
    Why it matters: If the files of two ranks are swapped, all weights are wrong, and zero_to_fp32 accepts them.
    Example: `…rank_0…` was written as `…rank_1…`.
    What to do: Rename the file back, or copy the files again.
    """
    for file in subject.state.files():
        if file.archive not in (None, file.path.stem, _NO_NAME):
            name = f"{file.archive}{file.path.suffix}"
            message = f"was written as {name}: rank files were swapped, copied or renamed"
            yield Fault(path=file.path, message=message, hint=f"give it its name back: {name}")
        elif file.rank is not None and file.saved_by not in (None, file.rank) and file.rank < file.all_ranks:
            message = f"was saved by rank {file.saved_by}: rank files were swapped or copied"
            yield Fault(path=file.path, message=message, hint="give the files their names back, or copy them again")


@rule("LT405", Severity.ERROR, on=ShardedSubject)
def rank_file_copied(subject: ShardedSubject) -> Iterator[Fault]:
    """Files of two ranks with the same content.

    What it does: Compares the checksums that the files store.
    Why it matters: One rank's part replaces another's, so a part of each weight is wrong.
    Example: A download script saved the first rank's file under two names.
    What to do: Copy the right file again.
    """
    for path, other in subject.state.copies():
        yield Fault(path=path, message=f"has the same content as {other.name}, of another rank", hint=COPY)


@rule("LT409", Severity.WARNING, on=ShardedSubject)
def older_than_newest(subject: ShardedSubject) -> Iterator[Fault]:
    """`latest` does not name the newest tag.

    What it does: Compares the tag in the file `latest` with the existing tags. A tag that does not exist is an error.
    Why it matters: Tools use the tag that `latest` names, so you would get older weights than you expect.
    Example: `latest` says global_step100 although global_step200 exists, because the run died between the two writes.
    What to do: Use the newer tag if it is complete: `lora-tool consolidate CKPT --tag T`.
    """
    tags = subject.state.tags
    if tags is None:
        return
    steps = {name: int(match[1]) for name in tags.names if (match := _TAG.match(name))}
    newest = max(steps, key=steps.__getitem__, default=None)
    choose = f"lora-tool consolidate {shlex.quote(str(tags.root))} --tag"
    latest, pointer, listed = tags.latest, tags.pointer, ", ".join(tags.names)
    if latest is None and len(tags.names) > 1:
        several = f"several tags and no file `{pointer}`" if pointer else "several steps"
        yield Fault(path=tags.root, message=f"the folder has {several}: {listed}", hint=f"choose one: {choose} T")
    elif latest is not None and latest not in tags.names:
        named = f"names {latest}, which does not exist" if latest else "is empty"
        hint = f"copy that tag too, or choose one that exists: {choose} T"
        message = f"`{pointer}` {named}; the folder has: {listed}"
        yield Fault(path=tags.root, message=message, hint=hint, severity=Severity.ERROR)
    elif latest in steps and newest is not None and steps[newest] > steps[latest]:
        message = f"`{pointer}` names {latest}, but {newest} is newer: the save of {newest} may have been interrupted, or `{pointer}` restored"
        yield Fault(path=tags.root, message=message, hint=f"to use {newest}: {choose} {newest}")
