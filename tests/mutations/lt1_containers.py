"""LT1xx: the files themselves."""

from __future__ import annotations

import json
import os
import shutil
from collections import OrderedDict
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests import checkpoint_edits as edit
from tests.checkpoint_edits import CONFIG, INDEX, WEIGHTS, fields
from tests.mutations import places
from tests.mutations.registry import CAUSAL, REWARD, RUN, SHARDED, Edit, breaks, enter


@breaks("LT101", CAUSAL)
def _truncated(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-100])


@breaks("LT103", CAUSAL)
def _hole(folder: Path) -> None:
    header, data = edit.read_parts(folder / WEIGHTS)
    del header[f"{places.Q_PROJ}.lora_B.weight"]
    edit.write_parts(folder / WEIGHTS, header, data)


@breaks("LT104", CAUSAL)
def _overlap(folder: Path) -> None:
    header, data = edit.read_parts(folder / WEIGHTS)
    table = sorted((entry for name, entry in header.items() if name != "__metadata__"), key=lambda e: e["data_offsets"])
    for entry in table[1:]:
        entry["data_offsets"] = [at - 8 for at in entry["data_offsets"]]
    edit.write_parts(folder / WEIGHTS, header, data[:-8])


@breaks("LT105", CAUSAL)
def _duplicate_tensor(folder: Path) -> None:
    header, data = edit.read_parts(folder / WEIGHTS)
    text = json.dumps(header)
    name = f"{places.Q_PROJ}.lora_A.weight"
    entry = json.dumps({name: header[name]})[1:-1]
    edit.write_parts(folder / WEIGHTS, text[:-1] + ", " + entry + "}", data)


@breaks("LT105 in the config", CAUSAL)
def _duplicate_field(folder: Path) -> None:
    text = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(text.replace("{", '{"r": 8,', 1))


@breaks("LT106", CAUSAL)
def _wrong_size(folder: Path) -> None:
    header, data = edit.read_parts(folder / WEIGHTS)
    header[f"{places.Q_PROJ}.lora_A.weight"]["dtype"] = "BF16"
    edit.write_parts(folder / WEIGHTS, header, data)


@breaks("LT108", SHARDED)
def _shard_outside(folder: Path) -> None:
    with fields(folder, INDEX) as index:
        index["weight_map"]["lm_head.weight"] = "../other/model.safetensors"


@breaks("LT109", SHARDED)
def _not_in_index(folder: Path) -> None:
    with fields(folder, INDEX) as index:
        del index["weight_map"]["model.norm.weight"]


@breaks("LT109 in another shard", SHARDED)
def _elsewhere(folder: Path) -> None:
    with fields(folder, INDEX) as index:
        index["weight_map"]["model.norm.weight"] = "model-00001-of-00002.safetensors"


@breaks("LT111", SHARDED)
def _total_size(folder: Path) -> None:
    with fields(folder, INDEX) as index:
        index["metadata"]["total_size"] = len(index["weight_map"])


@breaks("LT112", CAUSAL)
def _link_out(folder: Path) -> None:
    outside = folder.parent / "elsewhere.safetensors"
    (folder / WEIGHTS).rename(outside)
    (folder / WEIGHTS).symlink_to(outside)


@breaks("LT112 of a file that is copied", REWARD)
def _tokenizer_out(folder: Path) -> None:
    outside = folder.parent / "elsewhere.json"
    (folder / "tokenizer_config.json").rename(outside)
    (folder / "tokenizer_config.json").symlink_to(outside)


@breaks("LT113 tokenizer", REWARD)
def _cut_tokenizer(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(text[: len(text) // 2])


@breaks("LT116", CAUSAL)
def _foreign_call(folder: Path) -> None:
    weights = OrderedDict(load_file(folder / WEIGHTS))
    vars(weights)["_metadata"] = os.system
    torch.save(weights, folder / "adapter_model.bin")
    (folder / WEIGHTS).unlink()


EDITS = {
    "LT102": Edit(CAUSAL, written={WEIGHTS: "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4632\n"}),
    "LT107": Edit(SHARDED, gone=["model-00002-of-00002.safetensors"]),
    "LT110": Edit(
        CAUSAL, by=lambda folder: (folder / "adapter_model.bin").write_bytes(b"\x80\x02}q\x00."), gone=[WEIGHTS]
    ),
    "LT110 readable": Edit(
        CAUSAL, by=lambda folder: torch.save(load_file(folder / WEIGHTS), folder / "adapter_model.bin"), gone=[WEIGHTS]
    ),
    "LT116 beside the weights": Edit(
        CAUSAL, by=lambda folder: (folder / "training_args.bin").write_bytes(b"\x80\x02cposix\nsystem\n)R.")
    ),
    "LT113": Edit(CAUSAL, written={CONFIG: ""}),
    "LT113 trainer state": Edit(RUN, written={"trainer_state.json": '{"global_step": 2, "log_hist'}),
    "LT114": Edit(
        SHARDED,
        by=lambda folder: shutil.copy(
            folder / "model-00001-of-00002.safetensors", folder / "model-00005-of-00005.safetensors"
        ),
    ),
    "LT115": Edit(CAUSAL, gone=[WEIGHTS]),
    "LT113 large tokenizer": Edit(CAUSAL, written={"tokenizer.json": '{"model": "' + "x" * 2000000}),
    "LT113 tokenizer's config": Edit(SHARDED, written={"tokenizer_config.json": ""}),
    "LT113 manifest": Edit(CAUSAL, written={"lora_tool.json": '{"schema_version": '}),
    "LT115 shards": Edit(
        CAUSAL,
        by=lambda folder: (folder / WEIGHTS).rename(folder / "adapter_model-00001-of-00002.safetensors"),
        written={f"{WEIGHTS}.index.json": '{"weight_map": {}}'},
    ),
    "LT113 of the base": Edit(
        CAUSAL,
        by=lambda folder: (folder.parent / "base" / "generation_config.json").write_text('{"eos_token_id": '),
        with_base=True,
    ),
}
enter(__name__, EDITS)
