"""What the modules around a model put before all names in a training state: a Lightning module's ``net.``, say.

A class of transformers has its base model under a name of its own (``model.layers``), and heads and output layers
beside that, at the root. Where they lie deeper, what is before them is not the model's.
"""

from __future__ import annotations

from collections.abc import Collection

from lora_tool.models.ends import is_new_module
from lora_tool.models.model_tensors import base_prefixes

_MOST = 8
"""Modules around one another, at most."""


def wrapper_of(names: Collection[str]) -> str:
    """Return the beginning of all `names` that is not the model's, with its dot; "" where there is none, or none that
    is known to be one.
    """
    shared = next(iter(names), "").split(".")[:-1][:_MOST]
    found = ""
    for depth in range(1, len(shared) + 1):
        before = f"{'.'.join(shared[:depth])}."
        if not all(name.startswith(before) for name in names):
            break
        inner = {name[len(before) :].partition(".")[0] for name in names}
        heads = set(filter(is_new_module, inner))
        if not inner <= base_prefixes() | heads:
            continue  # a model of its own kind: Qwen2.5-Omni has its output layer in ``thinker``
        if heads or (not found and base_prefixes().isdisjoint(shared[:depth])):
            found = before
    return found
