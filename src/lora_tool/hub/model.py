"""The words of a push, as frozen data: which files go where, what stays behind and why."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.hf_api import RepoFile
from msgspec import Struct, field
from msgspec.structs import replace

from lora_tool.core.choices import TextEnum
from lora_tool.core.display import printable, size
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


class PushPlan(Struct, frozen=True, kw_only=True):
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


class Pushed(Struct, frozen=True, kw_only=True):
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


# A push's plan and result as text for people and as JSON for programs.


_SCHEMA_VERSION = 1


def plan_text(plan: PushPlan) -> str:
    """Return the plan: what happens to which file, what stays behind and why, how much is sent."""
    where = f"{plan.remote.repo}" + (f" ({plan.remote.revision})" if plan.remote.revision != "main" else "")
    lines = [printable(note) for note in plan.notes]
    act = "pull request" if plan.create_pr else "commit"
    lines.append(f"{plan.kind} {printable(str(plan.folder))} to {where}, as one {act}: {printable(plan.message)}")
    lines += [
        f"  {file.change.value:<7} {printable(file.name)}  {size(file.size)}"
        + (f"  ({printable(file.reason)})" if file.reason else "")
        for file in plan.files
    ]
    lines += [f"  not pushed: {printable(item.name)}: {printable(item.reason)}" for item in plan.left_out]
    counts = {change: sum(file.change is change for file in plan.files) for change in UploadAction}
    summary = ", ".join(f"{count} {change}" for change, count in counts.items() if count)
    lines.append(
        f"{summary}; {size(plan.sent_bytes)} to send"
        if plan.changes
        else "nothing to change, so no commit will be made"
    )
    if plan.tag:
        lines.append(f"tag {printable(plan.tag)} on it")
    return "\n".join(lines)


def plan_json(plan: PushPlan) -> dict[str, Any]:
    """Return the whole plan as JSON data."""
    return {
        "schema_version": _SCHEMA_VERSION,
        "folder": str(plan.folder),
        "kind": plan.kind,
        "repo": plan.remote.repo,
        "revision": plan.remote.revision,
        "parent_commit": plan.remote.head,
        "create_repo": not plan.remote.exists,
        "private": plan.private if not plan.remote.exists else plan.remote.private,
        "create_pr": plan.create_pr,
        "tag": plan.tag,
        "message": plan.message,
        "bytes_to_send": plan.sent_bytes,
        "files": [
            {
                "name": file.name,
                "change": file.change.value,
                "bytes": file.size,
                "sha256": file.sha256,
                "reason": file.reason,
            }
            for file in plan.files
        ],
        "left_out": [{"name": item.name, "reason": item.reason} for item in plan.left_out],
        "notes": list(plan.notes),
        "warnings": list(plan.warnings),
    }


def pushed_text(done: Pushed) -> str:
    """Return what a push did, in a few lines."""
    if not done.changed:
        lines = [f"{done.repo} already holds this content, so no commit was made ({done.commit[:12]})"]
    else:
        lines = [f"pushed to {done.url}", f"commit {done.commit}"]
    if done.pull_request:
        lines.append(f"pull request {done.pull_request}")
    if done.tag:
        lines.append(f"tagged {done.tag}")
    how = "read back and compared" if done.check.value == "download" else "compared with the Hub's hashes"
    lines.append(f"{done.checked} files {how}: all match the local files")
    return "\n".join(printable(line) for line in (*done.notes, *lines))


def pushed_json(plan: PushPlan, done: Pushed) -> dict[str, Any]:
    """Return the plan and what came of it as JSON data."""
    return {
        **plan_json(replace(plan, files=done.files)),
        "commit": done.commit,
        "url": done.url,
        "changed": done.changed,
        "created_repo": done.created,
        "pull_request": done.pull_request,
        "tagged": done.tag,
        "verified": {"how": done.check.value, "files": done.checked},
        "notes": [*plan.notes, *done.notes],
    }
