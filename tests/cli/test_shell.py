"""`lora-tool env` and `completion`; a real shell completes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.cli.calling import Caller


def test_env_names_versions_and_nothing_private(call: Caller) -> None:
    done = call("env")
    assert done.code == 0
    assert f"torch            {version('torch')}" in done.out
    assert str(Path.home()) not in done.out
    assert call("env", "--json").json["numpy"] == version("numpy")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_printed(call: Caller, shell: str) -> None:
    done = call("completion", shell)
    assert done.code == 0
    assert "_LORA_TOOL_COMPLETE" in done.out
    assert f"completion {shell}" in done.err


def test_unknown_shell_is_usage(call: Caller) -> None:
    assert call("completion", "cmd").code == 2


@pytest.mark.parametrize(("words", "expected"), [("lora-tool me", "merge"), ("lora-tool merge --prec", "--precision")])
def test_words_are_completed(words: str, expected: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lora_tool"],
        env={
            **os.environ,
            "_LORA_TOOL_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(words.count(" ")),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"plain,{expected}" in done.stdout.splitlines()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("shell", ["bash"])
def test_bash_takes_the_script(call: Caller, shell: str) -> None:
    script = call("completion", shell).out
    done = subprocess.run(
        ["bash", "-c", script + "\ncomplete -p lora-tool"], capture_output=True, text=True, check=True
    )
    assert "lora-tool" in done.stdout
