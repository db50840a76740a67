"""LT507, LT520 and LT521: another base than the one that the adapter was trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from lora_tool.checkpoints import open_model
from lora_tool.formats.manifest import fingerprint
from tests import checkpoint_edits as edit
from tests.checkpoint_edits import fields, tensors
from tests.mutations.registry import CAUSAL, Edit, breaks, enter


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


EDITS = {
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
    "LT520 by its name": Edit(CAUSAL, config={"base_model_name_or_path": "mistralai/Mistral-7B-v0.3"}, with_base=True),
    "LT520 by the class": Edit(
        CAUSAL,
        config={
            "base_model_name_or_path": "/lost",
            "auto_mapping": {"base_model_class": "GemmaForCausalLM", "parent_library": "transformers.models.gemma"},
        },
        with_base=True,
    ),
    "LT520 by the config beside it": Edit(
        CAUSAL,
        written={"config.json": '{"model_type": "mistral"}'},
        config={"base_model_name_or_path": "/lost"},
        with_base=True,
    ),
}
enter(__name__, EDITS)
