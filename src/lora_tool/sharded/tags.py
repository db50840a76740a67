"""Choosing one of the saved steps in a checkpoint."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator
from pathlib import Path

from lora_tool.checkpoint import ShardedDir
from lora_tool.errors import NotACheckpoint
from lora_tool.progress import decided
from lora_tool.report import Finding, Severity
from lora_tool.sharded.faults import fault

_TAG = re.compile(r"(?:global_step_?|iter_)(\d+)(?:/.+)?\Z")


def choose_tag(
    checkpoint: ShardedDir, tag: str | None, *, or_newest: bool, pointer: str = "latest", called: str = "tags"
) -> str:
    """Return the requested tag, else the one that the file `pointer` names, else the only one.

    For verl it is the actor's, if there is one. Where nothing chooses one, `or_newest` takes the newest. `called` is
    the framework's word for tags. Raises `NotACheckpoint` where there is no such tag, or no way to choose.
    """
    tags = tuple(checkpoint.rank_files)
    trained = [name for name in tags if not is_critic(name)] or list(tags)
    wanted = tag or checkpoint.latest or (trained[0] if len(trained) == 1 else None)
    # verl's are roles in steps, and those of its Megatron engine folders in them; the actor's come first
    inside = next((name for name in tags if name == wanted or name.startswith(f"{wanted}/")), None)
    if inside is not None:
        why = "as requested" if tag else f"as `{pointer}` says" if checkpoint.latest else "the only one"
        decided(f"tag: {inside}, {why}")
        return inside
    if or_newest:
        return trained[-1]
    require_tag_here(checkpoint, tag)
    listed = ", ".join(tags)
    if wanted is None:
        message = f"{checkpoint.root} has several {called} and no file `{pointer}`: {listed}"
        raise NotACheckpoint(message, hint="choose: `tag=T`")
    says = "" if tag else f"`{pointer}` names "
    message = f"{checkpoint.root}: {says}{wanted}, which does not exist; the folder has: {listed}"
    raise NotACheckpoint(message, hint=f'`tag="{trained[-1]}"`')


def is_critic(tag: str) -> bool:
    """Return whether a tag is that of verl's critic, a value model beside the one that is trained to answer."""
    return "critic" in tag.split("/")


def require_tag_here(checkpoint: ShardedDir, tag: str | None) -> None:
    """Raise `NotACheckpoint` if the folder is itself the only saved step and `tag` names another."""
    if tag not in (None, ".") and tuple(checkpoint.rank_files) == (".",):
        raise NotACheckpoint(
            f"{checkpoint.root}: the tag {tag} was requested, but the folder is one step of {checkpoint.kind.with_article}"
        )


def stale_latest(
    root: Path, latest: str | None, tags: Collection[str], *, pointer: str | None = "latest"
) -> Iterator[Finding]:
    """LT409: yield a finding if the file `pointer`, which says `latest`, does not name the newest tag that is there.

    `pointer` is None for programs that write no such file.
    """
    steps = {name: int(match[1]) for name in tags if (match := _TAG.match(name))}
    newest = max(steps, key=steps.__getitem__, default=None)
    choose = f"lora-tool consolidate {shlex.quote(str(root))} --tag"
    if latest is None and len(tags) > 1:
        several = f"several tags and no file `{pointer}`" if pointer else "several steps"
        message = f"the folder has {several}: {', '.join(tags)}"
        yield fault("LT409", root, message, hint=f"choose one: {choose} T", severity=Severity.WARNING)
    elif latest is not None and latest not in tags:
        named = f"names {latest}, which does not exist" if latest else "is empty"
        message = f"`{pointer}` {named}; the folder has: {', '.join(tags)}"
        yield fault("LT409", root, message, hint=f"copy that tag too, or choose one that exists: {choose} T")
    elif latest in steps and newest is not None and steps[newest] > steps[latest]:
        message = f"`{pointer}` names {latest}, but {newest} is newer: the save of {newest} may have been interrupted, or `{pointer}` restored"
        yield fault("LT409", root, message, hint=f"to use {newest}: {choose} {newest}", severity=Severity.WARNING)
