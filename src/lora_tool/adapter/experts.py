"""What checkpoints, and the adapters on them, call the matrices of single experts."""

from __future__ import annotations

import re
from collections.abc import Sequence

EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d{1,6})\.(?P<projection>\w+)")
"""The path of an expert's matrix."""
FUSED = ("gate_up_proj", "down_proj")
"""What transformers 5 calls the parameters that hold the matrices of all experts, in the order of the module."""
PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Gate, up and down: most models' names, and Mixtral's."""


def parameter_of(target: str, names: Sequence[str], *, nested: int, count: int) -> str | None:
    """Return which parameter of a module LoRA changes, one of those that `target_parameters` names; None if none is known.

    PEFT wraps one parameter of a module after the other: this one is `nested` in so many others, of `count` in all.
    """
    known = FUSED if target.rpartition(".")[2] == "experts" else ("weight",)
    asked = [each for each in known if any(f".{target}.{each}".endswith(f".{name}") for name in names)]
    return asked[count - 1 - nested] if len(asked) == count > nested else None
