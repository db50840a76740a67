"""What `after:` in a run's config asks for: our own commands, one after the other, each as a user would type it.

They run when all workers have ended, so the accelerator's memory is free, and only on the machine of rank 0.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from lora_tool.display import printable
from lora_tool.train.config import RunConfig

_OPTIONS = {"max_shard_size": "--max-shard-size", "create_pr": "--create-pr"}


def carry_on(run: RunConfig, output: Path, *, stdout: int | None = None) -> int:
    """Run the commands that `run.after` asks for and return the exit code of the first that fails, else 0.

    `stdout` is a file descriptor for what they print, by default our own.
    """
    for arguments in commands(run, output):
        click.echo(f"$ lora-tool {printable(shlex.join(arguments))}", err=True)
        code = subprocess.run([sys.executable, "-m", "lora_tool", *arguments], check=False, stdout=stdout).returncode  # noqa: S603
        if code:
            again = shlex.join(arguments)
            click.echo(f"hint: the training is done and safe; go on with: lora-tool {printable(again)}", err=True)
            return code
    return 0


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
        option = _OPTIONS.get(name, f"--{name}")
        if isinstance(value, bool):
            if name == "private":
                arguments.append("--private" if value else "--public")
            elif value:
                arguments.append(option)
        else:
            arguments += [option, str(value)]
    return arguments
