"""Doors for other distributions: the entry points by which a package adds something without a line in this one.

An entry point of a group names an object of the group's type, in a module that is quick to import.

    lora_tool.commands    a `click.Command`; its short help is its line in `lora-tool --help`
    lora_tool.engines     a `core.engines.ClusterEngine`: its name is a word of `--engine`
    lora_tool.kinds       a `checkpoints.added.AddedKind`: a kind of checkpoint
    lora_tool.servers     a `rules.serving.forms.AddedServer`: its name is a word of `--for`
    lora_tool.pictures    a `workflows.drawing.Drawer`: the first one draws for `--plot`

Groups are read when they are needed and not before: reading them costs as long as the rest of a start.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from lora_tool.core.errors import BrokenPlugin

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

COMMANDS = "lora_tool.commands"
ENGINES = "lora_tool.engines"
KINDS = "lora_tool.kinds"
PICTURES = "lora_tool.pictures"
SERVERS = "lora_tool.servers"

T = TypeVar("T")


@functools.cache
def entry_points(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group by their names, sorted; of two with one name the first that Python finds."""
    from importlib.metadata import entry_points as installed

    found: dict[str, EntryPoint] = {}
    for point in installed(group=group):
        found.setdefault(point.name, point)
    return dict(sorted(found.items()))


def load(point: EntryPoint, kind: type[T]) -> T:
    """Return the object that an entry point names. Raises `BrokenPlugin` if it does not load or is no `kind`."""
    try:
        target = point.load()
    except Exception as error:
        raise _broken(point, f"{type(error).__name__}: {' '.join(str(error).split())}") from error
    if not isinstance(target, kind):
        raise _broken(point, f"expected {kind.__module__}.{kind.__name__}, found {type(target).__name__}")
    return target


def _broken(point: EntryPoint, why: str) -> BrokenPlugin:
    distribution = point.dist.name if point.dist else "an unknown distribution"
    return BrokenPlugin(
        f"{distribution}: its entry point `{point.name}` of {point.group} does not load: {why}",
        hint=f"pip install --upgrade {distribution}, or pip uninstall {distribution}",
    )


def load_all(group: str, kind: type[T], warn: Callable[[str], None]) -> dict[str, T]:
    """Return all objects of a group by name; one that does not load is left out, and `warn` is called with the reason."""
    loaded: dict[str, T] = {}
    for name, point in entry_points(group).items():
        try:
            loaded[name] = load(point, kind)
        except BrokenPlugin as error:
            warn(str(error))
    return loaded
