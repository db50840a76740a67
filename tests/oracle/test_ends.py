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
from tests.oracle.adapter_cases import Case, case
from tests.oracle.peft_merge import (
    FP32,
    different,
    layout,
    load_model,
    merge_with_ours,
    merged_by_peft,
    randomise,
    require_pefts,
    require_same,
    save_base,
    saved_tensors,
    train,
)

# PEFT and transformers warn of every adapter here: what becomes of those is the test
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
Q: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
EMBED = Q | {"target_modules": ["embed_tokens", "q_proj"]}
HEAD = Q | {"target_modules": ["lm_head", "q_proj"]}
BOTH = Q | {"target_modules": ["embed_tokens", "lm_head"]}
ENSURE: dict[str, Any] = {"ensure_weight_tying": True}


def says(folder: Path) -> tuple[Any, Any]:
    config = json.loads((folder / "config.json").read_text())
    return config["tie_word_embeddings"], config["vocab_size"]


def tied_base(folder: Path, model_type: str = "qwen2") -> Path:
    return save_base(folder, model_type, "causal-lm", torch.bfloat16, tie_word_embeddings=True)


def trained(model: PreTrainedModel, folder: Path, lora: dict[str, Any]) -> Path:
    train(model, folder, task_type="CAUSAL_LM", **lora)
    return folder


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
    adapter = trained(load_model(base, "causal-lm"), tmp_path / "adapter", lora)
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
    require_same(ours, theirs := merged_by_peft(untied, adapter, tmp_path / "theirs"))
    assert says(ours) == says(theirs)


@pytest.mark.parametrize(
    ("model_type", "lora"),
    [("qwen2", EMBED), ("mixtral", EMBED), ("qwen2", HEAD), ("qwen2", BOTH | {"use_rslora": True})],
    ids=["embedding", "embedding-mixtral", "output", "both"],
)
def test_ends_that_were_trained_as_one_stay_one_matrix(lora: dict[str, Any], model_type: str, tmp_path: Path) -> None:
    """PEFT's own merge adds the one ΔW twice; on two matrices it adds it once to each.

    Of a 16-bit base PEFT makes float32 copies of the factors, one for each end: only in float32 they are trained as one.
    """
    base = save_base(tmp_path / "base", model_type, "causal-lm", torch.float32, tie_word_embeddings=True)
    adapter = trained(load_model(base, "causal-lm"), tmp_path / "adapter", lora | ENSURE)
    assert {finding.code for finding in validate(adapter, base=base).findings} <= {"LT213"}
    ours = merge_with_ours(base, adapter, tmp_path / "ours", "peft")
    assert layout(saved_tensors(ours)) == layout(saved_tensors(base))
    untied = load_model(untied_copy(base, tmp_path / "untied"), "causal-lm")
    theirs = saved_tensors(merged_by_peft(untied, adapter, tmp_path / "theirs"))
    assert different(saved_tensors(ours), {name: theirs[name] for name in saved_tensors(ours)}) == []
    verify(ours).raise_for_errors()
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        expected = PeftModel.from_pretrained(load_model(base, "causal-lm"), adapter)(tokens).logits
        assert torch.allclose(expected, load_model(ours, "causal-lm")(tokens).logits, atol=1e-4)


@pytest.mark.parametrize("change", [{"use_dora": True}, {"alpha_pattern": {"embed_tokens": 16}}], ids=["DoRA", "alpha"])
def test_ends_that_differ_under_weight_tying_need_two_matrices(change: dict[str, Any], tmp_path: Path) -> None:
    base = tied_base(tmp_path / "base")
    adapter = trained(load_model(base, "causal-lm"), tmp_path / "adapter", EMBED | ENSURE | change)
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
        expected = model(torch.arange(12)[None]).logits
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
            assert torch.allclose(expected, load_model(out, "causal-lm")(torch.arange(12)[None]).logits, atol=1e-4)


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


def ends(model: str = "qwen2", **given: Any) -> Case:
    return case(model, save="auto", **{"target_modules": ["q_proj"], **given})


_TIED: dict[str, Any] = {"tied": True}
_TOKENS_OF_BOTH: dict[str, Any] = {"trainable_token_indices": {"embed_tokens": [1, 87], "lm_head": [1, 87]}} | ENSURE
GROWN: dict[str, Any] = {"rows": 104}
SHRUNK: dict[str, Any] = {"rows": 88}
CASES: dict[str, Case] = {
    # ends that PEFT keeps right
    "tied-and-said": ends(**_TIED, **ENSURE),
    "tied-saved-embedding": ends(**_TIED, **ENSURE, modules_to_save=["embed_tokens"]),
    "tied-saved-output": ends(**_TIED, **ENSURE, modules_to_save=["lm_head"]),
    "tied-tokens": ends(**_TIED, **ENSURE, trainable_token_indices=[1, 5]),
    "tied-tokens-of-both": ends(**_TIED, **_TOKENS_OF_BOTH),
    "embedding-beside-a-saved-output": ends(
        **_TIED, target_modules=["embed_tokens", "q_proj"], modules_to_save=["lm_head"]
    ),
    "output-beside-a-saved-embedding": ends(
        **_TIED, target_modules=["lm_head", "q_proj"], modules_to_save=["embed_tokens"]
    ),
    # `bias="all"` saves BERT's tied output bias under both of its names
    "biases-that-are-tied": ends("roberta", target_modules=["query"], bias="all"),
    # the vocabulary follows the adapter
    "grown-tied": ends(**_TIED, **GROWN),
    "shrunk-tied": ends(**_TIED, **SHRUNK),
    "grown-untied": ends(tied=False, **GROWN),
    "shrunk-untied": ends(tied=False, **SHRUNK),
    "grown-tied-saved-both": ends(**_TIED, **GROWN, modules_to_save=["embed_tokens", "lm_head"]),
    "shrunk-untied-saved-both": ends(tied=False, **SHRUNK, modules_to_save=["embed_tokens", "lm_head"]),
    "shrunk-tied-saved-embedding": ends(**_TIED, **SHRUNK, modules_to_save=["embed_tokens"]),
    "grown-untied-saved-embedding": ends(tied=False, **GROWN, modules_to_save=["embed_tokens"]),
    "grown-tied-tokens": ends(**_TIED, **GROWN, trainable_token_indices=[1, 87]),
    "shrunk-untied-tokens": ends(tied=False, **SHRUNK, trainable_token_indices=[1, 87]),
    "shrunk-tied-tokens-of-both": ends(**_TIED, **SHRUNK, **_TOKENS_OF_BOTH),
    "grown-untied-tokens-of-both": ends(tied=False, **GROWN, **_TOKENS_OF_BOTH),
    "shrunk-embedding-cuts-the-other-end": ends(
        "llama", tied=False, **SHRUNK, target_modules=["embed_tokens", "q_proj"]
    ),
    "grown-both": ends("llama", tied=False, **GROWN, target_modules=["embed_tokens", "lm_head"]),
    # other names and biases
    "shrunk-gpt2": ends("gpt2", **SHRUNK, target_modules="all-linear", fan_in_fan_out=True),
    "shrunk-phi": ends("phi", dtype=FP32, **SHRUNK, target_modules="all-linear"),
    "shrunk-gpt-neox": ends("gpt_neox", dtype=FP32, **SHRUNK, target_modules="all-linear"),
    "shrunk-mixtral": ends("mixtral", dtype=FP32, **SHRUNK),
    "grown-reward": ends(task="seq-cls", base_task="causal-lm", **_TIED, **GROWN),
}


@pytest.mark.parametrize("name", CASES)
def test_ends_are_merged_as_peft_does(name: str, tmp_path: Path) -> None:
    one = CASES[name]
    base, adapter = one.write(tmp_path)
    require_pefts(base, adapter, lambda: one.load(base))
    if one.rows is not None:
        assert says(tmp_path / "ours")[1] == one.rows
    if name == "biases-that-are-tied":
        assert "base_model.model.lm_head.decoder.bias" in saved_tensors(adapter)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("targets", [["embed_tokens"], None], ids=str)
def test_an_adapter_of_trained_tokens_alone(tied: bool, targets: list[str] | None, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen2", "causal-lm", torch.bfloat16, tie_word_embeddings=tied)
    config = TrainableTokensConfig(token_indices=[1, 5], target_modules=targets, task_type=TaskType.CAUSAL_LM)
    train(load_model(base, "causal-lm"), tmp_path / "adapter", config)
    require_pefts(base, tmp_path / "adapter", lambda: load_model(base, "causal-lm"))
    assert validate(tmp_path / "adapter", base=base).findings == ()


def test_lora_on_a_grown_embedding_alone_is_refused(tmp_path: Path) -> None:
    base, adapter = ends("llama", tied=False, **GROWN, target_modules=["embed_tokens", "q_proj"]).write(tmp_path)
    with pytest.raises(FindingsFound, match=r"LT504 .* the adapter has no new rows for `lm_head\.weight`"):
        merge_with_ours(base, adapter, tmp_path / "no", "peft")


def test_a_base_whose_config_says_tied_and_whose_files_say_not(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen2", "causal-lm", torch.bfloat16, tie_word_embeddings=False)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    adapter = trained(load_model(base, "causal-lm"), tmp_path / "adapter", BOTH)
    require_pefts(base, adapter, lambda: load_model(base, "causal-lm"))


def test_an_end_that_was_not_resized_with_the_others_is_refused(tmp_path: Path) -> None:
    base, adapter = ends("bart", task="seq-cls", tied=False, rows=101).write(tmp_path)
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
