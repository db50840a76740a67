"""LT508 to LT511: a base that fits and is the wrong one."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.checkpoint_edits import fields, lora, renamed_in_model, trained_tokens
from tests.mutations.registry import CAUSAL, Edit, breaks, enter, merged_in


@breaks("LT510", CAUSAL, with_base=True)
def _base_of_experts(folder: Path) -> None:
    base = folder.parent / "base"
    with fields(base, "config.json") as config:
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    renamed_in_model(base, ".mlp.", ".block_sparse_moe.experts.0.")


@breaks("LT511", CAUSAL, with_base=True)
def _base_that_holds_it(folder: Path) -> None:
    merged = merged_in(folder.parent)
    shutil.rmtree(folder.parent / "base")
    merged.rename(folder.parent / "base")


EDITS = {
    "LT508": Edit(
        CAUSAL,
        base={"tie_word_embeddings": True},
        target="lm_head",
        tensors=lora("lm_head", rows=304, columns=16),
        with_base=True,
    ),
    "LT509": Edit(CAUSAL, by=lambda folder: trained_tokens(folder, [304], rows=1), with_base=True),
}
enter(__name__, EDITS)
