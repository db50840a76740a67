"""What PEFT saves with an adapter by its own choice: repeats of the base, tied tensors under other names, second copies.

And layers that a base has and the adapter's class does not. PEFT's merge and ours, bit by bit; no rule complains.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForMaskedLM, PreTrainedModel

from lora_tool.core.errors import FindingsFound, UnsupportedAdapter
from lora_tool.core.report import Severity
from tests.judging import codes, judge
from tests.oracle.adapter_cases import Case, case
from tests.oracle.peft_merge import (
    FP32,
    different,
    layout,
    load_model,
    merge_with_ours,
    merged_by_peft,
    require_pefts,
    rewrite,
    save_model,
    saved_tensors,
    train,
)
from tests.oracle.tiny import tiny_config

pytestmark = pytest.mark.filterwarnings("ignore")

_POOLER = {"weight": (32, 32), "bias": (32,)}
_DENSE: dict[str, Any] = {"target_modules": ["query", "value", "dense"], "exclude_modules": ["classifier.dense"]}


def with_pooler(base: Path) -> None:
    """As the published RoBERTa has it."""
    pooler = {f"roberta.pooler.dense.{leaf}": torch.ones(size).bfloat16() for leaf, size in _POOLER.items()}
    rewrite(base, saved_tensors(base) | pooler)


def errors(folder: Path) -> set[str]:
    return codes(judge(folder / "adapter", base=folder / "base"), Severity.ERROR)


CONVOLUTION = case("dinov2", task="feature-extraction", target_modules=["q_proj"], save=True)
CASES: dict[str, Case] = {
    "magnitude of an embedding under both names": case(
        use_dora=True, target_modules=["embed_tokens", "q_proj"], save="auto"
    ),
    "three names of one matrix": case("seamless_m4t", task="seq-2-seq-lm", target_modules=["q_proj"], save=True),
    "a convolution as the first layer": CONVOLUTION,
    # `dense` names a pooler in the base too, as `all-linear` does; it is no layer that was lost
    "a pooler that RoBERTa's classifier is without": case(
        "roberta", base_task="causal-lm", task="seq-cls", edit_base=with_pooler, **_DENSE
    ),
    "a pooler that BERT's token classifier is without": case(
        "bert", base_task="feature-extraction", task="token-cls", **_DENSE
    ),
    # PEFT saves `score` and `classifier`; a trained classifier's head that is called otherwise is in the base
    "a head of another name, of Flaubert": case("flaubert", task="seq-cls", target_modules=["v_lin"]),
    "a head of another name, of Perceiver": case("perceiver", task="seq-cls", target_modules=["value"]),
    # LayoutLMv3 has one layer up to nine labels, and two beyond
    "a head of one layer": case("layoutlmv3", task="token-cls", target_modules=["query", "value"]),
    "a head of two layers": case(
        "layoutlmv3", task="token-cls", config={"num_labels": 12}, labels=12, target_modules=["query", "value"]
    ),
    # PEFT saves the layer as it was before training, and loads it over the base's
    "the bias under the LoRA of an output layer": case("phi", target_modules=["lm_head"], save="auto"),
    # OLoRA takes the factors out of the weight; PEFT saves what is left of an output layer
    "a changed weight that the adapter carries": case(
        dtype=FP32, tied=False, target_modules=["lm_head", "q_proj"], init_lora_weights="olora", save="auto"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_merge_is_pefts_and_no_rule_complains(name: str, tmp_path: Path) -> None:
    base, adapter = CASES[name].write(tmp_path)
    theirs = require_pefts(base, adapter, lambda: CASES[name].load(base))
    other = saved_tensors(merge_with_ours(base, adapter, tmp_path / "float32", "float32"))
    assert layout(other) == layout(theirs)
    assert not errors(tmp_path)
    if "LoRA of an output layer" in name:
        assert "base_model.model.lm_head.base_layer.bias" in saved_tensors(adapter)
    if "adapter carries" in name:
        assert "base_model.model.lm_head.base_layer.weight" in saved_tensors(adapter)
    if "pooler" in name:
        assert not any("pooler" in tensor for tensor in theirs)


def test_an_output_layer_saved_whole_takes_its_bias_along(tmp_path: Path) -> None:
    """BERT's kin tie the weight to the embeddings, and the bias to another bias: both are untied."""
    base = save_model(AutoModelForMaskedLM.from_config(tiny_config("mpnet", "feature-extraction")), tmp_path / "base")

    def load() -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForMaskedLM.from_pretrained(base, dtype="auto")
        return model

    train(load(), tmp_path / "adapter", target_modules=["q"], modules_to_save=["decoder"])
    assert "lm_head.decoder.bias" in require_pefts(base, tmp_path / "adapter", load)
    assert not errors(tmp_path)


def test_a_new_pooler_is_part_of_the_head(tmp_path: Path) -> None:
    save_model(AutoModelForMaskedLM.from_config(tiny_config("bert", "feature-extraction")), tmp_path / "base")
    saved: dict[str, Any] = {"target_modules": ["query"], "modules_to_save": ["pooler", "classifier"]}
    train(load_model(tmp_path / "base", "seq-cls"), tmp_path / "adapter", task_type="SEQ_CLS", **saved)
    require_pefts(tmp_path / "base", tmp_path / "adapter", lambda: load_model(tmp_path / "base", "seq-cls"))
    assert not errors(tmp_path)


def test_another_value_than_the_bases_is_not_loaded_over_it_without_a_word(tmp_path: Path) -> None:
    base, adapter = CONVOLUTION.write(tmp_path)
    tensors = saved_tensors(adapter)
    name = "base_model.model.embeddings.patch_embeddings.projection.bias"
    save_file(tensors | {name: tensors[name] + 1}, adapter / "adapter_model.safetensors")
    with pytest.raises(
        FindingsFound, match="LT207 .*it belongs to no entry of `target_modules` or `modules_to_save`"
    ) as refused:
        merge_with_ours(base, adapter, tmp_path / "no", "peft")
    # the way out that it names
    assert "`modules_to_save`" in (refused.value.hint or "")
    module = name.removeprefix("base_model.model.").removesuffix(".bias")
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"modules_to_save": [module]}))
    require_pefts(base, adapter, lambda: CONVOLUTION.load(base))


def test_lora_on_computed_positions_is_refused_by_its_reason(tmp_path: Path) -> None:
    base, adapter = case("marian", task="seq-2-seq-lm", target_modules=["embed_positions", "q_proj"]).write(tmp_path)
    with pytest.raises(FindingsFound, match="LT501 .*adapts `model.decoder.embed_positions`"):
        merge_with_ours(base, adapter, tmp_path / "no", "peft")


TOKENS = torch.arange(3, 13)[None]
UNTIED: dict[str, tuple[Case, str | None]] = {
    # BERT's kin have a second name of the output bias, ProphetNet one of the embeddings
    "RoBERTa's output layer": (case("roberta", target_modules=["query", "decoder"], bias="all"), None),
    "RoBERTa's embeddings": (case("roberta", target_modules=["query", "word_embeddings"], bias="all"), None),
    "ProphetNet's output layer": (case("prophetnet", target_modules=["query_proj", "lm_head"], bias="all"), None),
    "rows of both ends": (case("qwen2", tied=True, target_modules=["q_proj"], trainable_token_indices=[3, 7]), None),
    # BART's encoder and decoder have the matrix of both: PEFT's merge writes the copy, and drops theirs
    **{
        f"BART's {saved}": (
            case("bart", task="seq-2-seq-lm", target_modules=["q_proj"], modules_to_save=[saved]),
            "transformers re-initialises it at every load",
        )
        for saved in ("shared", "lm_head")
    },
}


@pytest.mark.parametrize("name", UNTIED)
def test_what_is_untied_with_the_ends_answers_as_it_was_trained(name: str, tmp_path: Path) -> None:
    one, refused = UNTIED[name]
    base, adapter = one.write(tmp_path, FP32)
    if refused is not None:
        with pytest.raises(UnsupportedAdapter, match=refused) as caught:
            merge_with_ours(base, adapter, tmp_path / "no", "peft")
        assert "untie=True" in (caught.value.hint or "")
    merged = merge_with_ours(base, adapter, tmp_path / "ours", "float32", untie=True)
    model, loading = type(one.load(base)).from_pretrained(merged, output_loading_info=True)
    assert not any(loading.values())
    tokens = {"input_ids": TOKENS} | ({"decoder_input_ids": TOKENS} if one.task == "seq-2-seq-lm" else {})
    with torch.no_grad():
        trained = PeftModel.from_pretrained(one.load(base), adapter).eval()
        assert torch.allclose(trained(**tokens).logits, model.eval()(**tokens).logits, atol=1e-5)


def test_a_bias_that_peft_forgets_is_written_or_refused(tmp_path: Path) -> None:
    """The embeddings are trained whole, so nothing is tied any more, and the second name of the bias is nowhere."""
    one = case("roberta", target_modules=["query"], modules_to_save=["word_embeddings"], save="auto")
    base, adapter = one.write(tmp_path)
    with pytest.raises(UnsupportedAdapter, match="`lm_head.decoder.bias` is no longer tied to `lm_head.bias`"):
        merge_with_ours(base, adapter, tmp_path / "no", "peft")
    theirs = saved_tensors(merged_by_peft(one.load(base), adapter, tmp_path / "theirs"))
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "untied", "peft", untie=True))
    assert ours.keys() - theirs.keys() == {"lm_head.decoder.bias"}
    assert not different({name: ours[name] for name in theirs}, theirs)


def test_an_init_that_changed_both_ends_is_refused(tmp_path: Path) -> None:
    base, adapter = case("qwen2", tied=True, target_modules=["lm_head"], init_lora_weights="pissa").write(tmp_path)
    for untie in (False, True):
        with pytest.raises(UnsupportedAdapter, match="the init changed both before the training"):
            merge_with_ours(base, adapter, tmp_path / "no", "float32", untie=untie)


def test_tied_ends_that_are_stored_as_the_output_layer_stay_tied(tmp_path: Path) -> None:
    one = case("blt", tied=True, target_modules=["v_proj"], save=True)
    base, adapter = one.write(tmp_path)
    assert not any("local_encoder.embed_tokens" in name for name in saved_tensors(base))
    require_pefts(base, adapter, lambda: one.load(base))
    merge_with_ours(base, adapter, tmp_path / "float32", "float32")
    for folder in ("ours", "float32"):
        assert json.loads((tmp_path / folder / "config.json").read_text())["tie_word_embeddings"] is True
        _, loading = type(one.load(base)).from_pretrained(tmp_path / folder, output_loading_info=True)
        assert not any(loading.values())


def test_lora_on_the_one_matrix_of_both_ends_is_refused(tmp_path: Path) -> None:
    base, adapter = case("blt", tied=True, target_modules=["lm_head"]).write(tmp_path)
    for precision in ("peft", "float32"):
        with pytest.raises(
            UnsupportedAdapter, match="is one layer in several places|which is the embedding of this base too"
        ):
            merge_with_ours(base, adapter, tmp_path / "no", precision)
