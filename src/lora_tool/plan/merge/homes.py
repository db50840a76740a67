"""Where in the model the tensors of an adapter belong, by the names in memory of the installed transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_tool.checkpoint import AdapterDir
from lora_tool.keys import AdapterKey, Part

if TYPE_CHECKING:
    from lora_tool.names.weight_mapping import WeightMapping


def homes(adapter: AdapterDir, mapping: WeightMapping) -> dict[tuple[str, str], str | None]:
    """Return module and leaf of each of the adapter's tensors → the path in memory of the module that it belongs to.

    None where there is none.
    """
    # in the file's order: a rule of transformers may wait for a name before it looks at others
    wanted = dict.fromkeys((key.module, leaf_in_memory(key)) for key in adapter.keys.values())
    return {(module, leaf): _home(module, leaf, mapping) for module, leaf in wanted}


def leaf_in_memory(key: AdapterKey) -> str:
    """Return the parameter of its module that an adapter's tensor is for."""
    return key.leaf if key.part is Part.PLAIN and key.leaf else "weight"


def _home(module: str, leaf: str, mapping: WeightMapping) -> str | None:
    """Return the path in memory of a module that an adapter names.

    An adapter of an earlier transformers has the names of then, which are mostly those on disk.
    """
    bare = module
    while bare.endswith(".base_layer"):
        bare = bare.removesuffix(".base_layer")
    if bare in mapping.facts.modules:
        return module
    placed = mapping.place(f"{bare}.{leaf}")
    if placed not in mapping.facts.shapes:
        return None
    path, _, found = placed.rpartition(".")
    # a part of a fused parameter keeps its own name: `per_expert` finds it on disk
    return path + module.removeprefix(bare) if found == leaf else module
