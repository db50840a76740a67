"""The classes of a package's models, read from its source: nothing is imported, so that no platform or extra is needed.

Run by the Python that has the server, which need not have this repository.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(kw_only=True)
class Class:
    """A class statement: its bases and the values of its attributes, as expressions of its module."""

    module: Module
    name: str
    bases: list[ast.expr]
    attributes: dict[str, ast.expr]


@dataclass(kw_only=True)
class Module:
    """A module's classes, and what its other names stand for: a module and a name there."""

    path: str
    classes: dict[str, Class] = field(default_factory=dict)
    names: dict[str, tuple[str, str]] = field(default_factory=dict)
    values: dict[str, ast.expr] = field(default_factory=dict)


class Source:
    """The source of a package, below the folder that holds it."""

    def __init__(self, package: Path) -> None:
        self.root = package.parent
        self._known: dict[str, Module | None] = {}

    def module(self, path: str) -> Module | None:
        """Return the module of a dotted path; None for one that is not in the package."""
        if path not in self._known:
            self._known[path] = self._parsed(path)
        return self._known[path]

    def found(self, path: str, name: str) -> Class | None:
        """Return the class of this name in a module, or where it is imported from."""
        module = self.module(path)
        if module is None or name in module.classes:
            return None if module is None else module.classes[name]
        return self.found(*module.names[name]) if name in module.names else None

    def lineage(self, each: Class) -> Iterator[Class]:
        """Yield a class and those that it is made from, first those of its first base."""
        yield each
        for base in each.bases:
            above = self._base(each.module, base)
            if above is not None:
                yield from self.lineage(above)

    def attribute(self, each: Class, name: str) -> ast.expr | None:
        """Return the expression that an attribute has in a class; through another class's attribute, that one's."""
        for above in self.lineage(each):
            value = above.attributes.get(name)
            if isinstance(value, ast.Attribute):
                other = self._base(above.module, value.value)
                return None if other is None else self.attribute(other, value.attr)
            if value is not None:
                return value
        return None

    def _base(self, module: Module, base: ast.expr) -> Class | None:
        """Return the class of a base: a name, or the argument of a function such as `as_embedding_model(Model)`."""
        if isinstance(base, ast.Call) and base.args:
            return self._base(module, base.args[0])
        name = base.value if isinstance(base, ast.Subscript) else base
        if not isinstance(name, ast.Name):
            return None
        found = self.found(module.path, name.id)
        return self._base(module, module.values[name.id]) if found is None and name.id in module.values else found

    def _parsed(self, path: str) -> Module | None:
        below = self.root.joinpath(*path.split("."))
        file = below / "__init__.py" if below.is_dir() else below.with_suffix(".py")
        if not file.is_file():
            return None
        module = Module(path=path)
        package = path if below.is_dir() else path.rpartition(".")[0]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                above = package.rsplit(".", node.level - 1)[0] if node.level else ""
                origin = ".".join(filter(None, (above, node.module)))
                module.names |= {alias.asname or alias.name: (origin, alias.name) for alias in node.names}
            elif isinstance(node, ast.ClassDef):
                module.classes[node.name] = Class(
                    module=module, name=node.name, bases=node.bases, attributes=dict(_assigned(node.body))
                )
            elif isinstance(node, ast.Module):
                module.values |= dict(_assigned(node.body))
        return module


def _assigned(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for node in body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if isinstance(target, ast.Name) and value is not None:
            yield target.id, value
