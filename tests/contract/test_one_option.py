"""An option of a merge is declared in one place: a line there makes it an argument, two options, and a YAML key."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
TOY = '    toy: int | None = option(None, "A toy.", parse=positive)\n'
SEEN = """
import contextlib, inspect, io, json
import click
from lora_tool import merge
from lora_tool.cli import ci, merge as merging
from lora_tool.cli.after_training import _options

def text(command, name):
    return command.get_help(click.Context(command, info_name=name))

print(json.dumps({
    "merge": "--toy" in text(merging.command, "merge"),
    "ci": "--toy" in text(ci.command, "ci"),
    "library": "toy" in inspect.signature(merge).parameters and "`toy`: A toy." in merge.__doc__,
    "yaml": list(_options("ci", {"toy": 3}, "merge")) == ["--toy=3"],
}))
"""


def test_an_option_that_is_declared_once_is_everywhere(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    options = tmp_path / "src" / "lora_tool" / "plan" / "merge" / "options.py"
    written = options.read_text()
    declared = written.replace("    jobs: int", TOY + "    jobs: int", 1)
    assert declared != written
    options.write_text(declared)
    done = subprocess.run(
        [sys.executable, "-c", SEEN],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dict.fromkeys(("merge", "ci", "library", "yaml"), True)
