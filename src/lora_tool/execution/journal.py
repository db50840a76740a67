"""Which files of an unfinished folder are finished, so that `--resume` or another machine can continue the work.

A folder inside the unfinished one, with one small file for each finished weights file: two machines never write to the
same file. A weights file counts as finished if its record is whole, the plan is the same, and the file is as it was:
size, header, time of its last write, and samples of its bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from lora_tool.core.errors import MissingDependency
from lora_tool.core.progress import Progress
from lora_tool.core.report import Finding, Severity
from lora_tool.core.version import __version__
from lora_tool.execution.backends.choosing import formula_of
from lora_tool.formats.files import read_at
from lora_tool.plans.core.delta_retention import DeltaRetention
from lora_tool.plans.core.plan import Plan, leftover_json, step_json
from lora_tool.plans.core.steps import Shard
from lora_tool.rules.training.value_check import ValuePart

NAME = ".lora-tool-journal"
SIGN = ".at-work"
"""How the name of a sign of life ends: see `at_work`."""
_MARK = "plan"
_RECORD = ".json"
_LOOK = "values-{}.look"
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 14


def digest_of(plan: Plan) -> str:
    """Return a sha256 that is the same for plans that write the same bytes from the same files, on whatever machine.

    Inodes are left out: another machine's mount may number the same files differently. Raises `MissingDependency` where
    the plan computes with torch, and there is none.
    """
    written = json.JSONEncoder(sort_keys=True, default=str).encode
    digest = hashlib.sha256()
    for part in _parts_of(plan):  # all of them at once would be megabytes of small objects
        digest.update(written(part).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _parts_of(plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield what decides about the bytes that a plan writes, as JSON data."""
    yield {
        "written": [plan.precision, plan.findings, plan.warnings],
        "side_files": [(file.filename, file.source, file.reason) for file in plan.side_files],
        "manifest": dict(plan.manifest),
        "inputs": [(stamp.path, stamp.size, stamp.mtime_ns) for stamp in plan.inputs],
        "versions": [__version__, *versions_of(plan).values()],
        "arithmetic": formula_of(plan),
    }
    for shard in plan.shards:
        yield {"filename": shard.filename, "steps": len(shard.steps)}
        for step in shard.steps:
            yield step_json(step, plan.input_names)
    yield from map(leftover_json, plan.leftovers)


def versions_of(plan: Plan) -> dict[str, str]:
    """Return the versions of the packages that compute; importing them is slow, and a plan of copies needs none.

    Raises `MissingDependency`.
    """
    found = {}
    for package in plan.precision.packages if not plan.only_copies else ():
        try:
            found[package] = str(__import__(package).__version__)
        except ImportError as error:
            raise MissingDependency(package, extra="merge") from error
    return found


class Journal:
    """The record of one unfinished folder that is written from the plan of this `digest`."""

    def __init__(self, folder: Path, digest: str) -> None:
        self.folder = folder
        self.path = folder / NAME
        self.digest = digest

    def make(self) -> None:
        """Make the journal's folder, or go on with the one that is there, of whatever plan."""
        self.path.mkdir(exist_ok=True)

    def begin(self) -> None:
        """Make the journal, or go on with the one that is there: from now on it is this plan's."""
        self.make()
        if self.plan_begun != self.digest:
            self.note(_MARK, self.digest)

    @property
    def mark(self) -> Path:
        """The file that says from which plan the folder is written."""
        return self.path / _MARK

    @property
    def plan_begun(self) -> str | None:
        """The digest of the plan that the folder was begun from, None where no plan was."""
        found = _json_in(self.mark)
        return found if isinstance(found, str) else None

    def finished(self, shards: Iterable[Shard]) -> dict[str, dict[str, DeltaRetention]]:
        """Return the names of those files of this plan that are finished, with what `record` has of each."""
        return {shard.filename: found for shard in shards if (found := self.record(shard)) is not None}

    def record(self, shard: Shard) -> dict[str, DeltaRetention] | None:
        """Return how much of each change in the shard survived rounding, by tensor; None where it is not finished."""
        found = self.noted(f"{shard.filename}{_RECORD}")
        if found.get("plan") != self.digest or found.get("state") != _state(self.folder / shard.filename, shard):
            return None
        return {name: DeltaRetention(**each) for name, each in found["notes"].items()}

    def has_record(self, shard: Shard) -> bool:
        """Return whether the shard was finished from this plan. Only `record` checks that its file is unchanged."""
        return self.noted(f"{shard.filename}{_RECORD}").get("plan") == self.digest

    def keep_only(self, finished: Iterable[str]) -> None:
        """Remove all from the folder but these files, their records, findings on the inputs, and signs of processes at work."""
        kept = {NAME, _MARK}
        for name in finished:
            kept |= {name, f"{name}{_RECORD}"}
        for path in [*self.folder.iterdir(), *self.path.iterdir()]:
            if path.name not in kept and not path.match(_LOOK.format("*")) and path.suffix != SIGN:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def add(self, shard: Shard, retained: Mapping[str, DeltaRetention]) -> None:
        """Record that the shard's file is on the disk, and how much of each change survived rounding, by tensor."""
        state, notes = _state(self.folder / shard.filename, shard), {name: asdict(retained[name]) for name in retained}
        self.note(f"{shard.filename}{_RECORD}", {"plan": self.digest, "state": state, "notes": notes})

    def note(self, name: str, content: Any) -> None:  # noqa: ANN401 - anything that JSON holds
        """Write the file `name` of the journal whole, or leave the one that is there."""
        # not flushed to the disk: a record that the machine loses with its power costs a file that is written again
        partial = self.path / f"{name}.{uuid.uuid4().hex}"
        partial.write_text(json.dumps(content), encoding="utf-8")
        partial.replace(self.path / name)

    def noted(self, name: str) -> Mapping[str, Any]:
        """Return the content of the journal's file `name`: empty where it is missing or incomplete."""
        found = _json_in(self.path / name)
        return found if isinstance(found, dict) else {}

    def remove(self) -> None:
        """Take the journal out of the folder, which is about to be finished."""
        shutil.rmtree(self.path, ignore_errors=True)


def _json_in(path: Path) -> Any:  # noqa: ANN401 - anything that JSON holds
    """Return the file's JSON, None where it is missing or incomplete."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _state(path: Path, shard: Shard) -> list[Any] | None:
    """Return the file's stat values; None where it is missing or has another header."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        stat = os.fstat(descriptor)
        header = shard.header
        if stat.st_size != len(header) + shard.data_bytes or read_at(path, descriptor, 0, len(header)) != header:
            return None
        sampled = hashlib.sha256()
        last = max(0, stat.st_size - _SAMPLE_BYTES)
        for number in range(_SAMPLES):
            sampled.update(read_at(path, descriptor, last * number // (_SAMPLES - 1), _SAMPLE_BYTES))
        return [stat.st_size, stat.st_mtime_ns, sampled.hexdigest()]
    finally:
        os.close(descriptor)


# Looks at the values of a plan's inputs, each taken once for one folder, whoever writes into it.


class RecordedLook(Struct, frozen=True, kw_only=True):
    """A part of the check of values that is taken once, and recorded: a `ValuePart` itself."""

    look: ValuePart
    number: int
    folder: Path
    digest: str

    @property
    def name(self) -> str:
        return self.look.name

    @property
    def nbytes(self) -> int:
        return self.look.nbytes

    def run(self, advance: Progress) -> list[Finding]:
        """Return the findings of this part: recorded ones, or by running it."""
        journal, name = Journal(self.folder, self.digest), _LOOK.format(self.number)
        recorded = journal.noted(name)
        if recorded.get("plan") == self.digest:
            advance(self.nbytes)
            return [Finding(**{**each, "severity": Severity(each["severity"])}) for each in recorded["findings"]]
        findings = self.look.run(advance)
        journal.note(name, {"plan": self.digest, "findings": [asdict(each) for each in findings]})
        return findings


def recorded_looks(plan: Plan, journal: Journal) -> tuple[RecordedLook, ...]:
    """Return the parts of the check of the plan's values, each of which runs once for the journal's folder."""
    if plan.values is None:
        return ()
    return tuple(
        RecordedLook(look=look, number=number, folder=journal.folder, digest=journal.digest)
        for number, look in enumerate(plan.values.parts)
    )
