"""README and documentation are run: transcripts print what they show, tables are the program's own."""

from __future__ import annotations

import inspect
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

import lora_tool
from lora_tool.cli.configuration import configuration
from lora_tool.cli.exit_codes import MEANINGS
from lora_tool.cli.main import all_commands, cli
from lora_tool.models import ARCHITECTURES
from tests.cli.calling import Caller
from tests.readme import (
    DOCUMENTATION,
    PAGES,
    README,
    ROOT,
    SKILL,
    TUTORIAL,
    as_shown,
    local_hub,
    rewritten,
    transcripts,
)

TEXTS = {str(page.relative_to(ROOT)): page.read_text() for page in PAGES}


PYTHON = DOCUMENTATION / "reference" / "python.md"


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "fixtures", tmp_path / "fixtures")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blocks(language: str, page: Path = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


WITH_TRANSCRIPTS = [page for page in PAGES if page != TUTORIAL and transcripts(page.read_text())]


@pytest.mark.parametrize("page", WITH_TRANSCRIPTS, ids=lambda page: page.name)
def test_transcript_prints_what_it_shows(page: Path, clone: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = Caller(capsys)
    for line, expected in (command for commands in transcripts(page.read_text()) for command in commands):
        program, *arguments = shlex.split(line)
        assert program == "lora-tool"
        done = call(*arguments)
        assert done.code == ("  error  " in expected), done.err
        assert as_shown(done.out, clone) == expected


def test_the_readme_is_for_somebody_in_a_hurry() -> None:
    assert README.stat().st_size <= 10_000


def test_an_agent_is_told_what_to_do_at_each_exit_code() -> None:
    said = re.findall(r"^- (.*?): ", SKILL.read_text(), re.MULTILINE)
    assert re.findall(r"\*\*(\d+)\*\*", "".join(said)) == [str(code) for code in MEANINGS if code]


EXAMPLES = "".join([*blocks("python"), *blocks("python", PYTHON)])


def test_library_examples_run(clone: Path) -> None:
    with local_hub(clone) as environment:
        subprocess.run([sys.executable, "-c", EXAMPLES], env=environment, check=True)
    assert (clone / "merged" / "lora_tool.json").is_file()


def test_every_function_has_an_example() -> None:
    functions = {name for name in lora_tool.__all__ if inspect.isfunction(getattr(lora_tool, name))}
    assert {name for name in functions if not re.search(rf"\b{name}\(", EXAMPLES)} == set()


def test_library_examples_are_typed(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(EXAMPLES)
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, str(tmp_path / "example.py")], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def options(name: str) -> set[str]:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None, name
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("page", TEXTS)
def test_every_option_that_is_shown_exists(page: str) -> None:
    text = TEXTS[page]
    typed = "".join(re.findall(r"^```[a-z]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    lines = re.findall(r"^(?:\$ |- |    - )?(lora-tool [a-z]+.*)$", typed, re.MULTILINE)
    lines += re.findall(r"`(lora-tool [a-z]+[^`]*)`", text)
    for line in lines:
        name, *words = line.partition("  #")[0].split()[1:]
        if name not in ("train", "guard"):  # which hand options on to TRL
            assert {word for word in words if word.startswith("-")} <= options(name), line
    named = set(re.findall(r"`(--[a-z][a-z-]*)", text)) - {"--max-lora-rank", "--pooler-config"}  # vLLM's
    assert named <= {"--help"}.union(*map(options, all_commands()))


def test_the_configuration_is_one(tmp_path: Path) -> None:
    (example,) = blocks("toml", DOCUMENTATION / "reference" / "configuration.md")
    (tmp_path / "lora-tool.toml").write_text(example)
    read = configuration(str(tmp_path / "lora-tool.toml"), [])
    assert read.servers == ("vllm",)
    assert list(read.ignore) == ["LT803"]
    assert read.tables["ci"] == {"output": "reward-model", "rm": True}


def test_both_ci_commands_are_there_and_pinned() -> None:
    for name in ("job", "test"):
        assert re.search(rf"<!-- ci: {name} -->\n```\n.*-c tests/constraints.txt.*\n```", TEXTS["README.md"])
    assert re.search(r"^torch==2\.13\.0$", (ROOT / "tests" / "constraints.txt").read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", TEXTS)
def test_tables_are_the_programs_own(page: str) -> None:
    assert rewritten(TEXTS[page]) == TEXTS[page], "python -m tests.readme"


def test_every_command_has_an_example_that_runs() -> None:
    for name in all_commands():
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        assert (command.epilog or "").startswith("Example: lora-tool "), name
        assert command.help, name


def test_architectures_are_counted() -> None:
    causal = sum(row.causal_lm is not None for row in ARCHITECTURES.values())
    classifiers = sum(row.sequence_classification is not None for row in ARCHITECTURES.values())
    assert f"{causal} causal and {classifiers} classification architectures" in TEXTS[".github/docs/merging.md"]
