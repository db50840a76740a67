"""`lora-tool env`: what a bug report should begin with."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterator
from importlib import metadata

import click

from lora_tool.cli.options import json_option
from lora_tool.core.errors import LoraToolError
from lora_tool.core.machine import available_cores
from lora_tool.core.version import __version__
from lora_tool.native.library import FILE, VARIABLE, kernel, loaded

_ALSO = ("hf-xet", "deepspeed")
"""Packages that nothing requires, and that change what other packages do."""
_DEVELOPERS = re.compile(r"extra == .(?:dev|docs).")


@click.command("env", epilog="Example: lora-tool env")
@json_option
def command(*, as_json: bool) -> None:
    """Print the versions of lora-tool, Python, the system and the libraries it uses, for a bug report.

    It imports no library, so it works in a broken installation, and it prints no path, name or token. `kernel` is what
    computes `--precision float32`: the compiled kernel with the fastest instructions of this processor, or numpy and
    why.
    """
    facts = {
        "lora-tool": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(available_cores()),
        "kernel": _kernel(),
        **{package: _version(package) for package in (*_required(), *_ALSO)},
    }
    if as_json:
        click.echo(json.dumps(facts, indent=2))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        click.echo(f"{name:<{width}}  {value}")


def _kernel() -> str:
    try:
        found = kernel()
    except LoraToolError as error:
        return f"none: {error}"
    if found is not None:
        return str(found)
    why_not = loaded(FILE)[1]
    return f"none; numpy is used because {why_not or f'{VARIABLE}=off'}"


def _required() -> Iterator[str]:
    for requirement in metadata.requires("lora-tool") or ():
        package, _, condition = requirement.partition(";")
        name = re.split(r"[^\w.-]", package, maxsplit=1)[0]
        if name != "lora-tool" and not _DEVELOPERS.search(condition):
            yield name


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
