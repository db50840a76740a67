"""An adapter that every server takes, before it is injured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests.checkpoint_edits import fields, lora, tensors
from tests.mutations.registry import Edit


def plain(folder: Path) -> None:
    """Make it an adapter that every server takes: one rank, one alpha, no rsLoRA."""
    with tensors(folder) as table:
        table.update(lora("model.layers.1.self_attn.v_proj", rows=8, columns=16))
    with_fields(folder, rank_pattern={}, alpha_pattern={}, use_rslora=False)


def with_fields(folder: Path, **values: object) -> None:
    """Give fields of the config other values."""
    with fields(folder) as config:
        config.update(values)


def for_servers(name: str, edit: Edit, *servers: str) -> dict[str, Edit]:
    """Return an injury that each of these servers minds, by its name; that of the first has no server's."""
    shown = {"sglang": "SGLang", "peft": "PEFT"}
    return {
        name if server == servers[0] else f"{name} for {shown.get(server, server)}": replace(
            edit, options={"servers": [server]}
        )
        for server in servers
    }
