"""Adapters of PEFT's other task types, and of none, on the classes that they are for: PEFT's merge and ours, bit by bit.

A sample of every auto class, chosen for what is special about a model: heads of several layers, two towers, tied ends,
fused experts, names that differ on disk, computed positions. Each merged folder is verified too.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_tool import verify
from lora_tool.core.errors import FindingsFound
from lora_tool.core.report import Severity
from tests.judging import judge
from tests.oracle.adapter_cases import Case, case, config_with
from tests.oracle.peft_merge import (
    BF16,
    FP16,
    FP32,
    Table,
    changed,
    layout,
    merge_with_ours,
    merged_by_peft,
    require_pefts,
    require_tensors,
    rewrite,
    saved_tensors,
)
from tests.oracle.tiny import NUM_LABELS, Task

# transformers and PEFT warn of tiny configs and of what a class leaves out: the merge is the test
pytestmark = pytest.mark.filterwarnings("ignore")

_HEADS = ["classifier", "score", "qa_outputs"]
"""What `all-linear` targets besides, and PEFT saves whole."""


def cases(models: str, task: Task, **given: Any) -> dict[str, Case]:
    """Return a case for each model, with LoRA on all linear layers and experts but the heads."""
    if task in ("token-cls", "question-ans"):
        given["exclude_modules"] = _HEADS
    made_from = f"-from-{given['base_task']}" if "base_task" in given else ""
    return {f"{model}-{task}{made_from}": case(model, task=task, experts=True, **given) for model in models.split()}


def without_class(adapter: Path) -> None:
    """As tools leave it out that inject LoRA themselves: the base's own class decides."""
    config_with(auto_mapping=None)(adapter)


_TABLE = {
    **cases("bert deberta-v2 gpt2 mixtral qwen2", "token-cls"),
    **cases("qwen3 roberta", "token-cls", base_task="causal-lm"),
    **cases("bart distilbert xlnet", "question-ans"),
    **cases("roberta", "question-ans", base_task="causal-lm"),
    **cases("bart marian nllb-moe t5", "seq-2-seq-lm"),
    **cases("bert deepseek_v3 modernbert t5 xlm-roberta", "feature-extraction"),
    **cases("mistral qwen3", "feature-extraction", base_task="causal-lm"),
    **cases("clip whisper", "feature-extraction", task_type=None),
    **cases("gemma3 llava mllama qwen2_5_vl qwen3_vl_moe", "image-text-to-text"),
    **cases("paligemma qwen3_vl", "image-text-to-text", task_type=None),
    # bases without a head
    **cases("llama gpt2 mixtral gpt_neox bert", "seq-cls", base_task="feature-extraction"),
    **cases("opt", "causal-lm", base_task="feature-extraction"),
    **cases("qwen2 mixtral", "causal-lm", base_task="feature-extraction", modules_to_save=["lm_head"]),
    # a pooler that the base lacks, and the adapter has
    "saved-pooler": case(
        "roberta",
        task="feature-extraction",
        base_task="causal-lm",
        modules_to_save=["pooler"],
        target_modules=["query"],
    ),
    # classes that no task type of PEFT names: the adapter's config does
    "masked": case("bert", own="BertForMaskedLM", task_type=None),
    "another-causal-lm": case("flaubert", own="FlaubertWithLMHeadModel", task_type=None),
    "encoder-alone": case("t5", own="T5EncoderModel", task_type=None),
    "speech": case("wav2vec2", own="Wav2Vec2ForCTC", task_type=None),
    "speech-to-text": case("whisper", own="WhisperForConditionalGeneration", task_type=None),
    "without-a-class": case("bert", task="token-cls", task_type=None, edit=without_class),
    # heads of other sizes than the base's
    "images-of-other-labels": case(
        "vit",
        own="ViTForImageClassification",
        labels=3,
        task_type=None,
        modules_to_save=["classifier"],
        exclude_modules=["classifier"],
    ),
    "tokens-of-other-labels": case("bert", task="token-cls", labels=3, exclude_modules=["classifier"]),
}
_DTYPES = itertools.cycle((BF16, FP16, FP32))
CASES = {name: replace(one, dtype=dtype) for (name, one), dtype in zip(_TABLE.items(), _DTYPES, strict=False)}


@pytest.mark.parametrize("name", CASES)
def test_the_merge_is_pefts(name: str, tmp_path: Path) -> None:
    base, adapter = CASES[name].write(tmp_path)
    require_pefts(base, adapter, lambda: CASES[name].load(base))
    verify(tmp_path / "ours", level="sample").raise_for_errors()


@pytest.mark.parametrize("labels", [3, 1])
def test_a_head_that_is_nowhere_is_refused(labels: int, tmp_path: Path) -> None:
    """One label without a task is a reward model, and no causal LM."""
    task: Task = "token-cls" if labels > 1 else "seq-cls"
    headless = case("qwen2", task=task, base_task="causal-lm", labels=labels, task_type=None, target_modules=["q_proj"])
    base, adapter = headless.write(tmp_path)
    with pytest.raises(FindingsFound, match="LT301 .*no trained head"):
        merge_with_ours(base, adapter, tmp_path / "ours", "peft")


def test_a_pooler_that_only_the_tasks_class_has_must_be_saved(tmp_path: Path) -> None:
    """Both say so: validate by its table, and a merge, which asks transformers where the table does not tell."""
    fresh = case("bert", task="seq-cls", base_task="causal-lm", labels=3, target_modules=["query"])
    base, adapter = fresh.write(tmp_path)
    (finding,) = judge(adapter, base=base).at_least(Severity.WARNING)
    assert (finding.code, "`bert.pooler.dense." in finding.message) == ("LT515", True)
    assert str(finding.hint).endswith('train again with modules_to_save=["classifier", "score", "pooler"]')
    with pytest.raises(FindingsFound, match="LT515 .*pooler"):
        merge_with_ours(base, adapter, tmp_path / "ours", "float32")


def test_what_was_asked_for_must_be_what_the_adapter_says(tmp_path: Path) -> None:
    base, adapter = case("bert", task="token-cls", exclude_modules=_HEADS).write(tmp_path)
    for asked in ("causal-lm", "reward", "question-ans"):
        with pytest.raises(FindingsFound, match="LT30[34] "):
            merge_with_ours(base, adapter, tmp_path / "ours", "peft", task=asked)
    with pytest.raises(FindingsFound, match=f"LT303 .*has {NUM_LABELS} rows, but 3 labels are requested"):
        merge_with_ours(base, adapter, tmp_path / "ours", "peft", num_labels=3)


def test_an_embedding_adapter_goes_into_the_language_model_where_that_is_asked_for(tmp_path: Path) -> None:
    features = case("qwen3", task="feature-extraction", base_task="causal-lm", task_type=None)
    base, adapter = features.write(tmp_path)
    bare = saved_tensors(merge_with_ours(base, adapter, tmp_path / "bare", "float32"))
    whole = saved_tensors(merge_with_ours(base, adapter, tmp_path / "whole", "float32", task="causal-lm"))
    assert whole.keys() - {f"model.{name}" for name in bare} == {"lm_head.weight"}
    assert all(torch.equal(whole[f"model.{name}"], tensor) for name, tensor in bare.items())


@pytest.mark.parametrize("on", ["experts", "attention", "whole"])
def test_experts_that_lie_transposed_in_the_base_stay_so(on: str, tmp_path: Path) -> None:
    """As published, Qwen3-VL-MoE has [experts, in, out]; transformers loads both and writes the other."""
    choices: dict[str, dict[str, Any]] = {
        "experts": {"experts": True},
        "attention": {"target_modules": ["q_proj"]},
        "whole": {"target_modules": ["q_proj"], "modules_to_save": ["experts"]},
    }
    vlm = case("qwen3_vl_moe", task="image-text-to-text", **choices[on])
    base, adapter = vlm.write(tmp_path)
    before = _turned(saved_tensors(base))
    rewrite(base, before)
    theirs = saved_tensors(merged_by_peft(vlm.load(base), adapter, tmp_path / "theirs"))
    for precision in ("peft", "float32", "float64") if on == "experts" else ("peft",):
        ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / precision, precision))
        verify(tmp_path / precision).raise_for_errors()
        assert layout(ours) == layout(before)
        assert any(".experts." in name for name in changed(before, ours)) is (on != "attention")
        if precision == "peft":
            require_tensors(_turned(ours), theirs)
        assert all(torch.allclose(ours[name], tensor, atol=0.02) for name, tensor in _turned(theirs).items())


def _turned(table: Table) -> Table:
    return {name: each.transpose(1, 2).contiguous() if ".experts." in name else each for name, each in table.items()}
