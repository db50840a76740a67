"""What PEFT saves with an adapter by its own choice: repeats of the base, tied tensors under other names, second copies.

And layers that a base has and the adapter's class does not. PEFT's merge and ours, bit by bit; no rule complains.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedModel

from lora_tool.core.errors import FindingsFound, UnsupportedAdapter
from lora_tool.core.report import Severity
from tests.judging import codes, judge
from tests.oracle.peft_merge import different, layout, merge_with_ours, saved_tensors
from tests.oracle.test_task_types import save_base
from tests.oracle.tiny import AUTO, NUM_LABELS, Task, tiny_config, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")


def train(
    model: PreTrainedModel, folder: Path, task_type: str | None, *, save: bool | str = "auto", **lora: Any
) -> None:
    """Write an adapter with random tensors, as PEFT saves it."""
    adapted = get_peft_model(model, LoraConfig(**{"r": 4, "lora_alpha": 7, "task_type": task_type, **lora}))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in (p for p in adapted.parameters() if p.requires_grad):
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.1)
    adapted.save_pretrained(str(folder), save_embedding_layers=save)


def require_pefts(loaded: PreTrainedModel, folder: Path) -> None:
    PeftModel.from_pretrained(loaded, folder / "adapter").merge_and_unload().save_pretrained(folder / "theirs")
    theirs = saved_tensors(folder / "theirs")
    ours = saved_tensors(merge_with_ours(folder / "base", folder / "adapter", folder / "ours", "peft"))
    assert layout(ours) == layout(theirs)
    assert not different(ours, theirs)
    other = saved_tensors(merge_with_ours(folder / "base", folder / "adapter", folder / "float32", "float32"))
    assert layout(other) == layout(theirs)


def errors(folder: Path) -> set[str]:
    return codes(judge(folder / "adapter", base=folder / "base"), Severity.ERROR)


CASES: dict[str, tuple[str, Task, str, dict[str, Any]]] = {
    "magnitude of an embedding under both names": (
        "llama",
        "causal-lm",
        "CAUSAL_LM",
        {"use_dora": True, "target_modules": ["embed_tokens", "q_proj"]},
    ),
    "three names of one matrix": (
        "seamless_m4t",
        "seq-2-seq-lm",
        "SEQ_2_SEQ_LM",
        {"target_modules": ["q_proj"], "save": True},
    ),
    "a convolution as the first layer": (
        "dinov2",
        "feature-extraction",
        "FEATURE_EXTRACTION",
        {"target_modules": ["q_proj"], "save": True},
    ),
    "an embedding beside a recomputed init": (
        "llama",
        "causal-lm",
        "CAUSAL_LM",
        {"init_lora_weights": "pissa", "r": 48, "target_modules": ["embed_tokens", "q_proj"]},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_merge_is_pefts_and_no_rule_complains(name: str, tmp_path: Path) -> None:
    model_type, task, task_type, lora = CASES[name]
    save_base(tiny_model(model_type, task), tmp_path / "base")
    auto = AUTO[task]
    train(auto.from_pretrained(tmp_path / "base", dtype="auto"), tmp_path / "adapter", task_type, **lora)
    require_pefts(auto.from_pretrained(tmp_path / "base", dtype="auto"), tmp_path)
    assert not errors(tmp_path)


def test_an_output_layer_saved_whole_takes_its_bias_along(tmp_path: Path) -> None:
    """BERT's kin tie the weight to the embeddings, and the bias to another bias: both are untied."""
    base = AutoModelForMaskedLM.from_config(tiny_config("mpnet", "feature-extraction"))
    save_base(base, tmp_path / "base")
    model = AutoModelForMaskedLM.from_pretrained(tmp_path / "base", dtype="auto")
    train(model, tmp_path / "adapter", None, target_modules=["q"], modules_to_save=["decoder"])
    require_pefts(AutoModelForMaskedLM.from_pretrained(tmp_path / "base", dtype="auto"), tmp_path)
    assert "lm_head.decoder.bias" in saved_tensors(tmp_path / "ours")
    assert not errors(tmp_path)


def test_another_value_than_the_bases_is_not_loaded_over_it_without_a_word(tmp_path: Path) -> None:
    save_base(tiny_model("dinov2", "feature-extraction"), tmp_path / "base")
    model = AutoModel.from_pretrained(tmp_path / "base", dtype="auto")
    train(model, tmp_path / "adapter", "FEATURE_EXTRACTION", target_modules=["q_proj"], save=True)
    tensors = saved_tensors(tmp_path / "adapter")
    name = "base_model.model.embeddings.patch_embeddings.projection.bias"
    save_file(tensors | {name: tensors[name] + 1}, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(
        FindingsFound, match="LT207 .*it belongs to no entry of `target_modules` or `modules_to_save`"
    ) as refused:
        merge_with_ours(tmp_path / "base", tmp_path / "adapter", tmp_path / "no", "peft")
    # the way out that it names
    assert "`modules_to_save`" in (refused.value.hint or "")
    module = name.removeprefix("base_model.model.").removesuffix(".bias")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"modules_to_save": [module]}))
    require_pefts(AutoModel.from_pretrained(tmp_path / "base", dtype="auto"), tmp_path)


def test_lora_on_computed_positions_is_refused_by_its_reason(tmp_path: Path) -> None:
    save_base(tiny_model("marian", "seq-2-seq-lm"), tmp_path / "base")
    model = AUTO["seq-2-seq-lm"].from_pretrained(tmp_path / "base", dtype="auto")
    train(model, tmp_path / "adapter", "SEQ_2_SEQ_LM", target_modules=["embed_positions", "q_proj"])
    with pytest.raises(FindingsFound, match="LT501 .*adapts `model.decoder.embed_positions`"):
        merge_with_ours(tmp_path / "base", tmp_path / "adapter", tmp_path / "no", "peft")


@pytest.mark.parametrize(
    ("model_type", "base_task", "task", "task_type"),
    [
        ("roberta", "causal-lm", "seq-cls", TaskType.SEQ_CLS),
        ("bert", "feature-extraction", "token-cls", TaskType.TOKEN_CLS),
    ],
)
def test_a_pooler_that_the_classifier_is_without(
    model_type: str, base_task: Task, task: Task, task_type: str, tmp_path: Path
) -> None:
    """`dense` names it in the base too, as `all-linear` does; it is no layer that was lost."""
    save_base(tiny_model(model_type, base_task), tmp_path / "base")
    if model_type == "roberta":  # as the published one has it
        pooler = {f"roberta.pooler.dense.{leaf}": torch.ones(size).bfloat16() for leaf, size in _POOLER.items()}
        tensors = saved_tensors(tmp_path / "base") | pooler
        save_file(tensors, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    auto = AUTO[task]
    model = auto.from_pretrained(tmp_path / "base", dtype="auto", num_labels=NUM_LABELS)
    targets: dict[str, Any] = {"target_modules": ["query", "value", "dense"], "exclude_modules": ["classifier.dense"]}
    train(model, tmp_path / "adapter", task_type, **targets)
    require_pefts(auto.from_pretrained(tmp_path / "base", dtype="auto", num_labels=NUM_LABELS), tmp_path)
    assert not any("pooler" in name for name in saved_tensors(tmp_path / "ours"))
    assert not errors(tmp_path)


_POOLER = {"weight": (32, 32), "bias": (32,)}


def test_a_new_pooler_is_part_of_the_head(tmp_path: Path) -> None:
    save_base(AutoModelForMaskedLM.from_config(tiny_config("bert", "feature-extraction")), tmp_path / "base")
    auto = AUTO["seq-cls"]
    model = auto.from_pretrained(tmp_path / "base", dtype="auto", num_labels=NUM_LABELS)
    saved: dict[str, Any] = {"target_modules": ["query"], "modules_to_save": ["pooler", "classifier"]}
    train(model, tmp_path / "adapter", TaskType.SEQ_CLS, **saved)
    require_pefts(auto.from_pretrained(tmp_path / "base", dtype="auto", num_labels=NUM_LABELS), tmp_path)
    assert not errors(tmp_path)


@pytest.mark.parametrize("target", ["decoder", "word_embeddings"])
@pytest.mark.parametrize(("model_type", "targets"), [("roberta", "query"), ("prophetnet", "query_proj")])
def test_what_the_config_alone_tied_is_untied_with_the_ends(
    model_type: str, targets: str, target: str, tmp_path: Path
) -> None:
    """BERT's kin have a second name of the output bias, ProphetNet one of the embeddings."""
    save_base(tiny_model(model_type, "causal-lm"), tmp_path / "base", torch.float32)
    if model_type == "prophetnet":
        target = "lm_head"
    auto = AUTO["causal-lm"]
    model = auto.from_pretrained(tmp_path / "base")
    train(model, tmp_path / "adapter", "CAUSAL_LM", target_modules=[targets, target], bias="all")
    merge_with_ours(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours", "float32", untie=True)
    merged, loading = auto.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(loading.values())
    tokens = torch.arange(3, 13)[None]
    with torch.no_grad():
        trained = PeftModel.from_pretrained(auto.from_pretrained(tmp_path / "base"), tmp_path / "adapter").eval()
        assert torch.allclose(trained(tokens).logits, merged.eval()(tokens).logits, atol=1e-5)


def test_a_bias_that_peft_forgets_is_written_or_refused(tmp_path: Path) -> None:
    """The embeddings are trained whole, so nothing is tied any more, and the second name of the bias is nowhere."""
    save_base(tiny_model("roberta", "causal-lm"), tmp_path / "base")
    model = AUTO["causal-lm"].from_pretrained(tmp_path / "base", dtype="auto")
    targets: dict[str, Any] = {"target_modules": ["query"], "modules_to_save": ["word_embeddings"]}
    train(model, tmp_path / "adapter", "CAUSAL_LM", **targets)
    with pytest.raises(UnsupportedAdapter, match="`lm_head.decoder.bias` is no longer tied to `lm_head.bias`"):
        merge_with_ours(tmp_path / "base", tmp_path / "adapter", tmp_path / "no", "peft")
    loaded = AUTO["causal-lm"].from_pretrained(tmp_path / "base", dtype="auto")
    PeftModel.from_pretrained(loaded, tmp_path / "adapter").merge_and_unload().save_pretrained(tmp_path / "theirs")
    theirs, untied = saved_tensors(tmp_path / "theirs"), tmp_path / "untied"
    ours = saved_tensors(merge_with_ours(tmp_path / "base", tmp_path / "adapter", untied, "peft", untie=True))
    assert ours.keys() - theirs.keys() == {"lm_head.decoder.bias"}
    assert not different({name: ours[name] for name in theirs}, theirs)


def test_the_bias_under_the_lora_of_an_output_layer(tmp_path: Path) -> None:
    """PEFT saves the layer as it was before training, and loads it over the base's."""
    save_base(tiny_model("phi", "causal-lm"), tmp_path / "base")
    auto = AUTO["causal-lm"]
    train(auto.from_pretrained(tmp_path / "base", dtype="auto"), tmp_path / "adapter", None, target_modules=["lm_head"])
    assert "base_model.model.lm_head.base_layer.bias" in saved_tensors(tmp_path / "adapter")
    require_pefts(auto.from_pretrained(tmp_path / "base", dtype="auto"), tmp_path)


@pytest.mark.parametrize("saved", ["shared", "lm_head"])
def test_embeddings_of_several_layers_saved_whole_at_one_are_refused(saved: str, tmp_path: Path) -> None:
    """BART's encoder and decoder have the matrix of both: PEFT's merge writes the copy, and drops theirs."""
    save_base(tiny_model("bart", "seq-2-seq-lm"), tmp_path / "base", torch.float32)
    auto = AUTO["seq-2-seq-lm"]
    targets: dict[str, Any] = {"target_modules": ["q_proj"], "modules_to_save": [saved]}
    train(auto.from_pretrained(tmp_path / "base"), tmp_path / "adapter", "SEQ_2_SEQ_LM", **targets)
    with pytest.raises(UnsupportedAdapter, match="transformers re-initialises it at every load") as refused:
        merge_with_ours(tmp_path / "base", tmp_path / "adapter", tmp_path / "no", "peft")
    assert "untie=True" in (refused.value.hint or "")
    merge_with_ours(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours", "float32", untie=True)
    merged, loading = auto.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(loading.values())
    trained = PeftModel.from_pretrained(auto.from_pretrained(tmp_path / "base"), tmp_path / "adapter").eval()
    tokens = torch.arange(3, 13)[None]
    with torch.no_grad():
        expected = trained(input_ids=tokens, decoder_input_ids=tokens).logits
        assert torch.allclose(expected, merged.eval()(input_ids=tokens, decoder_input_ids=tokens).logits, atol=1e-5)


def test_an_init_that_changed_both_ends_is_refused(tmp_path: Path) -> None:
    save_base(tiny_model("qwen2", "causal-lm", tie_word_embeddings=True), tmp_path / "base")
    model = AUTO["causal-lm"].from_pretrained(tmp_path / "base", dtype="auto")
    train(model, tmp_path / "adapter", "CAUSAL_LM", target_modules=["lm_head"], init_lora_weights="pissa")
    for untie in (False, True):
        with pytest.raises(UnsupportedAdapter, match="the init changed both before the training"):
            merge_with_ours(tmp_path / "base", tmp_path / "adapter", tmp_path / "no", "float32", untie=untie)


@pytest.mark.parametrize("model_type", ["flaubert", "perceiver"])
def test_a_head_of_another_name_stays_the_bases(model_type: str, tmp_path: Path) -> None:
    """PEFT saves `score` and `classifier`; a trained classifier's head that is called otherwise is in the base."""
    save_base(tiny_model(model_type, "seq-cls"), tmp_path / "base")
    model = AUTO["seq-cls"].from_pretrained(tmp_path / "base", dtype="auto")
    train(model, tmp_path / "adapter", TaskType.SEQ_CLS, target_modules=["v_lin", "value"])
    require_pefts(AUTO["seq-cls"].from_pretrained(tmp_path / "base", dtype="auto"), tmp_path)
    assert not errors(tmp_path)


@pytest.mark.parametrize("precision", ["peft", "float32"])
def test_tied_ends_that_are_stored_as_the_output_layer_stay_tied(precision: str, tmp_path: Path) -> None:
    save_base(tiny_model("blt", "causal-lm", tie_word_embeddings=True), tmp_path / "base")
    assert not any("local_encoder.embed_tokens" in name for name in saved_tensors(tmp_path / "base"))
    auto = AUTO["causal-lm"]
    train(
        auto.from_pretrained(tmp_path / "base", dtype="auto"),
        tmp_path / "adapter",
        "CAUSAL_LM",
        target_modules=["v_proj"],
        save=True,
    )
    merged = merge_with_ours(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", precision)
    assert json.loads((merged / "config.json").read_text())["tie_word_embeddings"] is True
    _, loading = auto.from_pretrained(merged, output_loading_info=True)
    assert not any(loading.values())
    require_pefts(auto.from_pretrained(tmp_path / "base", dtype="auto"), tmp_path)


def test_lora_on_the_one_matrix_of_both_ends_is_refused(tmp_path: Path) -> None:
    save_base(tiny_model("blt", "causal-lm", tie_word_embeddings=True), tmp_path / "base")
    model = AUTO["causal-lm"].from_pretrained(tmp_path / "base", dtype="auto")
    train(model, tmp_path / "adapter", "CAUSAL_LM", target_modules=["lm_head"])
    for precision in ("peft", "float32"):
        with pytest.raises(
            UnsupportedAdapter, match="is one layer in several places|which is the embedding of this base too"
        ):
            merge_with_ours(tmp_path / "base", tmp_path / "adapter", tmp_path / "no", precision)


def test_a_changed_weight_that_the_adapter_carries_is_not_changed_again(tmp_path: Path) -> None:
    """OLoRA and PiSSA take the factors out of the weight; PEFT saves what is left of an output layer."""
    save_base(tiny_model("llama", "causal-lm", tie_word_embeddings=False), tmp_path / "base", torch.float32)
    auto = AUTO["causal-lm"]
    targets: dict[str, Any] = {"target_modules": ["lm_head", "q_proj"], "init_lora_weights": "olora"}
    train(auto.from_pretrained(tmp_path / "base"), tmp_path / "adapter", "CAUSAL_LM", **targets)
    assert "base_model.model.lm_head.base_layer.weight" in saved_tensors(tmp_path / "adapter")
    require_pefts(auto.from_pretrained(tmp_path / "base"), tmp_path)


def test_untied_rows_are_trained_at_both_ends(tmp_path: Path) -> None:
    save_base(tiny_model("qwen2", "causal-lm", tie_word_embeddings=True), tmp_path / "base", torch.float32)
    auto = AUTO["causal-lm"]
    rows: dict[str, Any] = {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7]}
    train(auto.from_pretrained(tmp_path / "base"), tmp_path / "adapter", "CAUSAL_LM", **rows)
    merged = merge_with_ours(tmp_path / "base", tmp_path / "adapter", tmp_path / "ours", "float32", untie=True)
    trained = PeftModel.from_pretrained(auto.from_pretrained(tmp_path / "base"), tmp_path / "adapter").eval()
    tokens = torch.arange(3, 13)[None]
    with torch.no_grad():
        assert torch.allclose(trained(tokens).logits, auto.from_pretrained(merged).eval()(tokens).logits, atol=1e-5)


@pytest.mark.parametrize("num_labels", [NUM_LABELS, 12])
def test_a_head_whose_layers_depend_on_the_number_of_labels(num_labels: int, tmp_path: Path) -> None:
    """LayoutLMv3 has one layer up to nine labels, and two beyond."""
    auto = AUTO["token-cls"]
    base = auto.from_config(tiny_config("layoutlmv3", "token-cls", num_labels=num_labels))
    save_base(base, tmp_path / "base")
    model = auto.from_pretrained(tmp_path / "base", dtype="auto")
    train(model, tmp_path / "adapter", TaskType.TOKEN_CLS, target_modules=["query", "value"])
    require_pefts(auto.from_pretrained(tmp_path / "base", dtype="auto"), tmp_path)
    assert not errors(tmp_path)
