"""LT601 to LT604, LT613, LT615 to LT617: names, shapes and JSON files of a merged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.checkpoint_edits import PREFIX, Raw, fields, raw
from tests.mutations.merged_models import NORM, Q_PROJ, SCORE, numbers, stored, weights, without_manifest
from tests.mutations.registry import CAUSAL_MERGED, MERGED, Edit, breaks, enter


@breaks("LT601", MERGED, verified=True)
def _unmerged(folder: Path) -> None:
    with weights(folder) as table:
        table[f"{PREFIX}{Q_PROJ}.lora_A.weight"] = raw(4, 16)


@breaks("LT602", MERGED, verified=True)
def _missing(folder: Path) -> None:
    with weights(folder) as table:
        del table[NORM]


@breaks("LT604 other type", MERGED, verified=True, quiet=True)
def _other_type(folder: Path) -> None:
    with weights(folder) as table:
        for name, tensor in table.items():
            table[name] = stored(numbers(tensor), Raw("F32", tensor.shape, b""))
    with fields(folder, "lora_tool.json") as manifest:
        manifest["operation"] = "something else"


@breaks("LT613", MERGED, verified=True)
def _no_head(folder: Path) -> None:
    with weights(folder) as table:
        del table[SCORE]
    with fields(folder, "config.json") as config:
        config["architectures"] = ["Qwen2ForCausalLM"]


@breaks("LT615", MERGED, verified=True)
def _no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with fields(folder, "tokenizer_config.json") as config:
        config.pop("chat_template", None)


@breaks("LT616", MERGED, verified=True)
def _other_rotary_base(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["rope_parameters"]["rope_theta"] = 500000.0


@breaks("LT617", MERGED, verified=True)
def _other_base_recorded(folder: Path) -> None:
    with fields(folder, "lora_tool.json") as manifest:
        inputs: dict[str, Any] = manifest["inputs"]
        inputs["base"]["fingerprint"] = "0" * 64


@breaks("LT615 no tokenizer", MERGED, with_base=True, adapters=())
def _no_tokenizer(folder: Path) -> None:
    without_manifest(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)


EDITS = {
    "LT602 by the manifest": Edit(MERGED, by=_missing),
    "LT603": Edit(MERGED, tensors={"v_head.summary.weight": raw(1, 16)}, verified=True),
    "LT604": Edit(MERGED, tensors={NORM: raw(8, dtype="BF16")}, verified=True),
    "LT613 by the manifest": Edit(MERGED, by=_no_head),
    "LT616 class": Edit(CAUSAL_MERGED, file="config.json", config={"architectures": ["LlamaModel"]}, verified=True),
    "LT616 no class": Edit(MERGED, file="config.json", without=["architectures"], verified=True),
    "LT616 beside the base": Edit(
        CAUSAL_MERGED,
        by=without_manifest,
        file="config.json",
        config={"rms_norm_eps": 1.0},
        with_base=True,
        options={"adapters": ()},
    ),
}
enter(__name__, EDITS)
