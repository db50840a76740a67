"""Layers that servers fuse into one, because they read the same input: all of them are quantised, or none is."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

_FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("query", "key", "value"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_qkvz", "in_proj_ba"),
)
EXPERTS = re.compile(r"(?P<experts>.*\.experts)\.")


def together(names: Collection[str], quantised: Iterable[str]) -> frozenset[str]:
    """Return `names` with all `quantised` weights that are fused with one of them, or are experts of the same layer."""
    sets = {key for name in names for key in fused_sets(name)}
    return frozenset(names) | {name for name in quantised if not sets.isdisjoint(fused_sets(name))}


def fused_sets(name: str) -> set[str]:
    """Return names for the sets that a weight is fused in."""
    experts = EXPERTS.match(name)
    if experts:
        return {experts["experts"]}
    module = name.removesuffix(".weight")
    above, _, leaf = module.rpartition(".")
    return {f"{above}.{' '.join(fused)}" for fused in _FUSED if leaf in fused}
