"""A push's plan and result as text for people and as JSON for programs."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from lora_tool.core.display import printable, size
from lora_tool.hub.model import Pushed, PushPlan, UploadAction

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
