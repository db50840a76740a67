"""The house's rules: a module imports from lower floors or its own room only, arrows run one way, no file is long."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
FLOORS: dict[str, float] = {
    "core": 0,
    "formats": 1,
    "native": 1.5,
    "models": 2,
    "checkpoints": 3,
    "adapters": 3.5,
    "rules": 4,
    "plans": 5,
    **dict.fromkeys(("execution", "verification"), 6),
    "hub": 7,
    "workflows": 8.5,
    "cli": 9,
    "__main__": 10,
}
"""Room below `lora_tool` → its floor; the longest name that fits."""
NEVER = {
    "rules": ("plans", "execution", "torch", "transformers", "peft"),
    "verification": ("execution", "ml_dtypes"),
    "execution": ("verification",),
}
"""Judging needs no plan, no arithmetic and no model; a proof shares no arithmetic with the writer."""
LONGEST = 400
PLUGINS = ("lora_tool_megatron", "lora_tool_plot", "lora_tool_ray", "lora_tool_train")
"""Packages that enter by entry points: they import what has no underscore, and nothing of ours names them."""

FILES = sorted((SOURCE / "lora_tool").rglob("*.py"))
OF_PLUGINS = sorted(path for name in PLUGINS for path in (SOURCE / name).rglob("*.py"))


def module_of(path: Path) -> str:
    """Return the module's name below `lora_tool`; "" for the package itself, which only names its public face."""
    return ".".join(path.relative_to(SOURCE / "lora_tool").with_suffix("").parts).removesuffix("__init__").rstrip(".")


def room(module: str) -> str:
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((name for name in names if name in FLOORS), parts[0])


@cache
def imports(path: Path) -> list[tuple[int, str]]:
    """Return line and full name of every import in the file, those inside functions too."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def faults(path: Path, module: str) -> list[str]:
    here = room(module)
    found = []
    for line, name in imports(path):
        top, _, rest = name.partition(".")
        other = room(rest) if top == "lora_tool" else top
        if top == "lora_tool" and other != here and FLOORS[other] >= FLOORS[here]:
            found.append(f"{path}:{line}: {here} (floor {FLOORS[here]}) imports {other} (floor {FLOORS[other]})")
        if top in PLUGINS:
            found.append(f"{path}:{line}: {here} imports {name}, which enters by an entry point")
        if {top, rest.partition(".")[0]} & set(NEVER.get(here.partition(".")[0], ())):
            found.append(f"{path}:{line}: {here} imports {name}")
    return found


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of a circle of imports, none without one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_imports_go_down() -> None:
    assert [fault for path in FILES if module_of(path) for fault in faults(path, module_of(path))] == []


def test_arrows_run_one_way_inside_a_room_too() -> None:
    modules = {module_of(path): path for path in FILES if module_of(path)}
    graph: dict[str, set[str]] = {}
    for module, path in modules.items():
        names = {name.removeprefix("lora_tool.") for _, name in imports(path) if name.startswith("lora_tool.")}
        graph[module] = {name if name in modules else name.rpartition(".")[0] for name in names} - {module, ""}
    assert circle(graph) == []


def test_plugins_import_what_is_public() -> None:
    assert OF_PLUGINS
    private = [
        f"{path}:{line}: {name}"
        for path in OF_PLUGINS
        for line, name in imports(path)
        if name.startswith("lora_tool.") and re.search(r"\._(?!_version)", name)
    ]
    assert private == []


def test_nothing_names_a_plugin() -> None:
    named = [path for path in FILES if re.search(rf"\b({'|'.join(PLUGINS)})\b(?!\.json)", path.read_text())]
    assert named == []


def test_every_room_has_a_floor() -> None:
    assert {room(module_of(path)) for path in FILES} - {""} <= FLOORS.keys()


def test_the_map_names_every_room() -> None:
    map_ = (SOURCE / "lora_tool" / "ARCHITECTURE.md").read_text()
    floors = {name for row in re.findall(r"^\| \d.*", map_, re.MULTILINE) for name in re.findall(r"`([\w.]+)/?`", row)}
    assert {name.partition(".")[0] for name in FLOORS} <= floors


def test_an_import_upwards_and_a_circle_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "bad.py"
    path.write_text("def f():\n    from lora_tool.execution import engine\n    import torch\n")
    (upwards, never, torch) = faults(path, "rules.shared.bad")
    assert ":2: rules (floor 4) imports execution (floor 6)" in upwards
    assert ":2: rules imports lora_tool.execution.engine" in never
    assert ":3: rules imports torch" in torch
    assert set(circle({"a": {"b"}, "b": {"a"}})) == {"a", "b"}


def test_no_file_is_long() -> None:
    long = {
        path.name: lines for path in (*FILES, *OF_PLUGINS) if (lines := len(path.read_text().splitlines())) > LONGEST
    }
    assert long == {}
