"""Bases that hold more than their model has a place for, or less: against what transformers and PEFT make of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_tool import plan_merge, verify
from lora_tool.checkpoints import AdapterDir, open_checkpoint, open_model
from lora_tool.core.errors import FindingsFound, UnsupportedAdapter
from lora_tool.core.tensors import TensorAction
from lora_tool.execution.engine import execute
from lora_tool.plans.merge.model import reading
from tests.judging import codes, judge, lines
from tests.oracle.peft_merge import (
    Table,
    changed,
    layout,
    load_model,
    merge_with_ours,
    merged_by_peft,
    require_pefts,
    require_tensors,
    save_adapter,
    save_base,
    saved_tensors,
)
from tests.oracle.peft_merge import rewrite as replace_weights
from tests.oracle.test_several_adapters import QV, plan, two_adapters
from tests.oracle.tiny import Task

# transformers warns of every stray tensor: what becomes of it is the test
pytestmark = pytest.mark.filterwarnings("ignore")
LORA = {"r": 4, "lora_alpha": 7, "target_modules": "all-linear"}
MASK = torch.ones(8, 8, dtype=torch.bool).tril().view(1, 1, 8, 8)
Change = Callable[[Table], None]


def rotary(table: Table) -> None:
    table |= {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.arange(4.0) for layer in range(2)}


def masks(table: Table) -> None:
    for layer in range(2):
        table[f"transformer.h.{layer}.attn.bias"] = MASK.clone()
        table[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)


def positions(table: Table) -> None:
    table["bert.embeddings.position_ids"] = torch.arange(16).view(1, 16)


def value_head(table: Table) -> None:
    table["v_head.summary.weight"] = torch.ones(1, 32)


def layer_too_many(table: Table) -> None:
    table |= {name.replace(".1.", ".2."): tensor.clone() for name, tensor in table.items() if ".layers.1." in name}


def in_one_layer(table: Table) -> None:
    table["model.layers.1.self_attn.q_norm.weight"] = torch.ones(8)


def of_no_float(table: Table) -> None:
    table["model.layers.0.self_attn.seen"] = torch.arange(3)


def without_a_norm(table: Table) -> None:
    del table["model.layers.1.input_layernorm.weight"]


STRAYS: dict[str, tuple[str, Change]] = {
    "rotary": ("llama", rotary),
    "masks": ("gpt2", masks),
    "positions": ("bert", positions),
    "value-head": ("qwen2", value_head),
    "layer-too-many": ("llama", layer_too_many),
    "in-one-layer": ("llama", in_one_layer),
    "of-no-float": ("llama", of_no_float),
    "fused": ("mixtral", value_head),
}


def rewrite(base: Path, change: Change, *, as_torch_file: bool = False) -> Path:
    table = saved_tensors(base)
    change(table)
    replace_weights(base, table)
    if as_torch_file:
        torch.save(table, base / "pytorch_model.bin")
        (base / "model.safetensors").unlink()
    return base


@pytest.mark.parametrize("name", STRAYS)
def test_what_the_model_has_no_place_for_is_left_out_and_told(name: str, tmp_path: Path) -> None:
    model_type, change = STRAYS[name]
    task: Task = "seq-cls" if model_type == "bert" else "causal-lm"
    base = save_base(tmp_path / "base", model_type, task, torch.bfloat16)
    lora = LORA | ({"fan_in_fan_out": True} if model_type == "gpt2" else {})
    adapter = save_adapter(tmp_path / "adapter", base, task, lora)
    held = saved_tensors(base).keys()
    rewrite(base, change, as_torch_file=name in ("rotary", "masks"))
    strays = open_model(base).tensors.keys() - held
    assert strays
    theirs = require_pefts(base, adapter, lambda: load_model(base, task))
    assert layout(saved_tensors(merge_with_ours(base, adapter, tmp_path / "float32", "float32"))) == layout(theirs)
    for folder in ("ours", "float32"):
        manifest = json.loads((tmp_path / folder / "lora_tool.json").read_text())
        dropped = {item["name"]: item["reason"] for item in manifest["leftovers"] if item["fate"] == "dropped"}
        assert strays <= dropped.keys()
        assert all("never loads" in dropped[stray] or "leaves it out too" in dropped[stray] for stray in strays)


def mtp_layer(table: Table) -> None:
    layer_too_many(table)
    table["model.layers.2.embed_tokens.weight"] = table["model.embed_tokens.weight"].clone()


def mtp_module(table: Table) -> None:
    table["mtp.fc.weight"] = torch.ones(32, 64)
    table["mtp.layers.0.mlp.experts.gate_up_proj"] = torch.ones(2, 8, 32)


FURTHER: dict[str, tuple[str, Task, Change, str]] = {
    "glm": ("glm4_moe", "causal-lm", mtp_layer, "num_nextn_predict_layers"),
    "deepseek-classifier": ("deepseek_v3", "seq-cls", mtp_layer, "num_mtp_layers"),
    "qwen3.5": ("qwen3_5_text", "causal-lm", mtp_module, "mtp_num_hidden_layers"),
    "of-a-plain-model": ("qwen2", "causal-lm", mtp_layer, "num_nextn_predict_layers"),
}


@pytest.mark.parametrize("name", FURTHER)
def test_layers_that_predict_further_tokens_stay_while_the_config_counts_them(name: str, tmp_path: Path) -> None:
    model_type, task, change, field = FURTHER[name]
    base = save_base(tmp_path / "base", model_type, task, torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", base, task, LORA | {"target_modules": ["o_proj"]})
    own = saved_tensors(base)
    rewrite(base, change)
    whole = saved_tensors(base)
    config = json.loads((base / "config.json").read_text())
    for count in (1, 0):
        (base / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0, field: count}))
        ours = merge_with_ours(base, adapter, tmp_path / str(count), "float32")
        assert saved_tensors(ours).keys() == (whole if count else own).keys()
        further = whole.keys() - own.keys()
        assert further.isdisjoint(changed(whole, saved_tensors(ours)))
        verify(ours).raise_for_errors()
    assert "LT319" not in "".join(lines(judge(tmp_path / "1")))


def published(table: Table) -> None:
    """As the first GPT-2 is: the base model's names and its masks."""
    masks(table)
    for name in list(table):
        table[name.removeprefix("transformer.")] = table.pop(name)


def as_many_rows_as_tokens(table: Table) -> None:
    rotary(table)
    assert table["model.layers.0.mlp.up_proj.weight"].shape[0] == len(table["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("model_type", "change", "sizes"),
    [
        ("llama", rotary, {}),
        ("llama", as_many_rows_as_tokens, {"intermediate_size": 96, "tie_word_embeddings": True}),
        ("gpt2", published, {}),
    ],
)
def test_a_plain_base_is_known_without_transformers(
    model_type: str, change: Change, sizes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = save_base(tmp_path / "base", model_type, "causal-lm", torch.bfloat16, **sizes)
    lora = LORA | ({"fan_in_fan_out": True} if model_type == "gpt2" else {})
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", lora)
    own = saved_tensors(base)
    rewrite(base, change)
    theirs = saved_tensors(merged_by_peft(load_model(base, "causal-lm"), adapter, tmp_path / "theirs"))
    monkeypatch.setattr(reading, "find_spec", lambda _: None)
    opened = open_checkpoint(adapter)
    assert isinstance(opened, AdapterDir)
    made = plan_merge(open_model(base), opened, precision="peft")
    assert len([item for item in made.leftovers if item.action is TensorAction.DROPPED]) == len(
        saved_tensors(base)
    ) - len(own)
    assert any(
        "left out of the base: " in note and "a buffer that transformers computes" in note for note in made.notes
    )
    require_tensors(saved_tensors(execute(made, tmp_path / "ours")), theirs)


def test_deep_asks_transformers_about_a_type_that_no_table_has(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "mixtral", "causal-lm", torch.bfloat16)
    assert any("no table of the tensors of mixtral models" in each.reason for each in judge(base).skipped)
    assert (judge(base, deep=True).skipped, lines(judge(base, deep=True))) == ((), [])
    rewrite(base, without_a_norm)
    assert codes(judge(base, deep=True)) == {"LT318"}


def test_a_head_of_another_class_is_left_out(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", LORA)
    rewrite(base, lambda table: table.update({"score.weight": torch.ones(1, 32)}))
    for precision in ("peft", "float32"):
        assert "score.weight" not in saved_tensors(merge_with_ours(base, adapter, tmp_path / precision, precision))


@pytest.mark.parametrize("precision", ["peft", "float32"])
def test_a_parameter_that_nobody_has_is_refused(precision: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", LORA | {"target_modules": ["q_proj"]})
    rewrite(base, without_a_norm)
    with pytest.raises(FindingsFound, match=r"LT515 .* has no `model\.layers\.1\.input_layernorm\.weight`"):
        merge_with_ours(base, adapter, tmp_path / precision, precision)


def test_a_module_that_a_later_adapter_saved_is_not_lost(tmp_path: Path) -> None:
    """PEFT takes saved modules from the first adapter alone, and leaves out the others' without a word."""
    base, adapters = two_adapters(tmp_path, "llama", "causal-lm", QV, QV | {"r": 2, "modules_to_save": ["norm"]})
    with pytest.raises(
        UnsupportedAdapter, match=r"of several adapters PEFT takes such modules only from the first"
    ) as caught:
        plan(base, *adapters, precision="peft")
    assert str(adapters[1]) in (caught.value.hint or "")
    assert plan(base, *adapters)
    assert plan(base, *reversed(adapters), precision="peft")
