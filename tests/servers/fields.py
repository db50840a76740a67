"""The fields of adapter_config.json that change what an adapter computes, and which of them a program reads."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ASKED: dict[str, Any] = {
    "alora_invocation_tokens": [1],
    "alpha_pattern": {"q_proj": 1},
    "arrow_config": {"top_k": 1},
    "bias": "all",
    "init_lora_weights": "pissa",
    "kasa_config": {"beta": 1},
    "layer_replication": [[0, 1], [0, 1]],
    "lora_bias": True,
    "megatron_config": {"a": 1},
    "modules_to_save": ["lm_head"],
    "monteclora_config": {"a": 1},
    "rank_pattern": {"q_proj": 1},
    "use_bdlora": {"a": 1},
    "use_dora": True,
    "use_qalora": True,
    "use_rslora": True,
    "velora_config": {"a": 1},
}
"""Fields of adapter_config.json, each with a value that changes what an adapter computes."""
BY_TENSORS = frozenset({"bias", "lora_bias", "modules_to_save", "trainable_token_indices", "use_dora"})
"""Those that also show in the names of tensors, so that a program may refuse them without reading the field."""


def unread(files: Iterable[Path]) -> dict[str, str | None]:
    """Return "ignores" for each field whose name stands nowhere in these files as a text, None for the others.

    Left out are those that also show in the names of tensors.
    """
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in files)
    texts = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return {name: None if name in texts else "ignores" for name in sorted(ASKED.keys() - BY_TENSORS)}
