"""An adapter in the names that parameters have in memory."""

from __future__ import annotations

from msgspec.structs import replace

from lora_tool.adapters.view import view_of
from lora_tool.checkpoints import AdapterDir
from lora_tool.core.keys import AdapterKey, Part, without_wrapped
from lora_tool.models.mapping.model import NamesOnDisk


def in_memory(adapter: AdapterDir, mapping: NamesOnDisk) -> AdapterDir:
    """Return the adapter with the module paths of this transformers."""
    found = homes(adapter, mapping)
    if all(path in (None, module) for (module, _), path in found.items()):
        return adapter  # whose view is kept

    def placed(key: AdapterKey) -> AdapterKey:
        path = found[key.module, _leaf_in_memory(key)] or key.module
        return key if path == key.module else replace(key, module=path)

    return replace(adapter, keys={name: placed(key) for name, key in adapter.keys.items()})


def homes(adapter: AdapterDir, mapping: NamesOnDisk) -> dict[tuple[str, str], str | None]:
    """Return module and leaf of each of the adapter's tensors → the path in memory of the module that it belongs to.

    None where there is none.
    """
    # in the file's order: a rule of transformers may wait for a name before it applies to others
    wanted = dict.fromkeys((key.module, _leaf_in_memory(key)) for key in adapter.keys.values())
    return {(module, leaf): _home(module, leaf, mapping) for module, leaf in wanted}


def strangers(adapter: AdapterDir, mapping: NamesOnDisk) -> int:
    """Return how many of the adapter's tensors the class has no module for."""
    return sum(home is None for home in set(homes(adapter, mapping).values()))


def lacks_layers(adapter: AdapterDir, mapping: NamesOnDisk) -> bool:
    """Return whether the config targets a layer of the class on which the adapter has no LoRA."""
    view = view_of(adapter)
    layers = mapping.facts.layers.difference(layer.target for layer in view.layers)
    return any(map(view.config.targets, layers))


def _leaf_in_memory(key: AdapterKey) -> str:
    """Return the parameter of its module that an adapter's tensor is for."""
    return key.leaf if key.part is Part.PLAIN and key.leaf else "weight"


def _home(module: str, leaf: str, mapping: NamesOnDisk) -> str | None:
    """Return the path in memory of a module that an adapter names.

    An adapter of an earlier transformers has the names of then, which are mostly those on disk.
    """
    module = bare = without_wrapped(module)
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


def disk_name(mapping: NamesOnDisk, module: str) -> str | None:
    """Return the tensor on disk that is the weight of `module`, a part of a fused parameter; None if it is none."""
    name = f"{module}.weight"
    held = mapping.piece_names(mapping.place(name))
    if name in held:
        return name
    return next((at for at in held if at.endswith(f".{name}") or name.endswith(f".{at}")), None)
