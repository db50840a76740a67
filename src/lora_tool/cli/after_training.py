"""What `after:` in a run's config asks for: our own commands, one after the other, each as a user would type it.

They run when all workers have ended, so the accelerator's memory is free, and only on the machine of rank 0.
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

from lora_tool.display import printable
from lora_tool.errors import BadRunConfig
from lora_tool.report import Finding, Severity
from lora_tool.train.codes import finding
from lora_tool.train.config import RunConfig

_OPPOSITES = {"private": "--public", "verify": "--no-verify"}


def foreseen(run: RunConfig, output: Path) -> Iterator[Finding]:
    """Yield what would make a command fail that is run when training has ended. Raises `BadRunConfig` for a bad value."""
    for name, *arguments in commands(run, output):
        command: click.Command = importlib.import_module(f"lora_tool.cli.{name}").command
        try:
            command.make_context(name, arguments).close()
        except click.UsageError as error:
            raise BadRunConfig(f"lora_tool.after.{name}: {error.format_message()}") from error
    merged = merged_folder(run, output)
    if run.after.merge is not None and merged.exists() and not run.after.merge.get("overwrite"):
        yield finding(
            "merge-output",
            Severity.ERROR,
            f"{merged} exists, and merge would not replace it when training has ended",
            hint="lora_tool: {after: {merge: {overwrite: true}}}, or another output",
            where="after",
        )
    if run.after.push is not None and not _has_token(run):
        yield finding(
            "no-token",
            Severity.WARNING,
            "has no token, and will fail without one when training has ended",
            hint="hf auth login, or HF_TOKEN in the environment",
            where="after",
            subject="push",
        )


def _has_token(run: RunConfig) -> bool:
    from huggingface_hub import get_token  # noqa: PLC0415 - only where something is pushed

    return bool({"HF_TOKEN", "HF_OIDC_RESOURCE"} & {*run.env, *os.environ} or get_token())


def carry_on(run: RunConfig, output: Path, *, stdout: int | None = None) -> int:
    """Run the commands that `run.after` asks for and return the exit code of the first that fails, else 0.

    `stdout` is a file descriptor for what they print, by default our own.
    """
    left = list(commands(run, output))
    while left:
        click.echo(f"$ lora-tool {printable(shlex.join(left[0]))}", err=True)
        words = [sys.executable, "-m", "lora_tool", *left[0]]
        try:
            code = subprocess.run(words, check=False, stdout=stdout, env={**os.environ, **run.env}).returncode  # noqa: S603
        except KeyboardInterrupt:
            _say_how_to_go_on(left)
            raise
        if code:
            _say_how_to_go_on(left)
            return code if code > 0 else 128 - code
        left = left[1:]
    return 0


def _say_how_to_go_on(left: list[list[str]]) -> None:
    again = " && ".join(f"lora-tool {printable(shlex.join(arguments))}" for arguments in left)
    click.echo(f"hint: the training is done and safe; go on with: {again}", err=True)


def commands(run: RunConfig, output: Path) -> Iterator[list[str]]:
    """Yield the arguments of each command: validate, merge, push."""
    after = run.after
    if after.validate:
        yield ["validate", str(output), *(["--rm"] if run.method.name == "reward" else [])]
    merged = merged_folder(run, output)
    if after.merge is not None:
        yield ["merge", str(output), "-o", str(merged), *_options(after.merge, leave=("output",))]
    if after.push is not None:
        what = after.push.get("what") or ("merged" if after.merge is not None else "adapter")
        folder = merged if what == "merged" else output
        yield ["push", str(folder), str(after.push["repo"]), *_options(after.push, leave=("repo", "what"))]


def merged_folder(run: RunConfig, output: Path) -> Path:
    """Return where the merged model goes: what was asked for, or a `-merged` sibling."""
    asked = (run.after.merge or {}).get("output")
    return Path(str(asked)) if asked else output.parent / f"{output.resolve().name}-merged"


def _options(given: Mapping[str, Any], *, leave: tuple[str, ...]) -> list[str]:
    arguments: list[str] = []
    for name, value in given.items():
        if name in leave or value is None:
            continue
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            if value or name in _OPPOSITES:
                arguments.append(option if value else _OPPOSITES[name])
        else:
            arguments += [option, str(value)]
    return arguments
