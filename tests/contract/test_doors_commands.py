"""A distribution of its own adds a command, by an entry point; one that does not load is warned of and harms no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOY = """
import click

@click.command("toy", short_help="Say hello.")
@click.option("--name", default="you")
def command(name):
    "Say hello at length."
    click.echo(f"hello {name}")
"""


def install(folder: Path, name: str, entry_points: str) -> None:
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[lora_tool.commands]\n{entry_points}\n")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "toy_command.py").write_text(TOY)
    install(tmp_path, "toy-distribution", "toy = toy_command:command\nmerge = toy_command:command")
    return tmp_path


def lora_tool(site: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(site), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": paths, **more}
    command = [sys.executable, "-m", "lora_tool", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("nothing_there:command", "ModuleNotFoundError: No module named 'nothing_there'"),
        ("toy_command:nothing", "AttributeError: module 'toy_command' has no attribute 'nothing'"),
        ("toy_command:TOY", "AttributeError"),
        ("toy_command:click", "expected click.core.Command, found module"),
    ],
)
def test_one_that_is_broken_harms_no_other(site: Path, target: str, why: str) -> None:
    install(site, "broken-distribution", f"broken = {target}")
    helped = lora_tool(site, "--help")
    (warning,) = helped.stderr.splitlines()
    assert warning.startswith("warning: broken-distribution: its entry point `broken` of lora_tool.commands does not")
    assert why in warning
    assert "  toy          Say hello.\n" in helped.stdout
    assert lora_tool(site, "toy").stdout == "hello you\n"
    called = lora_tool(site, "broken")
    assert called.returncode == 3
    assert called.stderr.startswith("error: broken-distribution: ")
    assert "hint: pip install --upgrade broken-distribution" in called.stderr
