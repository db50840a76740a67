"""Kinds of checkpoints, and opened checkpoints, as frozen data."""

from __future__ import annotations

import enum
import fnmatch
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path

from msgspec import Struct

from lora_tool.checkpoints.folders import Folder
from lora_tool.core import keys
from lora_tool.core.display import shortened
from lora_tool.core.errors import CorruptFile, NotACheckpoint, Problem
from lora_tool.core.tensors import DType, TensorTable
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.formats.files import open_regular, read_at
from lora_tool.formats.manifest import Manifest
from lora_tool.formats.model_config import ModelConfig
from lora_tool.formats.weights import Weights


@enum.unique
class Claim(enum.IntEnum):
    """How much of a kind a folder has. The largest claim opens it; of equal ones, that of the kind registered first."""

    CONFIG = 1
    """A config and no weights: any other claim on the folder goes first."""
    INSIDE = 2
    """Checkpoints in folders of it."""
    WEIGHTS = 3
    """The weights, whole or in pieces; for an adapter its config is enough."""


class Kind(Struct, frozen=True, kw_only=True):
    """A kind of checkpoint: its name, how to recognise and open it, and the command for it."""

    name: str
    """As reports have it: "adapter", "FSDP checkpoint"."""
    article: str = "a"
    sign: str
    """The file or folder that people know it by: "config.json"."""
    command: str
    recognise: Callable[[Folder], Claim | None]
    """Returns the kind's claim on the folder, only from file names; None without one."""
    open: Callable[[Folder], Checkpoint]
    """Called only if `recognise` claimed the folder. Faults inside become problems and are never raised."""

    def __str__(self) -> str:
        return self.name

    @property
    def with_article(self) -> str:
        """The kind as a sentence has it: "an adapter", "an FSDP checkpoint"."""
        return f"{self.article} {self.name}"


class ShardedKind(Kind, frozen=True, kw_only=True):
    """A kind whose weights lie in pieces, each written by one process; its files are known by patterns.

    Patterns are those of `fnmatch`, in lower case.
    """

    command: str = "consolidate"
    landmarks: tuple[str, ...]
    """Names of files: every folder with pieces has one of them, so that pieces are found without listing it."""
    weights: tuple[str, ...]
    """Patterns of the files that hold weights."""
    optimizer: tuple[str, ...] = ()
    """Patterns of the files that hold the optimizer's state; empty where the pieces do not have it."""
    others: tuple[str, ...] = ()
    """Patterns of the files written along with the pieces: pointers, metadata, scripts."""
    folders: tuple[str, ...] = ()
    """Patterns of the folders in a checkpoint that hold nothing but its pieces."""
    steps: re.Pattern[str] | None = None
    """Names of the folders in a run that are separate saves: they are listed and pruned one by one."""
    resumed_by_trainer: bool = False
    """Whether transformers' Trainer, and so `train`, can resume from it."""

    @property
    def patterns(self) -> tuple[str, ...]:
        """Patterns of everything that belongs to its pieces: only a resumed run needs those files."""
        return (*self.weights, *self.optimizer, *self.others, *self.folders)


class _Opened(Struct, frozen=True, kw_only=True):
    """A folder that was opened, and the problems found on the way."""

    kind: Kind
    folder: Folder
    problems: tuple[Problem, ...] = ()

    @property
    def root(self) -> Path:
        return self.folder.root

    @property
    def is_broken(self) -> bool:
        """Whether a file has a fault after which its contents cannot be believed."""
        return any(problem.fatal for problem in self.problems)

    def __repr__(self) -> str:
        problems = f", {len(self.problems)} problems" if self.problems else ""
        return f"{type(self).__name__}({shortened(str(self.root), 300)!r}{problems})"


class _WithWeights(_Opened, frozen=True, kw_only=True):
    """A folder whose weights are whole."""

    weights: Weights

    @property
    def tensors(self) -> TensorTable:
        return self.weights.tensors


class ModelDir(_WithWeights, frozen=True, kw_only=True, dict=True):
    """A transformers model: config and weights. With a `lora_tool.json` it is a merged model."""

    config: ModelConfig | None
    manifest: Manifest | None = None

    @property
    def whole_config(self) -> ModelConfig:
        """The config, for a model that the rules have found whole."""
        if self.config is None:
            raise AssertionError("a whole model has a config")
        return self.config

    @cached_property
    def modules(self) -> frozenset[str]:
        """The paths of the modules that have tensors."""
        return frozenset(name.rpartition(".")[0] for name in self.tensors)

    @property
    def dtype(self) -> DType | None:
        """The dtype that `from_pretrained(dtype="auto")` gives the model: the config's, else that of its first float tensor."""
        if self.config is not None and self.config.dtype is not None:
            return self.config.dtype
        return next((tensor.dtype for tensor in self.tensors.values() if tensor.dtype.is_float), None)


class AdapterDir(_WithWeights, frozen=True, kw_only=True, dict=True):
    """A PEFT adapter: config and weights. With a `trainer_state.json` it is a trainer checkpoint."""

    config: AdapterConfig | None
    keys: Mapping[str, keys.AdapterKey]
    """Tensor name → its parsed form, for every tensor."""


class ShardedDir(_Opened, frozen=True, kw_only=True):
    """A training checkpoint in pieces: rank files of DeepSpeed, FSDP, verl or any other registered kind."""

    kind: ShardedKind
    rank_files: Mapping[str, tuple[str, ...]]
    """Tag → names of its rank files: the folder that they lie in, "." where that is `root` itself."""
    latest: str | None = None
    """The tag that a file of the checkpoint names as the latest; None without such a file, or where `root` is a tag."""
    latest_universal: str | None = None
    """The tag that DeepSpeed's file for universal checkpoints names."""


class RunDir(_Opened, frozen=True, kw_only=True):
    """A training run's output folder that holds `checkpoint-N` folders and no finished weights."""


class NamedAdapters(_Opened, frozen=True, kw_only=True):
    """A save of a run without weights of its own: each of its adapters lies in a folder that has its name."""

    adapters: tuple[AdapterDir, ...]


Checkpoint = ModelDir | AdapterDir | ShardedDir | RunDir | NamedAdapters
"""A closed union: code that takes one handles all five. New kinds of checkpoint open as one of them."""


def unexpected(found: Checkpoint, expected: str, *, hint: str | None = None) -> NotACheckpoint:
    """Return the error for a checkpoint that is not the `expected` kind; its hint is by default the command that takes it."""
    return NotACheckpoint(
        f"{found.root} is {found.kind.with_article}: expected {expected}",
        hint=hint or f"lora-tool {found.kind.command} {shlex.quote(str(found.root))}",
    )


def lies_here(pattern: re.Pattern[str], folder: Folder) -> Claim | None:
    """Return the claim of a kind whose pieces are files of these names in the folder itself."""
    return Claim.WEIGHTS if any(map(pattern.match, folder.files)) else None


def open_here(kind: ShardedKind, pattern: re.Pattern[str], folder: Folder) -> ShardedDir:
    """Return the folder that `lies_here` claimed for this kind."""
    names = tuple(filter(pattern.match, folder.files))
    return ShardedDir(kind=kind, folder=folder, rank_files={".": names}, problems=folder.problems)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Return whether the name of a file or folder is one of these, in lower or upper case."""
    return any(fnmatch.fnmatchcase(name.lower(), pattern) for pattern in patterns)


def read_pointer(path: Path) -> str | None:
    """Return the text of the file `path`, which names a saved step; None where it cannot be read."""
    try:
        with open_regular(path) as fd:
            return read_at(path, fd, 0, 200).decode(errors="replace").strip()
    except CorruptFile:
        return None


_COUNTED = re.compile(r"(step|iter|iteration|epoch|checkpoint|ckpt)[-_=]?(\d{1,18})", re.IGNORECASE)
_LAST_NUMBER = re.compile(r"()(\d{1,18})\Z")


def step_of(name: str) -> tuple[int, str]:
    """Return a key that sorts tags and checkpoints by step: the last number that is called one, else that at the end.

    It is 0 for a name without either.
    """
    steps = _COUNTED.findall(name) or _LAST_NUMBER.findall(name)
    return int(steps[-1][1]) if steps else 0, name


def counts_epochs(name: str) -> bool:
    """Return whether the number of `step_of` is an epoch's, which is neither before nor after any step."""
    return [word.lower() for word, _ in _COUNTED.findall(name)][-1:] == ["epoch"]


def stem_of(name: str) -> str:
    """Return the name without its numbers, which the saves of one kind in a run have in common."""
    return _NUMBER.sub("", name)


_NUMBER = re.compile(r"\d+")
