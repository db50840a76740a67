"""Comparing what the Hub holds after a push with what was to be pushed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import sha_fileobj

from lora_tool.errors import VerificationFailed
from lora_tool.hub.hashing import content_sha256, hashes_of
from lora_tool.hub.model import FileChange, PushFile, PushPlan


def mismatches(plan: PushPlan, tree: Mapping[str, RepoFile]) -> list[str]:
    """Return what in a commit's tree is not as the plan wants it, one sentence per file; none means it is all there."""
    return [found for file in plan.files if (found := _mismatch(file, tree.get(file.name))) is not None]


def check_tree(plan: PushPlan, tree: Mapping[str, RepoFile], commit: str) -> None:
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
        with path.open("rb") as read_back:
            found = sha_fileobj(read_back).hex()
        path.unlink()
        if found != expected:
            raise VerificationFailed(
                f"{plan.remote.repo} at {commit[:12]}: {file.name} reads back with sha256 {found[:16]}…, "
                f"expected {expected[:16]}…",
                hint="push again; if it stays so, report it to the Hub with the commit",
            )


def _mismatch(file: PushFile, there: RepoFile | None) -> str | None:
    if file.change is FileChange.REMOVE or file.content is None:
        return None if there is None else f"{file.name} is still there"
    if there is None:
        return f"{file.name} is missing"
    if there.size != file.size:
        return f"{file.name} has {there.size:,} bytes, expected {file.size:,}"
    expected, found = hashes_of(file.content, there, file.sha256)
    return None if found == expected else f"{file.name} has hash {found[:16]}…, expected {expected[:16]}…"
