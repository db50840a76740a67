"""Adapters that PEFT wrote, whatever feature they use: no rule complains, and a merge writes PEFT's bits or names why not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import transformers
from peft import PeftModel

from lora_tool.core.errors import LoraToolError
from tests.judging import judge, lines
from tests.oracle.good_adapters import GOOD, make
from tests.oracle.peft_merge import merge_with_ours, require_same

SERVED_OTHERWISE = ("pissa-niter", "lora-ga", "corda")
"""Inits that change the base, and that PEFT repeats with random numbers, does not repeat, and cannot repeat."""
REFUSED: Mapping[str, str] = {
    "tied-output": "ties to the other end",
    "mamba": "ties to the other end",
    "shared-embeddings": "is one layer in several places",
    "matrix-parameters-olora": "olora with `target_parameters`",
    "pissa-niter": "its randomised SVD",
    "corda": "covariances",
    "lora-ga": "gradients",
    "loftq": "PEFT changes the base weights when it builds the layer",
    "layer-replication": "layer replication",
    "activated": "activated LoRA",
    "block-diagonal": "block-diagonal LoRA",
    "kasa": "KaSA",
}


@pytest.mark.filterwarnings("ignore")  # PEFT warns of tied ends
@pytest.mark.parametrize("name", GOOD)
def test_no_rule_complains_and_the_merge_is_pefts(name: str, tmp_path: Path) -> None:
    adapter, base = make(name, tmp_path)
    assert lines(judge(adapter, servers=[] if name in SERVED_OTHERWISE else ["peft"])) == []
    if base is None:
        return
    assert lines(judge(base)) == []
    assert lines(judge(adapter, base=base)) == []
    if name in REFUSED:
        with pytest.raises(LoraToolError, match=REFUSED[name]):
            merge_with_ours(base, adapter, tmp_path / "ours", "peft")
        return
    (class_name,) = json.loads((base / "config.json").read_text())["architectures"]
    model = getattr(transformers, class_name).from_pretrained(base, dtype="auto")
    if GOOD[name].vocabulary is not None:
        model.resize_token_embeddings(GOOD[name].vocabulary)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(tmp_path / "theirs")
    require_same(merge_with_ours(base, adapter, tmp_path / "ours", "peft"), tmp_path / "theirs")


def test_what_is_refused_is_there() -> None:
    assert GOOD.keys() >= REFUSED.keys()
