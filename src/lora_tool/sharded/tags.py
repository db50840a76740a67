"""Which of the saved steps in a checkpoint is meant."""

from __future__ import annotations

from lora_tool.checkpoint import ShardedDir
from lora_tool.errors import NotACheckpoint
from lora_tool.progress import decided


def choose_tag(
    checkpoint: ShardedDir, tag: str | None, *, or_newest: bool, pointer: str = "latest", called: str = "tags"
) -> str:
    """Return the tag that was asked for, else the one that the file `pointer` names, else the only one.

    Of verl's it is the actor's, as long as there is one. Where nothing says which, `or_newest` takes the newest. `called`
    is the framework's word for them. Raises `NotACheckpoint` where there is no such tag, or no way to choose.
    """
    tags = tuple(checkpoint.rank_files)
    trained = [name for name in tags if not name.endswith("critic")] or list(tags)
    wanted = tag or checkpoint.latest or (trained[0] if len(trained) == 1 else None)
    for name in (wanted, f"{wanted}/actor"):
        if name in tags:
            why = "which was asked for" if tag else f"as `{pointer}` says" if checkpoint.latest else "the only one"
            decided(f"tag: {name}, {why}")
            return str(name)
    if or_newest:
        return trained[-1]
    require_tag_here(checkpoint, tag)
    listed = ", ".join(tags)
    if wanted is None:
        message = f"{checkpoint.root} has several {called} and no file `{pointer}`: {listed}"
        raise NotACheckpoint(message, hint="choose: `tag=T`")
    says = "" if tag else f"`{pointer}` names "
    message = f"{checkpoint.root}: {says}{wanted}, which is not there; there is: {listed}"
    raise NotACheckpoint(message, hint=f'`tag="{trained[-1]}"`')


def require_tag_here(checkpoint: ShardedDir, tag: str | None) -> None:
    """Return unless the folder is itself the one save that it holds, and `tag` is another."""
    if tag not in (None, ".") and tuple(checkpoint.rank_files) == (".",):
        raise NotACheckpoint(
            f"{checkpoint.root}: there is no tag {tag}: it is one step of {checkpoint.kind.with_article}"
        )
