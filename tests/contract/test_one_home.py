"""A use case has one home: a command parses, makes one call into `workflows`, prints, and returns a code."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "lora_tool"
CLI = SOURCE / "cli"
USE_CASES = {
    "ci": {"ci"},
    "ci_each": {"ci_each"},
    "combine": {"combine"},
    "consolidate": {"consolidate"},
    "convert": {"convert"},
    "diff": {"diff"},
    "extract": {"extract"},
    "inspect": {"inspect_each"},
    "ls": {"ls"},
    "merge": {"merge"},
    "merge_each": {"merge_each"},
    "prepare": {"prepare"},
    "prune": {"prune"},
    "push": {"push"},
    "resize": {"resize"},
    "validate": {"validate_each"},
    "verify": {"verify"},
    "verify_several": {"verify_each"},
}
"""Module of `cli` → the use case that it calls, once."""
ALL = set().union(*USE_CASES.values())
WORK = ("plans", "execution", "verification", "rules", "hub")
"""Rooms that do the work: a command has their types, and what prints them."""
PRINTING = {
    "expand",  # codes of rules that were typed
    "page_in_source",
    "replace_file",  # a report's file
    "known_servers",  # words of `--for`
    "server_named",
    "kernel",  # `env`
    "loaded",
    "verification_lines",
    "summary_json",
}
MOST_PARAMETERS = 12


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield module and name of every import of ours, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lora_tool."):
            yield from ((node.module.removeprefix("lora_tool."), alias.name) for alias in node.names)


@pytest.mark.parametrize("module", USE_CASES)
def test_a_command_calls_one_use_case_once(module: str) -> None:
    tree = ast.parse((CLI / f"{module}.py").read_text())
    of_workflows = {name for home, name in imported(tree) if home.startswith("workflows.")}
    calls = [
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in of_workflows & ALL
    ]
    assert calls == [*USE_CASES[module]]


def test_no_other_module_of_the_command_line_calls_a_use_case() -> None:
    for path in sorted(CLI.glob("*.py")):
        if path.stem not in USE_CASES:
            names = {name for home, name in imported(ast.parse(path.read_text())) if home.startswith("workflows.")}
            assert not names & ALL, path


def test_the_command_line_imports_no_work_from_below_the_workflows() -> None:
    for path in sorted(CLI.glob("*.py")):
        if path.stem in ("training", "train", "guard", "init", "after_training"):
            continue
        for home, name in imported(ast.parse(path.read_text())):
            is_function = name == name.lower()
            if home.partition(".")[0] in WORK and is_function:
                assert name in PRINTING, f"{path}: {home}.{name}"


def test_no_function_has_more_than_twelve_parameters() -> None:
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = node.args
                stars = sum(each is not None for each in (given.vararg, given.kwarg))
                count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs) + stars
                assert count <= MOST_PARAMETERS, f"{path}:{node.lineno}: {node.name} has {count} parameters"
