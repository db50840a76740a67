"""The words of a push, as frozen data: which files go where, what stays behind and why."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.hf_api import RepoFile
from msgspec import Struct, field

from lora_tool.core.choices import TextEnum
from lora_tool.core.display import printable, size
from lora_tool.core.records import Shown
from lora_tool.core.tensors import FileStamp
from lora_tool.hub.options import MAIN, PushCheck


@enum.unique
class UploadAction(TextEnum):
    """What a push does to one file of the repository."""

    ADD = "add"
    UPDATE = "update"
    SAME = "same"
    REMOVE = "remove"


class PushContent(Struct, frozen=True, kw_only=True):
    """The bytes of one file to push: a local file as it was when planning, or bytes made for the push."""

    name: str
    """Path in the repository, with `/`."""
    source: Path | None = None
    stamp: FileStamp | None = None
    data: bytes | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.source is None) == (self.data is None) or (self.source is None) != (self.stamp is None):
            raise ValueError(f"{self.name}: either a stamped file or bytes")

    def __repr__(self) -> str:
        return f"PushContent({self.name!r}: {self.size} bytes)"

    @property
    def size(self) -> int:
        return self.stamp.size if self.stamp is not None else len(self.data or b"")


class PushFile(Struct, frozen=True, kw_only=True):
    """One file of the plan. `content` is None where it is removed."""

    name: str
    change: UploadAction
    size: int
    reason: str = ""
    content: PushContent | None = None
    sha256: str | None = None
    """Of the content, where planning had to read it."""


class LeftOut(Struct, frozen=True, kw_only=True):
    """A file or folder that is not pushed, and why."""

    name: str
    reason: str


class Remote(Struct, frozen=True, kw_only=True):
    """A repository as it was read. `head` is None where the repository does not exist, or cannot be seen."""

    repo: str
    revision: str = MAIN
    head: str | None = None
    private: bool | None = None
    branch_exists: bool = True
    files: Mapping[str, RepoFile] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    readme: bytes | None = None

    @property
    def exists(self) -> bool:
        return self.head is not None


class PushPlan(Shown, Struct, frozen=True, kw_only=True):
    """Everything that a push will do. Making the plan changes nothing, here or on the Hub."""

    folder: Path
    kind: str
    remote: Remote
    private: bool | None
    """Visibility of the repository that will be created; None where it exists."""
    files: tuple[PushFile, ...]
    left_out: tuple[LeftOut, ...]
    message: str
    create_pr: bool = False
    tag: str | None = None
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def changes(self) -> tuple[PushFile, ...]:
        return tuple(file for file in self.files if file.change is not UploadAction.SAME)

    @property
    def sent_bytes(self) -> int:
        """Bytes of the files that are new or changed; storage may already have parts of them."""
        return sum(file.size for file in self.changes if file.change is not UploadAction.REMOVE)

    def __str__(self) -> str:
        """Return the plan: what happens to which file, what stays behind and why, how much is sent."""
        where = f"{self.remote.repo}" + (f" ({self.remote.revision})" if self.remote.revision != "main" else "")
        lines = [printable(note) for note in self.notes]
        act = "pull request" if self.create_pr else "commit"
        lines.append(f"{self.kind} {printable(str(self.folder))} to {where}, as one {act}: {printable(self.message)}")
        lines += [
            f"  {file.change.value:<7} {printable(file.name)}  {size(file.size)}"
            + (f"  ({printable(file.reason)})" if file.reason else "")
            for file in self.files
        ]
        lines += [f"  not pushed: {printable(item.name)}: {printable(item.reason)}" for item in self.left_out]
        counts = {change: sum(file.change is change for file in self.files) for change in UploadAction}
        summary = ", ".join(f"{count} {change}" for change, count in counts.items() if count)
        lines.append(
            f"{summary}; {size(self.sent_bytes)} to send"
            if self.changes
            else "nothing to change, so no commit will be made"
        )
        if self.tag:
            lines.append(f"tag {printable(self.tag)} on it")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the whole plan as JSON data."""
        return {
            "schema_version": 1,
            "folder": str(self.folder),
            "kind": self.kind,
            "repo": self.remote.repo,
            "revision": self.remote.revision,
            "parent_commit": self.remote.head,
            "create_repo": not self.remote.exists,
            "private": self.private if not self.remote.exists else self.remote.private,
            "create_pr": self.create_pr,
            "tag": self.tag,
            "message": self.message,
            "bytes_to_send": self.sent_bytes,
            "files": [_file_json(file) for file in self.files],
            "left_out": [{"name": item.name, "reason": item.reason} for item in self.left_out],
            "notes": list(self.notes),
            "warnings": list(self.warnings),
        }


class Pushed(Shown, Struct, frozen=True, kw_only=True):
    """The result of a push. `changed` is False if the repository already held this content."""

    repo: str
    url: str
    commit: str
    changed: bool
    files: tuple[PushFile, ...]
    """Those of the plan, each with its sha256."""
    created: bool = False
    pull_request: str | None = None
    tag: str | None = None
    check: PushCheck = PushCheck.TREE
    notes: tuple[str, ...] = ()

    @property
    def checked(self) -> int:
        return sum(file.change is not UploadAction.REMOVE for file in self.files)

    def __str__(self) -> str:
        """Return what a push did, in a few lines."""
        if not self.changed:
            lines = [f"{self.repo} already holds this content, so no commit was made ({self.commit[:12]})"]
        else:
            lines = [f"pushed to {self.url}", f"commit {self.commit}"]
        if self.pull_request:
            lines.append(f"pull request {self.pull_request}")
        if self.tag:
            lines.append(f"tagged {self.tag}")
        how = "read back and compared" if self.check.value == "download" else "compared with the Hub's hashes"
        lines.append(f"{self.checked} files {how}: all match the local files")
        return "\n".join(printable(line) for line in (*self.notes, *lines))

    def to_json(self) -> dict[str, Any]:
        """Return what came of the push as JSON data."""
        return {
            "schema_version": 1,
            "repo": self.repo,
            "commit": self.commit,
            "url": self.url,
            "changed": self.changed,
            "created_repo": self.created,
            "pull_request": self.pull_request,
            "tagged": self.tag,
            "verified": {"how": self.check.value, "files": self.checked},
            "files": [_file_json(file) for file in self.files],
            "notes": list(self.notes),
        }


def _file_json(file: PushFile) -> dict[str, Any]:
    return {
        "name": file.name,
        "change": file.change.value,
        "bytes": file.size,
        "sha256": file.sha256,
        "reason": file.reason,
    }
