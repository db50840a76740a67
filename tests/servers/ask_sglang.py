"""What the SGLang of this Python takes, as JSON, read from its source: importing it needs a GPU's kernels."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
from pathlib import Path

from tests.servers.fields import ASKED, unread


def package() -> Path:
    """Return the folder of the package."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def raised_for(path: Path) -> set[str]:
    """Return the fields for which an `if` of this file raises."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and any(isinstance(each, ast.Raise) for each in node.body):
            found |= {each.attr for each in ast.walk(node.test) if isinstance(each, ast.Attribute)}
    return found & ASKED.keys()


def options(folder: Path) -> list[str]:
    """Return the options about LoRA: the fields of the classes that declare arguments."""
    names = set()
    for path in (folder / "srt" / "server_args.py", *(folder / "srt" / "arg_groups").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        fields = (node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign))
        names |= {field.id for field in fields if isinstance(field, ast.Name)}
    return sorted(f"--{name.replace('_', '-')}" for name in names if "lora" in name or name == "model_path")


if __name__ == "__main__":
    lora = package() / "srt" / "lora"
    fields = unread([lora / "lora_config.py"]) | dict.fromkeys(raised_for(lora / "lora_manager.py"), "refuses")
    record = {"version": importlib.metadata.version("sglang"), "fields": dict(sorted(fields.items()))}
    print(json.dumps({"record": record, "options": options(package())}))
