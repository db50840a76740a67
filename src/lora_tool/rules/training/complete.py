"""Whether all of a save is there, whole: what its program writes, by itself and beside the run's other saves.

The HF Trainer writes weights, then the optimizer, scheduler and random states, and trainer_state.json last
(`Trainer._save_checkpoint`, transformers 5.23). FSDP's optimizer states are a distributed checkpoint, whose `.metadata`
is written last and names its files. A run that is killed in between leaves weights that load and nothing to resume from.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from lora_tool.checkpoints import open_sharded
from lora_tool.checkpoints.folders import Folder, is_called_save, listed
from lora_tool.checkpoints.kinds import matches, read_pointer, stem_of, step_of
from lora_tool.checkpoints.registry import holds_rank_files
from lora_tool.core.errors import CheckpointError, CorruptFile, UnsupportedCheckpoint
from lora_tool.core.progress import Progress
from lora_tool.formats.files import open_regular, read_all, read_at
from lora_tool.formats.pickles import MAX_PICKLE_BYTES
from lora_tool.formats.trainer_state import FILE_NAME as TRAINER_STATE

_OPTIMIZERS = frozenset({"optimizer.pt", "optimizer.bin"})
_SCHEDULER = "scheduler.pt"
_RANDOM_STATES = re.compile(r"(?:rng_state(?:_(?P<rank>\d{1,6}))?\.pth|random_states_\d{1,6}\.pkl)\Z")
"""The Trainer's, and those of accelerate's own loops."""
_TORCH_STATES = re.compile(
    r"(?:(?:optimizer|scheduler)(?:_\d{1,3})?\.(?:pt|bin)|scaler\.pt|rng_state(?:_\d{1,6})?\.pth|random_states_\d{1,6}\.pkl)\Z"
)
_OPTIMIZER_FOLDER = re.compile(r"optimizer_\d{1,3}\Z")
_TRAINERS_OWN = re.compile(r"(?:training_args\.bin|optimizer\.pt|scheduler\.pt|rng_state(?:_\d{1,6})?\.pth)\Z")
"""Files by which a save of the HF Trainer is known before it has written its state."""
_DEEPSPEED_POINTER = "latest"
_DEEPSPEED_TAG = re.compile(r"global_step\d{1,15}\Z")
_PIECE = re.compile(rb"__\d{1,6}_\d{1,6}\.distcp")
_END_OF_ZIP = b"PK\x05\x06", 22
"""What a zip file without a comment ends with: the record that begins so, of as many bytes."""
_NEAREST = 10
"""As many saves of a run are compared with one that lacks a file: it may have thousands."""
_CHUNK_BYTES = 1 << 20


def incomplete_reason(folder: Folder, *, deep: bool = False, progress: Progress = lambda _: None) -> str | None:
    """Return why not all that a program writes into a save is there, whole; None for a complete one and other folders.

    `deep` reads every byte of the optimizer's and the other states; `progress` is called with as many as were read.
    """
    interrupted = interrupted_reason(folder)
    if interrupted is not None or not is_called_save(folder.name):
        return interrupted
    return broken_state(folder, deep=deep, progress=progress) or _lost_state(folder)


def state_bytes(folder: Folder) -> int:
    """Return how many bytes a deep `incomplete_reason` reads, about."""
    paths = (folder.root / name for name in filter(_TORCH_STATES.match, folder.files))
    return sum(path.stat().st_size for path in paths if path.is_file())


def interrupted_reason(folder: Folder) -> str | None:
    """Return why a save ended before its end, by its name and by what its program writes last; None if it did not."""
    if folder.is_in_progress:
        return "has the name of a save in progress, which its program renames when all is written"
    if not is_called_save(folder.name) or folder.trainer is not None:
        return None
    if TRAINER_STATE in folder.files:
        return f"holds a {TRAINER_STATE} that cannot be read"
    by_trainer = folder.is_numbered and any(map(_TRAINERS_OWN.match, folder.files))
    if by_trainer or any(TRAINER_STATE in other.files for other in _others(folder)):
        return f"has no {TRAINER_STATE}, which the Trainer writes last, so it was not saved completely"
    return None


def broken_state(folder: Folder, *, deep: bool, progress: Progress = lambda _: None) -> str | None:
    """Return which of the files that a run resumes from is cut off or missing, where the others say that it was there."""
    for name in filter(_TORCH_STATES.match, folder.files):
        if not _is_whole(folder.root / name, deep=deep, progress=progress):
            return f"holds {name}, which is not a complete torch.save file"
    for name in filter(_OPTIMIZER_FOLDER.match, folder.folders):
        lost = _lost_piece(folder.root / name)
        if lost is not None:
            return f"holds {name}, which {lost}"
    if folder.trainer is not None and _has_own_optimizer(folder) and _SCHEDULER not in folder.files:
        return f"has no {_SCHEDULER}, without which the Trainer loads no optimizer state either"
    return _lost_tag(folder) or _lost_rank(folder)


def _lost_piece(optimizer: Path) -> str | None:
    """Return what FSDP's folder of optimizer states lacks: `.metadata`, or a file that it names, to its end."""
    if ".metadata" not in listed(optimizer):
        return "has no .metadata, which is written last"
    try:
        names = sorted(set(_PIECE.findall(read_all(optimizer / ".metadata", limit=MAX_PICKLE_BYTES))))
    except CorruptFile as error:
        return f"cannot be read: {error}"
    lost = next((name for name in map(bytes.decode, names) if not _ends_as_zip(optimizer / name)), None)
    return None if lost is None else f"lacks {lost}, or its end"


def _ends_as_zip(path: Path) -> bool:
    """Return whether the file ends as the torch.save archives do that pieces consist of."""
    begins, length = _END_OF_ZIP
    try:
        with open_regular(path) as fd:
            return read_at(path, fd, os.fstat(fd).st_size - length, length).startswith(begins)
    except (CorruptFile, OSError):
        return False


def _lost_tag(folder: Folder) -> str | None:
    if _DEEPSPEED_POINTER not in folder.files:
        tag = next(filter(_DEEPSPEED_TAG.match, folder.folders), None)
        if tag is None or folder.trainer is None:
            return None
        return f"has {tag}, but no `{_DEEPSPEED_POINTER}`, which DeepSpeed writes last"
    tag = read_pointer(folder.root / _DEEPSPEED_POINTER)
    if tag is None or tag in folder.folders:
        return None
    return f"has a `{_DEEPSPEED_POINTER}` that {f'names {tag}, which is not there' if tag else 'is empty'}"


def _lost_rank(folder: Folder) -> str | None:
    """Return which rank's random states are missing; a run that goes on with fewer processes has fewer of them.

    One process alone writes no number, and a machine that shares no disk holds the states of its own ranks.
    """
    held = _ranks(folder)
    lost = set(range(min(held), max(held))) - held if held else set()
    if held == {0} and any(1 in _ranks(other) for other in _others(folder)):
        lost = {1}
    return f"has no rng_state_{min(lost)}.pth" if lost else None


def _ranks(folder: Folder) -> set[int]:
    return {int(match["rank"]) for name in folder.files if (match := _RANDOM_STATES.match(name)) and match["rank"]}


def _lost_state(folder: Folder) -> str | None:
    """Return what another save of the run can be resumed from and this one lacks, None where it lacks nothing."""
    lacking = {name: is_in for name, is_in in _STATES.items() if not is_in(folder)}
    for other in _others(folder) if lacking else ():
        for name, is_in in lacking.items():
            if is_in(other):
                return f"has no {name}, but {other.root.name} has"
    return None


def _others(folder: Folder) -> Iterator[Folder]:
    """Yield the names in other saves of the same run, the nearest first."""
    run = folder.root.absolute().parent
    step, stem = step_of(folder.name)[0], stem_of(folder.name)
    others = (name for name in listed(run) if stem_of(name) == stem and name != folder.name)
    for name in sorted(others, key=lambda other: abs(step_of(other)[0] - step))[:_NEAREST]:
        names = listed(run / name)
        yield Folder(root=run / name, files=names, folders=names)


def has_optimizer(folder: Folder) -> bool:
    """Return whether a save holds the optimizer's state, whoever wrote it."""
    return _has_own_optimizer(folder) or has_optimizer_of_ranks(folder)


def _has_own_optimizer(folder: Folder) -> bool:
    return not _OPTIMIZERS.isdisjoint(folder.files) or any(map(_OPTIMIZER_FOLDER.match, folder.folders))


def has_optimizer_of_ranks(folder: Folder) -> bool:
    """Return whether the optimizer's state lies in files of ranks beside the weights."""
    if not holds_rank_files(folder):
        return False
    try:
        found = open_sharded(folder.root)
    except (CheckpointError, UnsupportedCheckpoint):
        return False
    names = (name for tag in found.rank_files for name in found.folder.names_in(tag))
    return any(matches(name, found.kind.optimizer) for name in names)


_STATES: Mapping[str, Callable[[Folder], bool]] = {
    "optimizer state": has_optimizer,
    _SCHEDULER: lambda folder: _SCHEDULER in folder.files,
    "random states": lambda folder: any(map(_RANDOM_STATES.match, folder.files)),
}
"""What a run is resumed from besides its log → whether a save has it."""


def _is_whole(path: Path, *, deep: bool, progress: Progress) -> bool:
    """Return whether a torch file has its directory, which is at its end; `deep` compares every checksum, too."""
    import zipfile  # only saves of runs need it

    if not path.is_file():  # a pipe would be waited for
        return False
    try:
        with zipfile.ZipFile(path) as file:
            for entry in file.infolist() if deep else ():
                if entry.CRC:  # `torch.serialization.set_crc32_options(False)` writes 0
                    with file.open(entry) as content:
                        while chunk := content.read(_CHUNK_BYTES):
                            progress(len(chunk))
            return True
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError):
        return False
