"""Comparing what the Hub holds after a push with what was to be pushed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import HfApi

from lora_tool.errors import VerificationFailed
from lora_tool.hub.hashing import content_sha256, git_oid_of
from lora_tool.hub.model import FileChange, PushFile, PushPlan, RemoteFile

_CHUNK = 1 << 20


def mismatches(plan: PushPlan, tree: Mapping[str, RemoteFile]) -> list[str]:
    """Return what in a commit's tree is not as the plan wants it, one sentence per file; none means it is all there.

    Files outside of git are compared by sha256, those inside by git's own hash of the whole content: the Hub lists
    one for each. Both are computed from the files here.
    """
    return [found for file in plan.files if (found := _mismatch(file, tree.get(file.name))) is not None]


def check_tree(plan: PushPlan, tree: Mapping[str, RemoteFile], commit: str) -> None:
    """Return if the commit holds every file of the plan. Raises `VerificationFailed` naming the first that differs."""
    found = mismatches(plan, tree)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise VerificationFailed(
            f"{plan.remote.repo} at {commit[:12]}: {found[0]}{more}", hint="push again: what differs is sent again"
        )


def check_download(api: HfApi, plan: PushPlan, commit: str, folder: Path) -> None:
    """Return if every file reads back with the sha256 it has here. Raises `VerificationFailed`.

    Files are downloaded to `folder` one by one, which needs room for the largest.
    """
    for file in plan.files:
        if file.content is None:
            continue
        expected = file.sha256 or content_sha256(file.content)
        path = Path(api.hf_hub_download(plan.remote.repo, file.name, revision=commit, local_dir=folder))
        found = _sha256(path)
        path.unlink()
        if found != expected:
            raise VerificationFailed(
                f"{plan.remote.repo} at {commit[:12]}: {file.name} reads back with sha256 {found[:16]}…, "
                f"expected {expected[:16]}…",
                hint="push again; if it stays so, report it to the Hub with the commit",
            )


def _mismatch(file: PushFile, there: RemoteFile | None) -> str | None:
    if file.change is FileChange.REMOVE or file.content is None:
        return None if there is None else f"{file.name} is still there"
    if there is None:
        return f"{file.name} is missing"
    if there.size != file.size:
        return f"{file.name} has {there.size:,} bytes, expected {file.size:,}"
    if there.sha256 is not None:
        expected, found = file.sha256 or content_sha256(file.content), there.sha256
    else:
        expected, found = git_oid_of(file.content), there.oid
    return None if found == expected else f"{file.name} has hash {found[:16]}…, expected {expected[:16]}…"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
