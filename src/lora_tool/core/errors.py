"""Everything that can go wrong, as one tree.

    LoraToolError
    ├── CheckpointError            the given path cannot be used
    │   ├── NotACheckpoint         the path does not exist, or its contents are not recognised
    │   ├── BrokenFile             one file is at fault
    │   │   ├── CorruptFile        it breaks its own format
    │   │   └── BadConfig          a JSON field is missing or has the wrong type
    │   └── IncompleteCheckpoint   files that belong together are not all there
    ├── PlanError                  the request cannot be carried out exactly
    │   ├── UnsupportedAdapter     a feature we refuse by name
    │   │   └── OnlyInMemory       PEFT itself can merge it, with the whole model in memory
    │   ├── UnsupportedCheckpoint  a training checkpoint's layout we refuse by name
    │   ├── IncompatibleBase       base model and adapter do not fit
    │   └── OutputExists           the output exists already
    ├── ExecutionError             it failed while writing
    │   ├── OutOfSpace
    │   └── SourceChanged          an input changed while it was read
    ├── VerificationFailed         the written output is wrong
    ├── FindingsFound              raised by ``Report.raise_for_errors``
    ├── HubError                   the Hub did not do what was asked
    │   ├── HubRefused             permission is missing, or the request is not accepted
    │   ├── HubConflict            somebody else's change is in the way
    │   └── HubUnreachable         network, overload or rate limit: a retry may succeed
    ├── ServerError                an inference server refused a request, or its answer is unusable
    │   └── ServerUnreachable      network, overload or time: a retry may succeed
    ├── WrongValue                 an argument has a value that is not allowed
    │   └── UnknownRule            no rule has the code that was given
    ├── WrongCall                  a function has no such argument, or lacks one
    ├── BrokenPlugin               an entry point of another distribution does not load
    └── MissingDependency          an extra is not installed

A message says what is wrong, where, what was expected and what was found; `hint` says what to type.
The command line maps each class to its exit code in one place.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

if TYPE_CHECKING:
    from typing_extensions import Self


@enum.unique
class Defect(str, enum.Enum):
    """What can be wrong with one file, independent of the model in it. Each has one LT1xx rule."""

    TRUNCATED = "truncated"
    BAD_HEADER = "bad-header"
    HOLE = "hole"
    OVERLAP = "overlap"
    DUPLICATE_KEY = "duplicate-key"
    WRONG_SIZE = "wrong-size"
    SHARD_MISSING = "shard-missing"
    SHARD_NAME = "shard-name"
    INDEX_MISMATCH = "index-mismatch"
    PICKLE = "pickle"
    TOTAL_SIZE = "total-size"
    NOT_A_FILE = "not-a-file"
    BAD_JSON = "bad-json"
    STRAY_WEIGHTS = "stray-weights"
    NO_WEIGHTS = "no-weights"
    BAD_FIELD = "bad-field"
    FOREIGN_CALL = "foreign-call"


class Problem(Struct, frozen=True, kw_only=True):
    """One defect of one file, found while reading it. `subject` is the tensor, key or field concerned."""

    defect: Defect
    path: str
    message: str
    subject: str | None = None
    fatal: bool = True
    """Whether the file's tensors cannot be trusted. A wrong `total_size` is a defect, but not fatal."""

    def __str__(self) -> str:
        where = f"{self.path}: `{self.subject}`" if self.subject else self.path
        return f"{where}: {self.message}"


_NOTE = "hint: "


class LoraToolError(Exception):
    """The root of all errors raised deliberately. `hint` says what the user can do; a traceback shows it as a note."""

    __notes__: list[str]
    """What `BaseException.add_note` fills since Python 3.11, which prints it; 3.10 does not."""
    _hint: str | None

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.__notes__ = []
        self.hint = hint

    @property
    def hint(self) -> str | None:
        return self._hint

    @hint.setter
    def hint(self, hint: str | None) -> None:
        others = [note for note in self.__notes__ if not note.startswith(_NOTE)]
        self._hint, self.__notes__ = hint, [*others, *([] if hint is None else [_NOTE + hint])]

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle needs: constructors take other arguments than the message that they make."""
        return _restored, (type(self), self.args, vars(self))


def of_system(error: OSError, where: object = "system") -> LoraToolError:
    """Return the error of the operating system as one of ours: about the file that it names, else about `where`."""
    return LoraToolError(f"{error.filename or where}: {error.strerror or error}")


def _restored(kind: type[LoraToolError], args: tuple[Any, ...], fields: dict[str, Any]) -> LoraToolError:
    error = kind.__new__(kind, *args)
    vars(error).update(fields)
    return error


class CheckpointError(LoraToolError):
    """The given path cannot be used."""


class NotACheckpoint(CheckpointError):
    """The path does not exist, or lora-tool does not recognise its contents."""


class BrokenFile(CheckpointError):
    """One file is at fault; `problem` says which, and how."""

    def __init__(self, problem: Problem, *, hint: str | None = None) -> None:
        super().__init__(str(problem), hint=hint)
        self.problem = problem

    @classmethod
    def of(cls, path: Path | str, defect: Defect, message: str, subject: str | None = None) -> Self:
        """Return the error about the file `path`, and about `subject` in it: a tensor, key or field."""
        return cls(Problem(defect=defect, path=str(path), message=message, subject=subject))


class CorruptFile(BrokenFile):
    """A file breaks its own format."""


class BadConfig(BrokenFile):
    """A JSON file has a missing field or one of the wrong type."""


class IncompleteCheckpoint(CheckpointError):
    """Files that belong together are not all there."""


class PlanError(LoraToolError):
    """The request cannot be carried out exactly."""


class UnsupportedAdapter(PlanError):
    """The adapter uses a feature that lora-tool refuses by name."""


class OnlyInMemory(UnsupportedAdapter):
    """Only PEFT can merge the adapter, with the whole model in memory, which `allow_in_memory` permits."""


class UnsupportedCheckpoint(PlanError):
    """A training checkpoint has a layout that lora-tool refuses by name, or lacks what was requested."""


class IncompatibleBase(PlanError):
    """The base model and the adapter do not fit each other; `problem` is what the base's own config and weights
    contradict each other in, None where they do not.
    """

    def __init__(self, message: str, *, hint: str | None = None, problem: Problem | None = None) -> None:
        super().__init__(message, hint=hint)
        self.problem = problem


class OutputExists(PlanError):
    """The output exists already, or another run is writing it."""


class ExecutionError(LoraToolError):
    """Writing failed; nothing was left under the final name."""


class OutOfSpace(ExecutionError):
    """The disk is too small for the output."""


class SourceChanged(ExecutionError):
    """An input file changed between planning and reading."""


class VerificationFailed(LoraToolError):
    """The written output is wrong. A command deletes it; a push leaves it on the Hub."""


class FindingsFound(LoraToolError):
    """Findings at or above the level that was asked for; `report` is the report that holds them, None without one."""

    def __init__(self, message: str, *, hint: str | None = None, report: Any = None) -> None:  # noqa: ANN401 - a `Report`
        super().__init__(message, hint=hint)
        self.report = report


class BrokenPlugin(LoraToolError):
    """What another distribution adds does not load; the message names the distribution."""


class HubError(LoraToolError):
    """The Hub did not do what was asked. The message never holds a token or a signed URL."""


class HubRefused(HubError):
    """The token has no permission, the repository or file does not exist, or the Hub does not accept what was sent."""


class HubConflict(HubError):
    """The repository's state conflicts with the push: somebody else's commit, a tag, another kind of model."""


class HubUnreachable(HubError):
    """Network, overload or rate limit. It may be unknown whether the request was carried out; a retry may succeed."""


class ServerError(LoraToolError):
    """An inference server refused a request, or its answer is unusable. The message never holds the key."""


class ServerUnreachable(ServerError):
    """The server did not answer in time, or is overloaded; a retry may succeed."""


class WrongValue(LoraToolError, ValueError):
    """An argument has a value that is not allowed; the message names it and those that are."""


class UnknownRule(WrongValue):
    """A rule code, or the beginning of codes, that matches no rule; the message names the closest."""


class WrongCall(LoraToolError, TypeError):
    """A function has no such argument, or lacks one; the message names the function and the closest argument."""


_NEED_PYTHON_3_11 = ("merge", "train", "all")
"""Extras with transformers 5.23. The rest of lora-tool runs on 3.10."""


def _installed_from(extra: str) -> str:
    """Return what pip is given for lora-tool with the `extra`: a clone is no package of the index."""
    import json  # all of these only where something is missing
    import shlex
    from importlib.metadata import PackageNotFoundError, distribution
    from urllib.parse import unquote

    try:
        origin = json.loads(distribution("lora-tool").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        origin = {}
    url = str(origin.get("url", ""))
    if url.startswith("file://"):
        clone = Path(unquote(url.removeprefix("file://")))
        if not clone.exists():
            return f"'.[{extra}]', in a clone of lora-tool: {clone} is gone"
        editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
        return editable + shlex.quote(f"{clone}[{extra}]")
    return f"'lora-tool[{extra}]'" if not url else f"'lora-tool[{extra}] @ git+{url}'"


class MissingDependency(LoraToolError):
    """An optional dependency is not installed."""

    def __init__(self, package: str, *, extra: str) -> None:
        command = f"pip install {_installed_from(extra)}"
        too_old = extra in _NEED_PYTHON_3_11 and sys.version_info < (3, 11)
        hint = f"install Python 3.11 or newer, which transformers needs, then: {command}" if too_old else command
        super().__init__(f"{package} is not installed", hint=hint)
        self.package = package
        self.extra = extra


def require_packages(packages: Iterable[str], *, extra: str) -> None:
    """Return if all the packages of the `extra` are installed. Raises `MissingDependency` naming one that is not."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingDependency(package, extra=extra)
