"""Choosing one of the saved steps in a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lora_tool.checkpoints import ShardedDir
from lora_tool.core.errors import NotACheckpoint
from lora_tool.core.progress import decided

_MODEL = re.compile(r"pytorch_model(?:_\d{1,3})?\Z")
"""The tags that accelerate's `save_state` gives the models of one step."""


def choose_tag(
    checkpoint: ShardedDir, tag: str | None, *, or_newest: bool, pointer: str = "latest", called: str = "tags"
) -> str:
    """Return the requested tag, else the one that the file `pointer` names, else the only one.

    For verl it is the actor's, if there is one. Where nothing chooses one, `or_newest` takes the newest. `called` is
    the framework's word for tags. Raises `NotACheckpoint` where there is no such tag, or no way to choose.
    """
    tags = tuple(checkpoint.rank_files)
    models = tuple(filter(_MODEL.match, tags))
    if tag is None and not or_newest and len(models) > 1:  # `latest` names the one that was saved last
        return choose_model(checkpoint, models, None)
    trained = [name for name in tags if not is_critic(name)] or list(tags)
    wanted = tag or checkpoint.latest or (trained[0] if len(trained) == 1 else None)
    # verl's are roles in steps, or folders in these roles; the actor's come first
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


def choose_model(checkpoint: ShardedDir, models: Sequence[str], tag: str | None) -> str:
    """Return which of the models of one save is wanted: the requested one, else the only one.

    `models` are the names of their files, without numbers of ranks and endings. Raises `NotACheckpoint` where there is
    no such model, or no way to choose.
    """
    wanted = None if tag in (None, ".") else str(tag).removesuffix(".safetensors").removesuffix(".bin")
    if wanted in models:
        return str(wanted)
    if len(models) > 1:
        raise NotACheckpoint(
            f"{checkpoint.root} holds the states of {len(models)} models: {', '.join(models)}",
            hint=f'choose: `tag="{models[-1]}"`',
        )
    require_tag_here(checkpoint, tag)
    return models[0]


def require_tag_here(checkpoint: ShardedDir, tag: str | None) -> None:
    """Raise `NotACheckpoint` if the folder is itself the only saved step and `tag` names another."""
    if tag not in (None, ".") and tuple(checkpoint.rank_files) == (".",):
        raise NotACheckpoint(
            f"{checkpoint.root}: the tag {tag} was requested, but the folder is one step of {checkpoint.kind.with_article}"
        )
