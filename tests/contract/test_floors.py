"""The house's rules: a module imports from lower floors or its own room only, arrows run one way, no file is long."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
FLOORS: dict[str, float] = {
    **dict.fromkeys(
        (
            "errors",
            "keys",
            "display",
            "machine",
            "batches",
            "float_mode",
            "progress",
            "version",
            "exhaustive",
            "records",
        ),
        0,
    ),
    **dict.fromkeys(("choices", "options", "doors"), 0.1),
    "tensors": 0.2,
    "actions": 0.2,
    "hub_names": 0.2,
    # the compiled kernel knows no file format; the rules scan values with it
    "execution.native.structures": 0.3,
    "execution.native.library": 0.4,
    "cluster": 0.5,
    "formats": 1,
    **dict.fromkeys(("path_suggestions", "hub_cache", "hub_client"), 1.1),
    "checkpoint": 2,
    **dict.fromkeys(("sources", "architectures"), 2.1),
    "weighted": 2.2,
    "adapter": 2.2,
    # judgement: findings are data, the state of rank files is read for them, and rules import no plan
    **dict.fromkeys(("report", "names"), 3),
    "sharded": 3.1,
    "rules.engine": 3.2,
    "rules.shared": 3.3,
    **dict.fromkeys(
        ("rules.files", "rules.adapter", "rules.model", "rules.merged", "rules.training", "rules.serving"), 3.4
    ),
    "rules": 3.5,
    "inspection": 3.6,
    # intent: plans, which ask the judge
    "plan.core": 4.0,
    "plan.base": 4.1,
    "plan.adapter": 4.2,
    **dict.fromkeys(("plan.merge", "plan.consolidate", "plan.algebra"), 4.3),
    "plan.convert": 4.35,
    "plan": 4.4,
    "validation": 4.5,
    "inventory": 4.6,
    **dict.fromkeys(("execution", "verification"), 5),
    **dict.fromkeys(("hub", "pictures"), 6),
    "workflows": 6.5,
    "cli": 7,
    "__main__": 8,
}
"""Room below `lora_tool` → its floor; the longest name that fits."""
NEVER = {
    "rules": ("plan", "execution", "torch", "transformers", "peft"),
    "report": ("execution", "torch", "transformers"),
    "verification": ("execution", "ml_dtypes"),
    "execution": ("verification",),
}
"""Judging needs no plan, no arithmetic and no model; a proof shares no arithmetic with the writer."""
SHARED = {"rules.engine": ("execution.native.library",)}
"""The kernel's scan reads values, and computes nothing with them."""
LONGEST = 400
PLUGINS = ("lora_tool_train",)
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
        other = room(rest) if top == "lora_tool" else top
        if top == "lora_tool" and other != here and FLOORS[other] >= FLOORS[here]:
            found.append(f"{path}:{line}: {here} (floor {FLOORS[here]}) imports {other} (floor {FLOORS[other]})")
        if top in PLUGINS:
            found.append(f"{path}:{line}: {here} imports {name}, which enters by an entry point")
        if other in SHARED.get(here, ()):
            continue
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
        if name.startswith("lora_tool.") and re.search(r"\._", name)
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
    path.write_text(
        "def f():\n    from lora_tool.execution import engine\n    import torch\n    import lora_tool_train\n"
    )
    (upwards, never, torch, plugin) = faults(path, "rules.shared.bad")
    assert ":2: rules.shared (floor 3.3) imports execution (floor 5)" in upwards
    assert ":2: rules.shared imports lora_tool.execution.engine" in never
    assert ":3: rules.shared imports torch" in torch
    assert ":4: rules.shared imports lora_tool_train, which enters by an entry point" in plugin
    assert set(circle({"a": {"b"}, "b": {"a"}})) == {"a", "b"}


def test_no_file_is_long() -> None:
    long = {
        path.name: lines for path in (*FILES, *OF_PLUGINS) if (lines := len(path.read_text().splitlines())) > LONGEST
    }
    assert long == {}
