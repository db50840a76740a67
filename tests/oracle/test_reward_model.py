"""A reward adapter on a causal LM: the merged folder loads whole, scores as PEFT's merge does, and says so in its config."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, pipeline

from lora_tool import plan_merge
from lora_tool.checkpoints import MERGED_MODEL, AdapterDir, open_checkpoint, open_model
from lora_tool.core.tensors import DType
from tests.mutations import MERGED, copy_of
from tests.oracle.peft_merge import (
    different,
    merge_with_ours,
    merge_with_peft,
    require_same,
    save_adapter,
    save_base,
    saved_tensors,
)

FIXTURE = Path(__file__).parents[2] / "fixtures" / "reward-qwen2"
LORA = {"r": 4, "lora_alpha": 7, "target_modules": "all-linear"}


def load_whole(folder: Path) -> PreTrainedModel:
    """Return the classifier, after checking that transformers missed and invented nothing."""
    model, info = AutoModelForSequenceClassification.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def scores(model: PreTrainedModel) -> torch.Tensor:
    """Return the scores of a batch of two texts, the second one padded."""
    pad = model.config.pad_token_id
    texts = torch.tensor([[5, 6, 7, 8, 9], [11, 12, 13, pad, pad]])
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=texts, attention_mask=(texts != pad).long()).logits
    return logits


@pytest.mark.parametrize(
    ("model_type", "dtype", "options", "num_labels"),
    [
        ("qwen2", torch.float32, {"tie_word_embeddings": True}, 1),
        ("qwen2", torch.bfloat16, {"tie_word_embeddings": False}, 1),
        ("llama", torch.float16, {"tie_word_embeddings": True}, 1),
        ("gemma2", torch.bfloat16, {}, 1),
        ("opt", torch.float32, {}, 1),
        ("roberta", torch.float32, {}, 1),
        ("gpt2", torch.bfloat16, {}, 5),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_it_is_pefts_reward_model(
    model_type: str, dtype: torch.dtype, options: dict[str, Any], num_labels: int, tmp_path: Path
) -> None:
    base = save_base(tmp_path / "base", model_type, "causal-lm", dtype, **options)
    lora = {**LORA, "fan_in_fan_out": model_type == "gpt2"}
    adapter = save_adapter(tmp_path / "adapter", base, "seq-cls", lora, num_labels=num_labels)
    theirs = merge_with_peft(base, adapter, tmp_path / "theirs", "seq-cls", num_labels)
    task = "reward" if num_labels == 1 else "seq-cls"
    ours = merge_with_ours(base, adapter, tmp_path / "ours", "peft", task=task, num_labels=num_labels)

    require_same(ours, theirs)
    assert config_of(ours) == config_of(theirs)
    model, other = load_whole(ours), load_whole(theirs)
    assert model.config.num_labels == num_labels
    assert not different(dict(model.state_dict()), dict(other.state_dict()))
    logits = scores(model)
    assert logits.shape == (2, num_labels)
    # the same weights: where they lie in memory decides which kernel torch takes, and with it the last bits
    torch.testing.assert_close(logits, scores(other), rtol=1e-5, atol=1e-6)
    assert not (ours / "generation_config.json").exists()


@pytest.mark.parametrize("precision", ["float32", "peft", "float64"])
def test_the_fixture_merges_into_a_model_that_prefers_the_better_answer(precision: str, tmp_path: Path) -> None:
    merged = merge_with_ours(FIXTURE / "base", FIXTURE / "adapter", tmp_path / "reward", precision, task="reward")
    assert open_checkpoint(merged).kind is MERGED_MODEL
    assert not open_checkpoint(merged).problems
    model = load_whole(merged)
    tokenizer = AutoTokenizer.from_pretrained(merged)
    assert model.config.num_labels == 1
    assert model.config.pad_token_id == tokenizer.pad_token_id is not None
    chats = [
        [{"role": "user", "content": "What is 2 plus 3?"}, {"role": "assistant", "content": answer}]
        for answer in ("The sum is 5.", "I guess it is 9.")
    ]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    with torch.no_grad():
        better, worse = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits.flatten().tolist()
    assert better > worse


def test_every_file_of_the_tokenizer_is_the_adapters_byte_for_byte(tmp_path: Path) -> None:
    merged = merge_with_ours(FIXTURE / "base", FIXTURE / "adapter", tmp_path / "reward", "float32")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (merged / name).read_bytes() == (FIXTURE / "adapter" / name).read_bytes()


def test_the_index_tells_the_true_size(tmp_path: Path) -> None:
    merged = merge_with_ours(FIXTURE / "base", FIXTURE / "adapter", tmp_path / "reward", "float32")
    index = json.loads((merged / "model.safetensors.index.json").read_text())
    table = saved_tensors(merged)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in table.values())
    assert index["weight_map"].keys() == table.keys()
    assert "lm_head.weight" not in table
    assert table["score.weight"].shape[0] == 1


def test_the_kind_of_problem_of_the_bases_own_labels_is_not_the_reward_models(tmp_path: Path) -> None:
    """One label cannot be loaded with it."""
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", base, "seq-cls", LORA, num_labels=1)
    (base / "config.json").write_text(json.dumps({**config_of(base), "problem_type": "single_label_classification"}))
    merged = merge_with_ours(base, adapter, tmp_path / "merged", "float32", task="reward")
    assert load_whole(merged).config.problem_type is None


def test_weights_of_another_type_than_the_config_says_are_named(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.bfloat16)
    adapter = save_adapter(tmp_path / "adapter", base, "seq-cls", LORA, num_labels=1)
    (base / "config.json").write_text(json.dumps({**config_of(base), "dtype": "float32"}))
    opened = open_checkpoint(adapter)
    assert isinstance(opened, AdapterDir)
    (warning,) = plan_merge(open_model(base), opened).warnings
    assert 'says float32, but the weights are BF16 and keep that dtype; `dtype="float32"` merges' in warning
    theirs = merge_with_peft(base, adapter, tmp_path / "theirs", "seq-cls", 1)
    require_same(merge_with_ours(base, adapter, tmp_path / "ours", "peft", dtype=DType.F32), theirs)
    assert not plan_merge(open_model(base), opened, dtype=DType.F32).warnings


@pytest.mark.parametrize(("model_type", "precision"), [("llama", "float32"), ("bert", "peft")])
def test_a_head_takes_the_place_of_one_of_another_size(model_type: str, precision: str, tmp_path: Path) -> None:
    """The base is a classifier of 7 labels with weight and, in BERT, bias; the adapter's has one."""
    base = save_base(tmp_path / "base", model_type, "seq-cls", torch.bfloat16)
    model = AutoModelForSequenceClassification.from_pretrained(
        base, dtype="auto", num_labels=1, ignore_mismatched_sizes=True
    )
    targets = ["q_proj", "query"]
    peft_model = get_peft_model(model, LoraConfig(r=2, target_modules=targets, task_type="SEQ_CLS"))
    peft_model.save_pretrained(str(tmp_path / "adapter"))
    untrained = {"ignore": ["LT208"]}
    merged = load_whole(merge_with_ours(base, tmp_path / "adapter", tmp_path / "merged", precision, **untrained))
    assert merged.config.num_labels == 1
    theirs = peft_model.merge_and_unload().state_dict()
    assert not different(dict(merged.state_dict()), {name: theirs[name] for name in merged.state_dict()})


@pytest.mark.parametrize("told", [False, True])
def test_the_pipeline_of_transformers_gives_the_reward_where_it_is_told_to(told: bool, tmp_path: Path) -> None:
    folder = copy_of(MERGED, tmp_path)
    config = config_of(folder) | ({"problem_type": "regression"} if told else {})
    (folder / "config.json").write_text(json.dumps(config))
    model, tokenizer = load_whole(folder), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        reward = model(**tokenizer("a text", return_tensors="pt")).logits[0, 0].float()
    classify = pipeline("text-classification", model=model, tokenizer=tokenizer)
    by_default = reward if told else reward.sigmoid()
    assert classify("a text")[0]["score"] == pytest.approx(float(by_default), abs=1e-3)
    assert classify("a text", function_to_apply="none")[0]["score"] == pytest.approx(float(reward), abs=1e-3)
