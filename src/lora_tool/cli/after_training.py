"""What `after:` in a run's config asks for: one command of ours, typed as a user would.

It runs when all workers have ended, so the accelerator's memory is free, and only on the machine of rank 0.
"""

from __future__ import annotations

import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from lora_tool.choices import suggestion
from lora_tool.display import printable
from lora_tool.errors import BadRunConfig
from lora_tool.report import Finding
from lora_tool.train.config import RunConfig
from lora_tool.train.traps import trap


def after_command(run: RunConfig, output: Path) -> list[str]:
    """Return the arguments of the command that is run on `output`: `ci` where something is merged, else `push` or `validate`.

    [] where nothing is asked for, and on other machines than the first. Raises `BadRunConfig` for an option that the
    command does not have.
    """
    after, push = run.after, dict(run.after.push or {})
    reward = ["--rm"] if run.method.name == "reward" else []
    repo = str(push.pop("repo")) if push else None
    if run.machine_rank:
        return []
    if after.merge is not None:
        merge = {name: value for name, value in after.merge.items() if name != "output"}
        pushing = [f"--push={repo}"] if repo else []
        pushing += _options("ci", push, "push")
        merging = ["-o", str(_merged_folder(run, output)), *reward, *_options("ci", merge, "merge")]
        return ["ci", str(output), *merging, *pushing]
    if repo:
        return ["push", str(output), repo, *_options("push", push, "push")]
    return ["validate", str(output), *reward] if after.validate else []


def _command(name: str) -> click.Command:
    command: click.Command = importlib.import_module(f"lora_tool.cli.{name}").command
    return command


def _options(command: str, given: Mapping[str, Any], block: str) -> Iterator[str]:
    """Yield the words of the options `given` under ``after.<block>``; `command` declares them."""
    options = [param for param in _command(command).params if isinstance(param, click.Option)]
    known = {word[2:].replace("-", "_"): option for option in options for word in option.opts if word.startswith("--")}
    for name, value in given.items():
        if name not in known:
            raise BadRunConfig(f"`lora_tool.after.{block}.{name}`: unknown key. {suggestion(name, known)}")
        option = known[name]
        if isinstance(value, bool):
            yield from (option.opts if value else option.secondary_opts)[:1]
        elif value is not None:
            yield f"{option.opts[0]}={value}"


def foreseen(run: RunConfig, output: Path) -> Iterator[Finding]:
    """Yield what would make the command fail that is run when training has ended. Raises `BadRunConfig` for a bad value."""
    name, *arguments = after_command(run, output) or [""]
    if not name:
        return
    try:
        _command(name).make_context(name, arguments).close()
    except click.UsageError as error:
        raise BadRunConfig(f"lora_tool.after: {error.format_message()}") from error
    merged = _merged_folder(run, output)
    if run.after.merge is not None and merged.exists() and not run.after.merge.get("overwrite"):
        hint = "lora_tool: {after: {merge: {overwrite: true}}}, or another output"
        yield trap("merge-output", hint, where="after", folder=merged)
    if run.after.push is not None and not _has_token(run):
        yield trap("no-token", "hf auth login, or HF_TOKEN in the environment", where="after", subject="push")


def _has_token(run: RunConfig) -> bool:
    from huggingface_hub import get_token  # only where something is pushed

    return bool({"HF_TOKEN", "HF_OIDC_RESOURCE"} & {*run.env, *os.environ} or get_token())


def carry_on(run: RunConfig, output: Path, *, stdout: int | None = None) -> int:
    """Run the command that `run.after` asks for and return its exit code; if it fails, print how to go on.

    `stdout` is a file descriptor for what it prints, by default our own.
    """
    typed = f"lora-tool {printable(shlex.join(words := after_command(run, output)))}"
    click.echo(f"$ {typed}", err=True)
    process = [sys.executable, "-m", "lora_tool", *words]
    code = 130
    try:
        code = subprocess.run(process, check=False, stdout=stdout, env={**os.environ, **run.env}).returncode  # noqa: S603
    finally:
        if code:
            click.echo(f"hint: the trained output is saved; continue with: {typed}", err=True)
    return code if code >= 0 else 128 - code


def _merged_folder(run: RunConfig, output: Path) -> Path:
    """Return where the merged model goes: what was asked for, or a `-merged` sibling."""
    asked = (run.after.merge or {}).get("output")
    return Path(str(asked)) if asked else output.parent / f"{output.resolve().name}-merged"
