"""LoRA on every linear layer of classes that no task names: no rule complains. All others are in test_zoo.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from lora_tool import plan_merge
from lora_tool.core.errors import FindingsFound
from lora_tool.core.report import Severity
from tests.checkpoint_edits import Tensors, raw, tensors
from tests.judging import codes, judge, lines
from tests.oracle.peft_merge import train
from tests.oracle.tiny import Task, tiny_config, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")

CASES: list[tuple[str, Task]] = [
    # classes that hold the parts of the base model themselves, and that only the adapter's config names
    ("mt5", "seq-2-seq-lm"),
    ("t5", "question-ans"),
    ("longcat_flash", "causal-lm"),
]
_TASK_TYPES = {"causal-lm": "CAUSAL_LM", "seq-cls": "SEQ_CLS", "question-ans": "QUESTION_ANS"}


def save_adapter(model_type: str, task: Task, folder: Path, without: list[str] | None = None) -> None:
    """Write a base, and an adapter with LoRA on every linear layer but those that are named."""
    torch.manual_seed(0)
    model = tiny_model(model_type, task)
    model.save_pretrained(folder / "base")
    model.name_or_path = model.config._name_or_path = str(folder / "base")
    lora: dict[str, Any] = {
        "target_modules": "all-linear",
        "exclude_modules": without,
        "task_type": _TASK_TYPES.get(task),
    }
    train(model, folder / "adapter", **lora)


@pytest.mark.parametrize(("model_type", "task"), CASES)
def test_no_rule_complains(model_type: str, task: Task, tmp_path: Path) -> None:
    # a head is saved whole, and the router's weight is read past its LoRA
    without = {"question-ans": ["qa_outputs"]}.get(task, {"longcat_flash": ["classifier"]}.get(model_type))
    save_adapter(model_type, task, tmp_path, without)
    assert lines(judge(tmp_path / "adapter")) == []
    assert lines(judge(tmp_path / "base")) == []
    assert lines(judge(tmp_path / "adapter", base=tmp_path / "base", task=task)) == []


def _shape(lora: Tensors, module: str) -> None:
    lora[f"{module}.lora_B.weight"] = raw(999, 4)


def _lost(lora: Tensors, module: str) -> None:
    for name in ("lora_A", "lora_B"):
        del lora[f"{module}.{name}.weight"]


def _absent(lora: Tensors, module: str) -> None:
    for name in ("lora_A", "lora_B"):
        lora[f"{module}_extra.{name}.weight"] = lora.pop(f"{module}.{name}.weight")


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "jamba", "qwen3_next"])
def test_an_adapter_of_a_mixture_is_compared_with_its_base(model_type: str, tmp_path: Path) -> None:
    """Whether a table tells the names in memory, as of Qwen3-MoE, or transformers does."""
    save_adapter(model_type, "causal-lm", tmp_path, without=["dt_proj"])  # which Jamba reads past its LoRA
    report = judge(tmp_path / "adapter", base=tmp_path / "base", deep=True)
    assert (report.findings, report.skipped) == ((), ())
    with tensors(tmp_path / "adapter") as lora:
        module = next(name.rpartition(".lora_A")[0] for name in sorted(lora) if "self_attn.v_proj" in name)
    for number, (code, injury) in enumerate({"LT502": _shape, "LT505": _lost, "LT501": _absent}.items()):
        shutil.copytree(tmp_path / "adapter", folder := tmp_path / str(number))
        with tensors(folder) as lora:
            injury(lora, module)
        assert code in codes(judge(folder, base=tmp_path / "base", deep=True), Severity.ERROR)


@pytest.mark.parametrize(
    ("model_type", "trained", "saved", "task_type", "code"),
    [
        ("bert", "BertForMaskedLM", "BertForMaskedLM", None, None),
        ("bert", "BertForMaskedLM", "BertForTokenClassification", None, "LT515"),
        ("bert", "BertLMHeadModel", "BertModel", "CAUSAL_LM", "LT515"),
        ("bart", "BartForConditionalGeneration", "BartModel", "SEQ_2_SEQ_LM", None),  # whose bias is a buffer of zeros
        ("bart", "BartForCausalLM", "BartForQuestionAnswering", "CAUSAL_LM", "LT515"),
        ("modernbert", "ModernBertForQuestionAnswering", "ModernBertForMaskedLM", "QUESTION_ANS", "LT515"),
        ("qwen3", "Qwen3Model", "Qwen3ForQuestionAnswering", "FEATURE_EXTRACTION", "LT515"),
        ("t5", "T5EncoderModel", "T5EncoderModel", "FEATURE_EXTRACTION", None),
        ("t5", "T5ForQuestionAnswering", "T5ForTokenClassification", "QUESTION_ANS", "LT501"),
    ],
)
def test_validate_says_what_the_merge_will(
    model_type: str, trained: str, saved: str, task_type: str | None, code: str | None, tmp_path: Path
) -> None:
    """Of adapters for another class than the base's own, of which not every table knows what it needs."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    getattr(transformers, saved)(tiny_config(model_type, "feature-extraction")).save_pretrained(base)
    model = getattr(transformers, trained).from_pretrained(base)
    train(model, adapter, target_modules=r".*\.(query|value|q|v|q_proj|v_proj|Wqkv)", task_type=task_type, save=False)
    found = codes(judge(adapter, base=base), Severity.ERROR)
    assert found == ({code} if code else set())
    if code:
        with pytest.raises(FindingsFound, match=code):
            plan_merge(base, adapter)
    else:
        assert judge(adapter, base=base).skipped == ()
        plan_merge(base, adapter)


def test_a_layer_beside_the_head_may_be_absent_from_the_base(tmp_path: Path) -> None:
    tiny_model("distilbert", "feature-extraction").save_pretrained(tmp_path / "base")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
    saved = ["pre_classifier", "classifier"]
    train(model, tmp_path / "adapter", target_modules=["q_lin"], modules_to_save=saved, task_type="SEQ_CLS")
    assert lines(judge(tmp_path / "adapter", base=tmp_path / "base")) == []


def test_a_router_that_is_read_past_its_lora_is_named(tmp_path: Path) -> None:
    save_adapter("longcat_flash", "causal-lm", tmp_path)
    assert {finding.code for finding in judge(tmp_path / "adapter").findings} == {"LT228"}


@pytest.mark.parametrize(
    ("model_type", "class_name"),
    [
        ("bert", "BertForMultipleChoice"),  # its head is called `classifier`
        ("bert-generation", "BertGenerationEncoder"),
        ("fastspeech2_conformer", "FastSpeech2ConformerModel"),  # stacks of convolutions, the first with fewer channels
        ("luke", "LukeForMaskedLM"),  # a second output layer, tied to a second embedding
        ("lxmert", "LxmertModel"),  # whose config has a number of layers for each stack
        ("roberta", "RobertaForMaskedLM"),  # one layer of its output is tied, another is not
        ("timesfm", "TimesFmModelForPrediction"),  # its `gate_proj` gates nothing: there is no `up_proj`
        ("xclip", "XCLIPModel"),  # with a transformer over frames, of a length of its own
    ],
)
def test_no_rule_has_a_word_on_classes_that_only_the_config_names(
    model_type: str, class_name: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = getattr(transformers, class_name)(tiny_config(model_type, "feature-extraction"))
    model.save_pretrained(tmp_path / "base")
    model = getattr(transformers, class_name).from_pretrained(tmp_path / "base")
    train(model, tmp_path / "adapter", target_modules="all-linear")
    assert lines(judge(tmp_path / "adapter"), Severity.INFO) == []
    assert lines(judge(tmp_path / "adapter", base=tmp_path / "base"), Severity.INFO) == []
