"""LoRA on the parameters that hold the matrices of all experts: how many experts its factors are of, and their rank."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from msgspec import Struct

from lora_tool.adapters.view import AdapterView
from lora_tool.core.errors import UnsupportedAdapter


class FusedExperts(Struct, frozen=True, kw_only=True):
    """What one module's factors hold: A has the rows of one expert after the other, B their columns in turn."""

    path: str
    """The parameter, as the config's patterns are matched with it."""
    rank: int
    """That of each expert."""
    count: int


def fused_experts(view: AdapterView) -> Mapping[str, FusedExperts]:
    """Return the modules whose factors are those of several experts: they have more rows than their rank.

    Raises `UnsupportedAdapter` where the config does not tell that rank.
    """
    config, found = view.config, {}
    patterns = [name for name in ("rank_pattern", "alpha_pattern") if getattr(config, name)]
    for layer in view.layers if config.target_parameters else ():
        rank, rows = config.rank(layer.path), 0 if layer.a is None else layer.a.shape[0]
        if rows == rank:
            continue
        why = None
        if patterns and layer.path == layer.target:
            why = f"`{patterns[0]}` may mean one of the parameters of `{layer.target}`, and the names do not tell which"
        elif rows % rank:
            why = f"`{layer.module}` has {rows} rows in lora_A, which is not a multiple of its rank {rank}"
        if why is not None:
            raise UnsupportedAdapter(
                f"{config.path}: {why}",
                hint=f"merge it and serve the merged model: lora-tool merge {shlex.quote(str(view.adapter.root))}",
            )
        found[layer.module] = FusedExperts(path=layer.path, rank=rank, count=rows // rank)
    return found
