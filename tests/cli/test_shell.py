"""`lora-tool env` and `completion`; a real shell completes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete

from lora_tool.cli.exit_codes import _BY_ERROR, MEANINGS
from lora_tool.cli.main import COMMANDS, all_commands, cli
from lora_tool.cli.options import FolderOrId
from lora_tool.core.version import __version__
from tests.cli.calling import FIXTURES, REPOSITORY, Caller

REWARD = "fixtures/reward-qwen2/adapter"


def test_env_names_versions_and_nothing_private(call: Caller) -> None:
    done = call("env")
    assert done.code == 0
    assert f"torch            {version('torch')}" in done.out
    assert str(Path.home()) not in done.out
    assert call("env", "--json").json["numpy"] == version("numpy")


def test_env_runs_from_a_clone_that_is_not_installed(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    monkeypatch.setattr("lora_tool.cli.env.metadata.version", missing)
    done = call("env")
    assert (done.code, done.out.split()[:2]) == (0, ["lora-tool", __version__])


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_are_printed(call: Caller, shell: str) -> None:
    done = call("completion", shell)
    assert done.code == 0
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=done.out, text=True, check=True)
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


_PATHS = (
    "merge",
    "merge --base",
    "validate",
    "inspect",
    "inspect --base",
    "diff",
    "diff a",
    "consolidate",
    "convert",
    "ci --base",
)


@pytest.mark.parametrize("words", [*_PATHS, "verify --adapter", "rules", "validate --ignore"])
def test_paths_and_codes_are_completed(words: str) -> None:
    begun, expected = ("fix", {"dir,fix"}) if words in _PATHS or "--adapter" in words else ("LT20", {"plain,LT206"})
    if "--ignore" in words:
        begun, expected = f"LT101,{begun}", {"plain,LT101,LT206"}
    shell = BashComplete(cli, {}, "lora-tool", "_LORA_TOOL_COMPLETE")
    offered = {shell.format_completion(item) for item in shell.get_completions(words.split(), begun)}
    assert expected <= offered


def test_every_option_has_the_variable_of_its_name() -> None:
    context = click.Context(cli, info_name="lora-tool")
    for name in all_commands():
        command = cli.get_command(context, name)
        assert command is not None
        for param in command.params:
            if isinstance(param, click.Option):
                typed = {option.lstrip("-").replace("-", "_").upper() for option in param.opts}
                assert str(param.envvar).removeprefix(f"LORA_TOOL_{name.upper()}_") in typed, (name, param.opts)


def test_an_option_is_set_by_the_environment(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_TOOL_MERGE_RM", "1")
    monkeypatch.setenv("LORA_TOOL_MERGE_NUM_LABELS", "3")
    done = call("merge", "fixtures/reward-qwen2/adapter")
    assert done.code == 2
    assert "--rm means one label, but --num-labels is 3" in done.err


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("MERGE_DTYPE", "float8", ("merge",)),  # which click converts
        ("MERGE_NUM_LABELS", "3", ("merge", "--rm")),  # that contradicts what was typed
        ("MERGE_IGNORE", "LT999", ("merge",)),  # which only the rules know
        ("PUSH_REVISION", "a..b", ("push", ".", "me/x")),
    ],
)
def test_a_bad_value_of_the_environment_is_said_to_be_from_there(
    call: Caller, monkeypatch: pytest.MonkeyPatch, option: str, value: str, words: tuple[str, ...]
) -> None:
    monkeypatch.setenv(f"LORA_TOOL_{option}", value)
    done = call(*words)
    assert done.code == 2
    assert done.err.splitlines()[0].endswith(f" is set by the environment variable LORA_TOOL_{option}")
    monkeypatch.delenv(f"LORA_TOOL_{option}")
    assert "environment" not in call(words[0], "--dtype", "float8").err


def test_what_the_readme_says_of_every_command_holds() -> None:
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        options = {option for param in command.params for option in param.opts}
        folders = [param for param in command.params if isinstance(param, click.Argument) and param.name != "repo"]
        if not folders or name in ("rules", "completion"):
            continue
        assert all(isinstance(param.type, FolderOrId) for param in folders), name  # tests/hub gives it an id
        assert "--json" in options, name
        assert "--dry-run" in options or not {"--output", "--push", "--create-pr"} & options, name


@pytest.mark.parametrize("words", [(), ("init",), ("train",), ("guard",), ("completion",)])
def test_a_command_that_is_typed_alone_and_needs_more_shows_its_help(call: Caller, words: tuple[str, ...]) -> None:
    done = call(*words)
    assert done.code == 2
    assert done.out == ""  # `eval "$(lora-tool completion)"`, `lora-tool init > run.yaml`
    assert done.err == call(*words, "--help").out


def test_help_has_the_options_that_most_calls_need_first_and_the_commands_on_a_screen(call: Caller) -> None:
    first, *sections = re.findall(
        r"^([A-Z][\w ]+):\n(.*?)(?=^[A-Z]|\Z)", call("merge", "--help").out, re.MULTILINE | re.DOTALL
    )
    assert re.findall(r"--[a-z-]+", first[1])[:4] == ["--output", "--base", "--dtype", "--rm"]
    assert [name for name, _ in sections][-2:] == ["Workers and cluster", "What is printed"]
    listed = call("--help").out
    commands = listed[listed.index("Start here:") : listed.index("Help:")].splitlines()
    assert len(commands) <= 24
    assert max(map(len, listed.splitlines())) <= 80
    assert list(all_commands())[:5] == ["validate", "merge", "verify", "ci", "push"]
    assert listed.rstrip().splitlines()[-1].lstrip().startswith("141")


def test_a_variable_that_sets_no_option_is_named(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LORA_TOOL_MERGE_NUMLABELS", "3")
    monkeypatch.setenv("LORA_TOOL_VALIDATE_NOTHING_LIKE_IT", "3")
    monkeypatch.setenv("LORA_TOOL_VERSION", "0.1.0")  # a pipeline's own
    done = call("merge", "fixtures/reward-qwen2/adapter", "--dry-run")
    assert done.code == 0
    told = [line for line in done.err.splitlines() if "LORA_TOOL_" in line]
    what = "the environment variable LORA_TOOL_MERGE_NUMLABELS sets no option of merge"
    assert told == [f"warning: {what}, did you mean LORA_TOOL_MERGE_NUM_LABELS?"]


@pytest.mark.parametrize("name", list(all_commands()))
def test_the_example_is_one_line(call: Caller, name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert f"  {command.epilog}\n" in call(name, "--help").out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["merge", "nothere", "--json"], 3, "nothere: no such folder"),
        (["merge", "--colours", "--json"], 2, "No such option '--colours'."),
        (["consolidate", "fixtures/causal-llama/base", "--json"], 3, "expected rank files"),
    ],
)
def test_an_error_is_json_where_that_was_asked_for(call: Caller, words: list[str], code: int, message: str) -> None:
    called = call(*words)
    assert called.code == code
    assert message in called.json["error"]["message"]
    assert called.json["error"]["exit_code"] == code
    assert called.err.startswith("error: ")


def test_a_usage_error_looks_as_every_other(call: Caller) -> None:
    called = call("merge", "--colours")
    assert called.err.splitlines() == ["error: No such option '--colours'.", "hint: lora-tool merge --help"]
    assert call("merge", "--taks", "x").err.endswith("hint: did you mean --task?\n")


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["merge", REWARD, "--rm", f"{REWARD}=0.5"], "-o OUT"),
        (["combine", f"{REWARD}=0.5"], "-o PATH"),
        (["combine", "-o", "a b"], "ADAPTER"),
        (["resize", REWARD, "-o", "a b"], "--keep 0.99"),
        (["extract", REWARD, "-o", "a"], "--keep 0.99"),
        (["convert", REWARD], "--to peft"),
        (["prepare", REWARD, "-o", "a"], "--for NAME"),
        (["push", REWARD], "REPO"),
        (["diff", REWARD], "SECOND"),
    ],
)
def test_what_is_missing_is_added_to_what_was_typed(call: Caller, words: list[str], hint: str) -> None:
    done = call(*words)
    assert done.code == 2
    assert done.err.splitlines()[-1] == f"hint: lora-tool {shlex.join(words)} {hint}"


def test_a_folder_that_looks_like_an_option_is_named_so_that_it_can_be_typed(
    call: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(FIXTURES / "causal-llama", tmp_path / "llama")
    (tmp_path / "llama" / "adapter").rename(tmp_path / "llama" / "-a")
    monkeypatch.chdir(tmp_path / "llama")
    assert call("validate", "--", "-a").out.endswith(f"next: lora-tool merge {tmp_path}/llama/-a\n")
    assert f'("{tmp_path}/llama/-a-merged")' in call("merge", "./-a").out


def test_a_usage_error_is_an_annotation_on_github(call: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    annotation, error, _ = call("ci", "--100%").err.splitlines()
    assert annotation.startswith("::error::No such option")
    assert "--100%25" in annotation
    assert error.startswith("error: No such option")


def test_every_exit_code_is_explained(call: Caller) -> None:
    assert {code for _, code in _BY_ERROR} <= MEANINGS.keys()
    assert all(meaning in " ".join(call("--help").out.split()) for meaning in MEANINGS.values())


_INTERRUPTED = """
import os, signal, time
os.kill(os.getpid(), signal.SIGINT)
time.sleep(30)
"""


def test_an_interrupt_while_modules_are_imported_prints_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text(_INTERRUPTED)
    source = str(REPOSITORY / "src")
    # a job in the background inherits that the signal is ignored
    begin = "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    done = subprocess.run(
        [sys.executable, "-c", f"{begin}; runpy.run_module('lora_tool', run_name='__main__')"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), source])},
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


def test_help_without_docstrings_says_the_same(call: Caller) -> None:
    command = [sys.executable, "-OO", "-P", "-m", "lora_tool", "ls", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "COLUMNS": "80"}, check=True)
    assert done.stdout == call("ls", "--help").out
