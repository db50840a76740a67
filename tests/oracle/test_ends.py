"""The ends of a language model against PEFT: tied, untied, resized. Names, types, bits, and what the config says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, TrainableTokensConfig, get_peft_model
from transformers import (
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    PreTrainedModel,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)

from lora_tool import plan_merge, validate, verify
from lora_tool.core.errors import FindingsFound, UnsupportedAdapter
from tests.oracle.peft_merge import different, layout, load_model, merge_with_ours, randomise, save_base, saved_tensors
from tests.oracle.tiny import Task

# PEFT and transformers warn of every adapter here: what becomes of those is the test
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
Q: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
EMBED = Q | {"target_modules": ["embed_tokens", "q_proj"]}
HEAD = Q | {"target_modules": ["lm_head", "q_proj"]}
BOTH = Q | {"target_modules": ["embed_tokens", "lm_head"]}
ENSURE = {"ensure_weight_tying": True}


def train(model: PreTrainedModel, folder: Path, lora: dict[str, Any], task: Task = "causal-lm") -> Path:
    """Write an adapter as PEFT's users do, with whatever PEFT saves beside it by itself."""
    task_type = TaskType.CAUSAL_LM if task == "causal-lm" else TaskType.SEQ_CLS
    peft_model = get_peft_model(model, LoraConfig(task_type=task_type, **lora))
    randomise(peft_model, seed=8)
    peft_model.save_pretrained(str(folder))
    return folder


def merged_by_peft(model: PreTrainedModel, adapter: Path, out: Path) -> Path:
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)
    return out


def says(folder: Path) -> tuple[Any, Any]:
    config = json.loads((folder / "config.json").read_text())
    return config["tie_word_embeddings"], config["vocab_size"]


def assert_same(ours: Path, theirs: Path) -> None:
    assert layout(saved_tensors(ours)) == layout(saved_tensors(theirs))
    assert different(saved_tensors(ours), saved_tensors(theirs)) == []
    assert says(ours) == says(theirs)


def tied_base(folder: Path, model_type: str = "qwen2") -> Path:
    return save_base(folder, model_type, "causal-lm", torch.bfloat16, tie_word_embeddings=True)


def untied_copy(base: Path, folder: Path) -> Path:
    """Return the base with two matrices, as PEFT's warning says to make it, in its own type."""
    tied = load_model(base, "causal-lm")
    state = {name: tensor.clone() for name, tensor in tied.state_dict().items()}
    tied.config.tie_word_embeddings = False
    untied = type(tied)(tied.config).to(tied.dtype)
    untied.load_state_dict(state)
    untied.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "lora", [EMBED, HEAD, BOTH, EMBED | ENSURE, HEAD | ENSURE, BOTH | {"use_rslora": True}], ids=str
)
def test_untie_writes_both_ends_as_they_were_trained(lora: dict[str, Any], tmp_path: Path) -> None:
    base = tied_base(tmp_path / "base")
    adapter = train(load_model(base, "causal-lm"), tmp_path / "adapter", lora)
    if "ensure_weight_tying" not in lora:
        with pytest.raises(UnsupportedAdapter, match="ties to the other end") as refused:
            merge_with_ours(base, adapter, tmp_path / "no", "peft")
        assert "untie=True" in (refused.value.hint or "")
    ours = merge_with_ours(base, adapter, tmp_path / "ours", "peft", untie=True)
    # on two matrices PEFT needs no tying: it finds both pairs in the file
    config = json.loads((adapter / "adapter_config.json").read_text())
    if config["ensure_weight_tying"]:
        config |= {"ensure_weight_tying": False, "target_modules": ["embed_tokens", "lm_head", *lora["target_modules"]]}
        (adapter / "adapter_config.json").write_text(json.dumps(config))
    untied = load_model(untied_copy(base, tmp_path / "untied"), "causal-lm")
    assert_same(ours, merged_by_peft(untied, adapter, tmp_path / "theirs"))


@pytest.mark.parametrize("model_type", ["qwen2", "mixtral"])
@pytest.mark.parametrize("lora", [EMBED, HEAD, BOTH | {"use_rslora": True}], ids=["embedding", "output", "both"])
def test_ends_that_were_trained_as_one_stay_one_matrix(lora: dict[str, Any], model_type: str, tmp_path: Path) -> None:
    """PEFT's own merge adds the one ΔW twice; on two matrices it adds it once to each.

    Of a 16-bit base PEFT makes float32 copies of the factors, one for each end: only in float32 they are trained as one.
    """
    base = save_base(tmp_path / "base", model_type, "causal-lm", torch.float32, tie_word_embeddings=True)
    adapter = train(load_model(base, "causal-lm"), tmp_path / "adapter", lora | ENSURE)
    assert {finding.code for finding in validate(adapter, base=base).findings} <= {"LT213"}
    ours = merge_with_ours(base, adapter, tmp_path / "ours", "peft")
    assert layout(saved_tensors(ours)) == layout(saved_tensors(base))
    untied = load_model(untied_copy(base, tmp_path / "untied"), "causal-lm")
    theirs = saved_tensors(merged_by_peft(untied, adapter, tmp_path / "theirs"))
    assert different(saved_tensors(ours), {name: theirs[name] for name in saved_tensors(ours)}) == []
    verify(ours).raise_for_errors()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        trained = PeftModel.from_pretrained(load_model(base, "causal-lm"), adapter)(tokens).logits
        assert torch.allclose(trained, load_model(ours, "causal-lm")(tokens).logits, atol=1e-4)


@pytest.mark.parametrize("change", [{"use_dora": True}, {"alpha_pattern": {"embed_tokens": 16}}], ids=["DoRA", "alpha"])
def test_ends_that_differ_under_weight_tying_need_two_matrices(change: dict[str, Any], tmp_path: Path) -> None:
    base = tied_base(tmp_path / "base")
    adapter = train(load_model(base, "causal-lm"), tmp_path / "adapter", EMBED | ENSURE | change)
    assert "LT508" in {finding.code for finding in validate(adapter, base=base).findings}
    with pytest.raises(UnsupportedAdapter, match="ties to the other end"):
        merge_with_ours(base, adapter, tmp_path / "no", "peft")


def test_an_end_that_peft_drops_on_loading_is_merged_as_it_was_trained(tmp_path: Path) -> None:
    """PEFT knows tied ends by two names, and saves GPT-2's under a third: the output layer's LoRA is not loaded."""
    base = save_base(tmp_path / "base", "gpt2", "causal-lm", torch.float32, tie_word_embeddings=True)
    lora: dict[str, Any] = {"r": 4, "target_modules": ["lm_head"], "ensure_weight_tying": True}
    model = get_peft_model(load_model(base, "causal-lm"), LoraConfig(task_type=TaskType.CAUSAL_LM, **lora))
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(8)) * 0.1)
        trained = model(torch.arange(12)[None]).logits
    model.save_pretrained(str(tmp_path / "adapter"))
    loaded = PeftModel.from_pretrained(load_model(base, "causal-lm"), tmp_path / "adapter")
    assert not any("lm_head.lora" in name for name in loaded.state_dict())
    told = {finding.code for finding in validate(tmp_path / "adapter", base=base).findings}
    assert "LT207" in told
    for untie in (False, True):
        plan = plan_merge(base, tmp_path / "adapter", untie=untie)
        assert "LT207" in {finding.code for finding in plan.findings}
        out = merge_with_ours(base, tmp_path / "adapter", tmp_path / f"{untie}", "float32", untie=untie)
        with torch.no_grad():
            assert torch.allclose(trained, load_model(out, "causal-lm")(torch.arange(12)[None]).logits, atol=1e-4)


@pytest.mark.parametrize(("named", "tied"), [("lm_head", True), ("wte", False)])
def test_an_end_is_saved_as_one_with_the_other_where_peft_knows_its_name(
    named: str, tmp_path: Path, *, tied: bool
) -> None:
    """Under `ensure_weight_tying` PEFT looks for two names before it ties, and saves both ends if it does."""
    base = save_base(tmp_path / "base", "gpt2", "causal-lm", torch.float32, tie_word_embeddings=True)
    lora: dict[str, Any] = {"r": 4, "modules_to_save": [named], "ensure_weight_tying": True}
    model = get_peft_model(load_model(base, "causal-lm"), LoraConfig(task_type=TaskType.CAUSAL_LM, **lora))
    randomise(model, seed=8)
    model.save_pretrained(str(tmp_path / "adapter"))
    out = merge_with_ours(base, tmp_path / "adapter", tmp_path / "out", "float32")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is tied
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, load_model(out, "causal-lm")(tokens).logits, atol=1e-4)


@pytest.mark.parametrize(
    ("lora", "untie"),
    [
        ({"trainable_token_indices": {"word_embeddings": [1, 2]}}, True),
        ({"modules_to_save": ["decoder.cls.predictions.decoder"]} | ENSURE, False),
    ],
    ids=["tokens", "saved"],
)
def test_ends_that_peft_does_not_take_for_tied_are_written_apart(
    lora: dict[str, Any], tmp_path: Path, *, untie: bool
) -> None:
    """PEFT ties trained tokens if the outermost config says so, which this class's does not, and ends of two names."""
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    config = EncoderDecoderConfig.from_encoder_decoder_configs(BertConfig(**sizes), BertConfig(**sizes))
    base = EncoderDecoderModel(config).eval()
    base.save_pretrained(tmp_path / "base")
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["query"], **lora)).eval()
    randomise(model, seed=8)
    model.save_pretrained(str(tmp_path / "adapter"))
    if untie:
        with pytest.raises(UnsupportedAdapter, match="would change both ends"):
            plan_merge(tmp_path / "base", tmp_path / "adapter")
    out = merge_with_ours(tmp_path / "base", tmp_path / "adapter", tmp_path / "out", "float32", untie=untie)
    inputs = {"input_ids": torch.arange(5)[None], "decoder_input_ids": torch.arange(5)[None]}
    with torch.no_grad():
        merged = EncoderDecoderModel.from_pretrained(out).eval()(**inputs).logits
        assert torch.allclose(model(**inputs).logits, merged, atol=1e-5)


@pytest.mark.parametrize(
    "lora",
    [
        Q | ENSURE,
        Q | ENSURE | {"modules_to_save": ["embed_tokens"]},
        Q | ENSURE | {"modules_to_save": ["lm_head"]},
        Q | ENSURE | {"trainable_token_indices": [1, 5]},
        Q | {"trainable_token_indices": {"embed_tokens": [1, 5], "lm_head": [1, 5]}} | ENSURE,
        EMBED | {"modules_to_save": ["lm_head"]},
        HEAD | {"modules_to_save": ["embed_tokens"]},
    ],
    ids=str,
)
def test_ends_that_peft_keeps_right_are_merged_as_it_does(lora: dict[str, Any], tmp_path: Path) -> None:
    base = tied_base(tmp_path / "base")
    adapter = train(load_model(base, "causal-lm"), tmp_path / "adapter", lora)
    theirs = merged_by_peft(load_model(base, "causal-lm"), adapter, tmp_path / "theirs")
    assert_same(merge_with_ours(base, adapter, tmp_path / "ours", "peft"), theirs)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("targets", [["embed_tokens"], None], ids=str)
def test_an_adapter_of_trained_tokens_alone(tied: bool, targets: list[str] | None, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen2", "causal-lm", torch.bfloat16, tie_word_embeddings=tied)
    config = TrainableTokensConfig(token_indices=[1, 5], target_modules=targets, task_type=TaskType.CAUSAL_LM)
    model = get_peft_model(load_model(base, "causal-lm"), config)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(8)))
    model.save_pretrained(str(tmp_path / "adapter"))
    theirs = merged_by_peft(load_model(base, "causal-lm"), tmp_path / "adapter", tmp_path / "theirs")
    assert_same(merge_with_ours(base, tmp_path / "adapter", tmp_path / "ours", "peft"), theirs)
    assert validate(tmp_path / "adapter", base=base).findings == ()


RESIZED: dict[str, dict[str, Any]] = {
    "plain": Q,
    "saved-both": Q | {"modules_to_save": ["embed_tokens", "lm_head"]},
    "saved-embedding": Q | {"modules_to_save": ["embed_tokens"]},
    "tokens": Q | {"trainable_token_indices": [1, 87]},
    "tokens-of-both": Q | {"trainable_token_indices": {"embed_tokens": [1, 87], "lm_head": [1, 87]}} | ENSURE,
}


def resized(base: Path, rows: int, task: Task = "causal-lm") -> PreTrainedModel:
    model = load_model(base, task)
    model.resize_token_embeddings(rows)
    return model


@pytest.mark.parametrize("rows", [104, 88], ids=["grown", "shrunk"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", RESIZED)
def test_the_vocabulary_follows_the_adapter(name: str, tied: bool, rows: int, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen2", "causal-lm", torch.bfloat16, tie_word_embeddings=tied)
    adapter = train(resized(base, rows), tmp_path / "adapter", RESIZED[name])
    theirs = merged_by_peft(resized(base, rows), adapter, tmp_path / "theirs")
    ours = merge_with_ours(base, adapter, tmp_path / "ours", "peft")
    assert_same(ours, theirs)
    assert says(ours)[1] == rows


def test_lora_on_a_grown_embedding(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.bfloat16, tie_word_embeddings=False)
    adapter = train(resized(base, 104), tmp_path / "adapter", EMBED)
    with pytest.raises(FindingsFound, match=r"LT504 .* the adapter has no new rows for `lm_head\.weight`"):
        merge_with_ours(base, adapter, tmp_path / "no", "peft")
    both = train(resized(base, 104), tmp_path / "both", BOTH)
    theirs = merged_by_peft(resized(base, 104), both, tmp_path / "theirs")
    assert_same(merge_with_ours(base, both, tmp_path / "ours", "peft"), theirs)


def test_lora_on_a_shrunk_embedding_cuts_the_other_end(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.bfloat16, tie_word_embeddings=False)
    adapter = train(resized(base, 88), tmp_path / "adapter", EMBED)
    theirs = merged_by_peft(resized(base, 88), adapter, tmp_path / "theirs")
    assert_same(merge_with_ours(base, adapter, tmp_path / "ours", "peft"), theirs)


@pytest.mark.parametrize("model_type", ["gpt2", "phi", "gpt_neox", "mixtral"])
def test_other_names_and_biases(model_type: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", model_type, "causal-lm", torch.float32)
    targets = ["q_proj"] if model_type == "mixtral" else "all-linear"
    lora = {"r": 4, "target_modules": targets, "fan_in_fan_out": model_type == "gpt2"}
    adapter = train(resized(base, 88), tmp_path / "adapter", lora)
    theirs = merged_by_peft(resized(base, 88), adapter, tmp_path / "theirs")
    assert_same(merge_with_ours(base, adapter, tmp_path / "ours", "peft"), theirs)


def test_a_reward_model_with_new_tokens(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen2", "causal-lm", torch.bfloat16, tie_word_embeddings=True)
    adapter = train(resized(base, 104, "seq-cls"), tmp_path / "adapter", Q, "seq-cls")
    theirs = merged_by_peft(resized(base, 104, "seq-cls"), adapter, tmp_path / "theirs")
    ours = merge_with_ours(base, adapter, tmp_path / "ours", "peft")
    assert_same(ours, theirs)


def test_a_base_whose_config_says_tied_and_whose_files_say_not(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen2", "causal-lm", torch.bfloat16, tie_word_embeddings=False)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    adapter = train(load_model(base, "causal-lm"), tmp_path / "adapter", BOTH)
    theirs = merged_by_peft(load_model(base, "causal-lm"), adapter, tmp_path / "theirs")
    assert_same(merge_with_ours(base, adapter, tmp_path / "ours", "peft"), theirs)


def test_biases_that_are_tied_are_saved_once(tmp_path: Path) -> None:
    """`bias="all"` saves BERT's tied output bias under both of its names."""
    base = save_base(tmp_path / "base", "roberta", "causal-lm", torch.bfloat16)
    adapter = train(
        load_model(base, "causal-lm"), tmp_path / "adapter", Q | {"target_modules": ["query"], "bias": "all"}
    )
    assert "base_model.model.lm_head.decoder.bias" in saved_tensors(adapter)
    theirs = merged_by_peft(load_model(base, "causal-lm"), adapter, tmp_path / "theirs")
    assert_same(merge_with_ours(base, adapter, tmp_path / "ours", "peft"), theirs)


def test_an_end_that_was_not_resized_with_the_others_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "bart", "seq-cls", torch.bfloat16, tie_word_embeddings=False)
    model = load_model(base, "seq-cls")
    model.resize_token_embeddings(101, mean_resizing=False)
    adapter = train(model, tmp_path / "adapter", Q, task="seq-cls")
    with pytest.raises(FindingsFound, match=r"LT504 .* the adapter has no new rows for `model\.decoder"):
        merge_with_ours(base, adapter, tmp_path / "ours", "peft")


def test_the_layer_in_t5gemmas_lm_head_is_its_output_layer(tmp_path: Path) -> None:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
    stack = sizes | {"intermediate_size": 16, "num_key_value_heads": 1, "pad_token_id": 0}
    model = T5GemmaForConditionalGeneration(T5GemmaConfig(encoder=stack, decoder=stack, vocab_size=32))
    model.save_pretrained(tmp_path / "base")
    lora = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head.out_proj"])
    get_peft_model(model, lora).save_pretrained(str(tmp_path / "adapter"))
    assert "LT506" not in {finding.code for finding in validate(tmp_path / "adapter", base=tmp_path / "base").findings}
