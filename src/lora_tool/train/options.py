"""The names of the options of the installed TRL and accelerate, read from their sources without importing them.

Importing TRL takes seconds and torch; a typo should be told at once. Sources are parsed, never run.
"""

from __future__ import annotations

import ast
import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from lora_tool.errors import MissingDependency
from lora_tool.train.methods import Method

PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "datasets")
"""What the extra `train` installs."""

_ELSEWHERE = {
    ("transformers", "TrainingArguments"): "transformers.training_args",
    ("trl", "ScriptArguments"): "trl.scripts.utils",
}
"""Names that lazy packages give out → the module that defines them."""

_EXTRA_LAUNCH_OPTIONS = ("accelerate_config",)
"""TRL's own word beside accelerate's: a preset's name or the path of an accelerate config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What may be written in a run's config. Each TRL option with whether it is a yes or no, accelerate's likewise."""

    trl: Mapping[str, bool]
    launch: Mapping[str, bool]

    def closest(self, name: str) -> str | None:
        """Return the option that looks most like `name`."""
        known = [*self.trl, *self.launch, "lora_tool", "env"]
        found = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        return found[0] if found else None


def require_training(packages: Iterable[str] | None = None) -> None:
    """Return if the packages, by default all of the extra, are installed. Raises `MissingDependency` naming one that is not."""
    for package in PACKAGES if packages is None else packages:
        if find_spec(package) is None:
            raise MissingDependency(package, extra="train")


@functools.cache
def option_names(method: Method) -> Names:
    """Return the options of `method` in the installed TRL, and those of the installed `accelerate launch`."""
    trl: dict[str, bool] = {}
    for home in method.homes:
        fields = _config_fields(home, method.config)
        if fields:
            trl |= fields
            break
    script = method.script or "trl.scripts.utils.ScriptArguments"
    trl |= _class_fields(*script.rsplit(".", 1))
    trl |= _class_fields("trl.trainer.model_config", "ModelConfig")
    trl |= _class_fields("trl.scripts.utils", "DatasetMixtureConfig")
    launch = _launch_options() | dict.fromkeys(_EXTRA_LAUNCH_OPTIONS, False)
    return Names(trl=trl, launch={name: flag for name, flag in launch.items() if name not in trl})


def _config_fields(home: str, config: str) -> dict[str, bool]:
    module = f"trl.trainer.{config.removesuffix('Config').lower()}_config"
    if home != "trl":
        module = f"{home}.{home.rpartition('.')[2]}_config"
    return _class_fields(module, config)


def _class_fields(module: str, name: str) -> dict[str, bool]:
    """Return the fields of the dataclass and of its bases; {} where it is not there."""
    tree = _tree(module)
    if tree is None:
        return {}
    imported = _imported_names(tree, module)
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            fields: dict[str, bool] = {}
            for base in node.bases:
                if isinstance(base, ast.Name):
                    fields |= _class_fields(imported.get(base.id, module), base.id)
            return fields | _own_fields(node)
    return {}


def _own_fields(node: ast.ClassDef) -> dict[str, bool]:
    fields = {}
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            kind = ast.unparse(item.annotation)
            no_argument = isinstance(item.value, ast.Call) and any(
                word.arg == "init" and isinstance(word.value, ast.Constant) and word.value.value is False
                for word in item.value.keywords
            )
            if not kind.startswith("ClassVar") and not item.target.id.startswith("_") and not no_argument:
                fields[item.target.id] = kind.replace("Optional[bool]", "bool | None") in ("bool", "bool | None")
    return fields


def _imported_names(tree: ast.Module, module: str) -> dict[str, str]:
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            package = module.split(".")[: -node.level] if node.level else []
            source = ".".join([*package, *([node.module] if node.module else [])])
            for alias in node.names:
                names[alias.asname or alias.name] = _ELSEWHERE.get((source, alias.name), source)
    return names


def _launch_options() -> dict[str, bool]:
    tree = _tree("accelerate.commands.launch")
    options: dict[str, bool] = {}
    for node in ast.walk(tree) if tree else ():
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"
        ):
            continue
        flag = any(
            word.arg == "action" and isinstance(word.value, ast.Constant) and str(word.value.value).startswith("store_")
            for word in node.keywords
        )
        for argument in node.args:
            if isinstance(argument, ast.Constant) and str(argument.value).startswith("--"):
                options[str(argument.value)[2:].replace("-", "_")] = flag
    for word in ("help", "module", "no_python", "env"):
        options.pop(word, None)
    return options


@functools.cache
def _tree(module: str) -> ast.Module | None:
    path = _source(module)
    return None if path is None else ast.parse(path.read_text(encoding="utf-8"))


def _source(module: str) -> Path | None:
    """Return the file of a module of an installed package, found without importing even the package."""
    top, *inside = module.split(".")
    spec = find_spec(top)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place).joinpath(*inside)
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if inside and candidate.is_file():
                return candidate
    return None


def preset_path(name: str) -> Path | None:
    """Return the accelerate config that `accelerate_config: NAME` means: a file, or one of TRL's presets."""
    if Path(name).is_file():
        return Path(name)
    preset = _source_folder("trl") / "accelerate_configs" / f"{name}.yaml"
    return preset if preset.is_file() else None


def presets() -> Iterable[str]:
    """Return the names of TRL's accelerate presets."""
    return sorted(path.stem for path in (_source_folder("trl") / "accelerate_configs").glob("*.yaml"))


def _source_folder(package: str) -> Path:
    spec = find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else Path()
