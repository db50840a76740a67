"""`lora-tool push`: a folder → one commit on the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from lora_tool.cli.command_table import Configured, configured
from lora_tool.cli.configuration import rule_choice
from lora_tool.cli.exit_codes import INTERRUPTED
from lora_tool.cli.options import (
    UserPath,
    config_option,
    fail_on_option,
    ignore_option,
    in_order,
    json_option,
    quiet_option,
)
from lora_tool.cli.terminal import progress_bar, warn
from lora_tool.hub_names import FORMS, hub_name, require_ref_name

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


repository_options = in_order(
    click.option(
        "--private/--public",
        default=None,
        help="Visibility of a repository that push creates.  [default: private; an existing one stays as it is]",
    ),
    click.option(
        "--revision",
        metavar="BRANCH",
        help="Branch to push to; created from main if it does not exist.  [default: main]",
    ),
    click.option("--create-pr", is_flag=True, help="Open a pull request instead of committing to the branch."),
)
"""How something is pushed, by whichever command."""


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
@click.argument("folder", type=UserPath())
@click.argument("repo", type=repository)
@repository_options
@click.option("--tag", metavar="TAG", help="Tag the commit.")
@click.option("--message", help="Title of the commit.  [default: Upload … with lora-tool]")
@click.option("--include", multiple=True, metavar="PATTERN", help="Also push these files of the folder: 'plots/*.png'.")
@ignore_option("Rules to skip in the validation.")
@click.option(
    "--readme",
    type=click.Choice(["auto", "local", "hub"]),
    default="auto",
    show_default=True,
    help="README.md to start from; auto keeps edits made on the Hub.",
)
@click.option(
    "--verify",
    "check",
    type=click.Choice(["tree", "download"]),
    default="tree",
    show_default=True,
    help="Afterwards compare the Hub's hashes, or download every file and compare it.",
)
@click.option("--dry-run", is_flag=True, help="Print the plan and create nothing.")
@fail_on_option
@config_option
@json_option
@quiet_option("No progress bar and no summary.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    folder: Path,
    repo: tuple[str, str | None],
    *,
    revision: str | None,
    readme: str,
    check: str,
    dry_run: bool,
    config_file: Path | None,  # noqa: ARG001 - read before
    as_json: bool,
    quiet: bool,
    **asked: Any,  # other arguments of `plan_push`
) -> None:
    """Publish FOLDER, an adapter or a model, as REPO on the Hugging Face Hub: validated first, in one commit.

    REPO is owner/name[@branch], hf://owner/name or the URL of its page. Only the files of the adapter or model are
    pushed. Your README is kept, completed with the metadata that the Hub needs. Pushing the same content again makes no
    commit. The token comes from `hf auth login`, HF_TOKEN, or OIDC in CI. Options can be set in the [push] table of
    lora-tool.toml.
    """
    name, branch = pushed_to(repo, "REPO", revision)
    if asked["tag"] is not None and asked["create_pr"]:
        raise click.UsageError("--tag with --create-pr: a pull request has no commit to tag before it is merged")
    if asked["message"] is not None and not asked["message"].strip():
        raise click.UsageError("--message is empty")
    asked |= rule_choice(ctx, configured(ctx)).arguments()
    from lora_tool.hub.card import Readme  # after the usage is known to be right
    from lora_tool.hub.hashing import with_hashes
    from lora_tool.hub.model import MAIN, PushCheck
    from lora_tool.hub.planning import plan_push
    from lora_tool.hub.pushing import push
    from lora_tool.hub.text import plan_json, plan_text, pushed_json, pushed_text

    show = sys.stderr.isatty() and not (quiet or as_json)
    try:
        with progress_bar("comparing with the Hub", _bytes_of(folder), quiet=not show) as advance:
            plan = plan_push(folder, name, revision=branch or MAIN, readme=Readme(readme), progress=advance, **asked)
        for warning in plan.warnings:
            warn(warning)
        if dry_run:
            click.echo(json.dumps(plan_json(plan), indent=2) if as_json else plan_text(plan))
            return
        if not (quiet or as_json):
            click.echo(plan_text(plan), err=True)
        with progress_bar("hashing", plan.sent_bytes, quiet=not show) as advance:
            plan = with_hashes(plan, advance)
        done = push(plan, check=PushCheck(check), progress=show)
    except KeyboardInterrupt:
        _leave_at_once()
    if as_json:
        click.echo(json.dumps(pushed_json(plan, done), indent=2))
    elif not quiet:
        click.echo(pushed_text(done))


def _bytes_of(folder: Path) -> int:
    """Return about how much there is to read: a bar may end early, where the Hub has nothing to compare with."""
    with contextlib.suppress(OSError):
        return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())
    return 0


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
