"""LT507 to LT511, LT520 and LT521: a base that fits and is the wrong one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from lora_tool.checkpoints import open_model
from lora_tool.formats.manifest import fingerprint
from tests import checkpoint_edits as edit
from tests.checkpoint_edits import INDEX, fields, lora, tensors, trained_tokens
from tests.mutations.registry import CAUSAL, Edit, breaks, enter, merged_in


def record(folder: Path, base: Path) -> None:
    """Write what `lora-tool train` writes beside an adapter that it trained on the model `base`."""
    weights = open_model(base).weights
    table = {
        "schema_version": 1,
        "base": {"hub_id": "some/model", "revision": None, "fingerprint": fingerprint(weights)},
    }
    (folder / "lora_tool_train.json").write_text(json.dumps(table))


@breaks("LT507", CAUSAL, with_base=True)
def _other_base(folder: Path) -> None:
    base = folder.parent / "base"
    record(folder, base)
    name = "model-00001-of-00002.safetensors"
    with tensors(base, name) as table:
        first = next(iter(table))
        table[first] = edit.scrambled(table[first])


@breaks("LT520", CAUSAL, with_base=True)
def _base_that_is_not_named(folder: Path) -> None:
    shutil.copytree(folder.parent / "base", folder.parent / "named")
    with tensors(folder.parent / "base", "model-00001-of-00002.safetensors") as table:
        first = next(iter(table))
        table[first] = edit.scrambled(table[first])
    with fields(folder) as config:
        config["base_model_name_or_path"] = str(folder.parent / "named")


@breaks("LT510", CAUSAL, with_base=True)
def _base_of_experts(folder: Path) -> None:
    base = folder.parent / "base"
    with fields(base, "config.json") as config:
        config |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    for path in base.glob("*.safetensors"):
        held = edit.read(path)
        edit.write(path, {name.replace(".mlp.", ".block_sparse_moe.experts.0."): held[name] for name in held})
    index = base / INDEX
    index.write_text(index.read_text().replace(".mlp.", ".block_sparse_moe.experts.0."))


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
        quiet=True,
    ),
    "LT521": Edit(
        CAUSAL,
        by=lambda folder: shutil.copytree(folder.parent / "base", folder.parent / "llama"),
        config={"base_model_name_or_path": "/where/it/was/trained/llama"},
        quiet=True,
    ),
    "LT521 windows": Edit(
        CAUSAL,
        by=lambda folder: shutil.copytree(folder.parent / "base", folder.parent / "llama"),
        config={"base_model_name_or_path": "C:\\models\\llama"},
        quiet=True,
    ),
    "LT507 unreadable": Edit(CAUSAL, written={"lora_tool_train.json": "[]"}),
    "LT509": Edit(CAUSAL, by=lambda folder: trained_tokens(folder, [304], rows=1), with_base=True),
}
enter(__name__, EDITS)
