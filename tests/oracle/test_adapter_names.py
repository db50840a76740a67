"""Adapters that are not called `default`: in a folder of their name, or with the name in every tensor's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors.torch import save_file

from lora_tool.core.errors import FindingsFound
from tests.cli.calling import Caller
from tests.oracle.peft_merge import different, layout, load_model, merge_with_ours, randomise, save_base, saved_tensors

RAW = ("lora_", "modules_to_save", "original_module", "trainable_tokens_delta")
LORAS: dict[str, dict[str, Any]] = {
    "reward": {"target_modules": ["q_proj", "up_proj"]},
    "dora": {"target_modules": ["q_proj"], "use_dora": True, "modules_to_save": ["score", "norm"]},
    "embedding": {"target_modules": ["embed_tokens", "v_proj"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [1, 4]},
}


def trained(base: Path, lora: dict[str, Any], name: str) -> PeftModel:
    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, **lora)
    model = get_peft_model(load_model(base, "seq-cls"), config, adapter_name=name)
    randomise(model, seed=4)
    return model


@pytest.mark.parametrize("kind", LORAS)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
def test_a_raw_state_dict_gives_the_same_as_pefts_own_file(kind: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "seq-cls", torch.bfloat16)
    model = trained(base, LORAS[kind], "reward")
    model.save_pretrained(str(tmp_path / "saved"))
    raw = {name: tensor.clone() for name, tensor in model.state_dict().items() if any(part in name for part in RAW)}
    assert any(".reward." in name or name.endswith(".reward") for name in raw)
    (tmp_path / "raw").mkdir()
    save_file(raw, tmp_path / "raw" / "adapter_model.safetensors")
    saved = tmp_path / "saved" / "reward"
    (tmp_path / "raw" / "adapter_config.json").write_text((saved / "adapter_config.json").read_text())
    theirs = PeftModel.from_pretrained(load_model(base, "seq-cls"), saved, adapter_name="reward")
    theirs.merge_and_unload().save_pretrained(tmp_path / "theirs")
    expected = saved_tensors(tmp_path / "theirs")
    if "modules_to_save" in "".join(raw):
        with pytest.raises(FindingsFound, match="LT211 .* would fail"):  # PEFT cannot load the file, and a merge can
            merge_with_ours(base, tmp_path / "raw", tmp_path / "refused", "peft")
    for folder, ignore in ((saved, ()), (tmp_path / "raw", ("LT211",))):
        ours = saved_tensors(merge_with_ours(base, folder, tmp_path / f"ours-{folder.name}", "peft", ignore=ignore))
        assert layout(ours) == layout(expected)
        assert different(ours, expected) == []


def test_two_names_in_one_file_are_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "seq-cls", torch.bfloat16)
    model = trained(base, LORAS["reward"], "one")
    model.save_pretrained(str(tmp_path / "saved"))
    saved = tmp_path / "saved" / "one"
    tensors = saved_tensors(saved)
    named = {
        name.replace(".weight", f".{adapter}.weight") if ".lora_" in name else name: tensor.clone()
        for adapter in ("one", "two")
        for name, tensor in tensors.items()
    }
    save_file(named, saved / "adapter_model.safetensors")
    with pytest.raises(FindingsFound, match=r"LT211 .*holds 2 adapters \(one, two\)"):
        merge_with_ours(base, saved, tmp_path / "out", "float32")


def test_the_folder_above_is_enough_where_it_holds_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = Caller(capsys)
    base = save_base(tmp_path / "base", "llama", "seq-cls", torch.bfloat16)
    trained(base, LORAS["reward"], "one").save_pretrained(str(tmp_path / "saved"))
    done = call("merge", tmp_path / "saved")
    assert done.code == 0, done.err
    assert f"note: merging the adapter in {tmp_path / 'saved' / 'one'}" in done.err
    assert json.loads((tmp_path / "saved-merged" / "config.json").read_text())["id2label"]
    trained(base, LORAS["reward"], "two").save_pretrained(str(tmp_path / "saved"))
    refused = call("merge", tmp_path / "saved", "-o", tmp_path / "other")
    assert refused.code == 3
    assert "holds 2 adapters: one, two" in refused.err
