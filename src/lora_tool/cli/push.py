"""`lora-tool push`: a folder → one commit on the Hugging Face Hub."""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from lora_tool.cli.configuration import Configured, configured, rule_choice
from lora_tool.cli.exit_codes import INTERRUPTED
from lora_tool.cli.options import FolderOrId, config_option, json_option, options_of, quiet_option, typed_as
from lora_tool.cli.terminal import progress_bar, warn
from lora_tool.core.hub_names import FORMS, hub_name, require_ref_name
from lora_tool.hub.options import MAIN
from lora_tool.workflows.caller import Caller
from lora_tool.workflows.push import PublishOptions, push
from lora_tool.workflows.written import loading

if TYPE_CHECKING:
    from lora_tool.hub.model import Pushed, PushPlan

Repository = TypeVar("Repository", str, None)
_LONGEST_NAME = 96


def repository(value: str) -> tuple[str, str | None]:
    """Return repository and revision of `owner/name`, `name`, `hf://owner/name@revision`, or the address of a page."""
    named = hub_name(value)
    repo = named.id if named is not None else ""
    parts = repo.split("/")
    if named is None or len(repo) > _LONGEST_NAME or any("--" in part or ".." in part for part in parts):
        raise click.BadParameter(f"{value!r} is not a repository; expected {FORMS}")
    if any(part.endswith((".", "-", ".git")) for part in parts):
        raise click.BadParameter(f"{value!r}: a repository's name must end in a letter or digit, and not in .git")
    return repo, named.revision


def pushed_to(repo: tuple[Repository, str | None], option: str, revision: str | None) -> tuple[Repository, str | None]:
    """Return repository and branch of `repo`, which `option` gave, and ``--revision``. Raises `click.UsageError`, `WrongValue`."""
    name, branch = repo
    if branch and revision not in (None, branch):
        raise click.UsageError(f"{option} names the branch {branch}, but --revision names {revision}")
    branch = revision or branch
    if branch is not None:
        require_ref_name(branch, "revision")
    return name, branch


@click.command("push", cls=Configured, epilog="Example: lora-tool push my-reward-model/ me/my-reward-model --dry-run")
@click.argument("folder", type=FolderOrId())
@click.argument("repo", type=repository)
@options_of(PublishOptions)
@click.option("--dry-run", is_flag=True, help="Print the plan and create nothing.")
@config_option
@json_option
@quiet_option("No progress bar and no summary.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    folder: str,
    repo: tuple[str, str | None],
    *,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    **typed: Any,
) -> None:
    """Publish FOLDER, an adapter or a model, as REPO on the Hugging Face Hub: validated first, in one commit.

    FOLDER may itself be on the Hub. REPO is owner/name[@branch], hf://owner/name or the URL of its page. Only the files of the adapter or model are
    pushed. Your README is kept, completed with the metadata that the Hub needs. Pushing the same content again makes no
    commit. The token comes from `hf auth login`, HF_TOKEN, or OIDC in CI. Options can be set in the [push] table of
    lora-tool.toml.
    """
    name, branch = pushed_to(repo, "REPO", typed["revision"])
    rules = rule_choice(ctx, configured(ctx))
    options = typed_as(PublishOptions, typed, revision=branch, **rules.arguments())
    show = sys.stderr.isatty() and not (quiet or as_json)

    def planned(plan: PushPlan) -> None:
        for warning in plan.warnings:
            warn(warning)
        if not (dry_run or quiet or as_json):
            click.echo(str(plan), err=True)

    caller = Caller(dry_run=dry_run, progress=partial(progress_bar, quiet=not show))
    try:
        published = push(folder, name, options, caller, planned=planned, bars=show)
    except KeyboardInterrupt:
        _leave_at_once()
    if published.done is None:
        click.echo(json.dumps(published.plan.to_json(), indent=2) if as_json else str(published.plan))
    elif as_json:
        click.echo(json.dumps(_json(published.plan, published.done), indent=2))
    elif not quiet:
        click.echo(str(published.done))
        if published.plan.remote.revision == MAIN and not published.plan.create_pr:
            pushed = published.done.repo
            step = loading(pushed, published.plan.folder) or f"lora-tool merge {shlex.quote(pushed)}"
            click.echo(f"next: {step}")


def _json(plan: PushPlan, done: Pushed) -> dict[str, Any]:
    """Return the plan and what came of it, as one table."""
    return {**plan.to_json(), **done.to_json(), "notes": [*plan.notes, *done.notes]}


def _leave_at_once() -> NoReturn:
    """Raise KeyboardInterrupt, or exit here: upload threads that wait for a socket would keep the process for minutes."""
    click.echo(
        "the repository has either the whole commit or none of it; run the same command again to continue", err=True
    )
    waiting = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if any(thread.name.startswith(("lora-tool push", "ThreadPoolExecutor")) for thread in waiting):
        click.echo("interrupted", err=True)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED)
    raise KeyboardInterrupt
