"""The house's rules: a module imports from lower floors or its own package only, and no file is long."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
FLOORS: dict[str, float] = {
    **dict.fromkeys(("errors", "tensors", "keys", "display", "cores", "progress", "version"), 0),
    "formats": 1,
    **dict.fromkeys(("hub_cache", "mistyped"), 1),
    **dict.fromkeys(("checkpoint", "sources"), 2),
    # the third floor has steps: findings and plans are data, rules ask plans what can be merged
    **dict.fromkeys(("report", "names"), 3),
    "plan": 3.1,
    **dict.fromkeys(("rules", "inspection"), 3.2),
    "inventory": 3.3,
    **dict.fromkeys(("execution", "verification"), 4),
    **dict.fromkeys(("hub", "train", "pictures"), 5),
    "pipeline": 5.5,
    "cli": 6,
    "__main__": 7,
}
"""First name below `lora_tool` → its floor."""
NEVER = {
    "rules": ("execution", "torch", "transformers", "peft"),
    "report": ("execution", "torch", "transformers"),
    "verification": ("execution", "ml_dtypes"),
    "execution": ("verification",),
}
"""Judging needs neither arithmetic nor a model; a proof shares no arithmetic with the writer."""
LONGEST = 400

FILES = sorted((SOURCE / "lora_tool").rglob("*.py"))


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def room(module: str) -> str:
    """Return the first name below `lora_tool`; "" for the package itself, which only names its public face."""
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and full name of every import in the file, those inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def faults(path: Path, module: str) -> list[str]:
    here = room(module)
    found = []
    for line, name in imports(path):
        top, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if top == "lora_tool" and other != here and FLOORS[other] >= FLOORS[here]:
            found.append(f"{path}:{line}: {here} (floor {FLOORS[here]}) imports {other} (floor {FLOORS[other]})")
        if {top, other} & set(NEVER.get(here, ())):
            found.append(f"{path}:{line}: {here} imports {name}")
    return found


@pytest.mark.parametrize("path", [path for path in FILES if room(module_of(path))], ids=module_of)
def test_imports_go_down(path: Path) -> None:
    assert faults(path, module_of(path)) == []


def test_every_room_has_a_floor() -> None:
    assert {room(module_of(path)) for path in FILES} - {""} <= FLOORS.keys()


def test_an_import_upwards_is_seen_inside_a_function_too(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("def f():\n    from lora_tool.execution import engine\n    import torch\n")
    (upwards, never, torch) = faults(path, "lora_tool.rules.bad")
    assert ":2: rules (floor 3.2) imports execution (floor 4)" in upwards
    assert ":2: rules imports lora_tool.execution.engine" in never
    assert ":3: rules imports torch" in torch


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_no_file_is_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= LONGEST
