"""`convert --to seq-cls`: the scores are the difference of the judge's logits, as transformers and PEFT compute both."""

from __future__ import annotations

import json
import re
import runpy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSIFIERS

from lora_tool import convert, merge, verify
from lora_tool.core.errors import LoraToolError, UnsupportedAdapter
from lora_tool.formats.model_config import read_model_config
from lora_tool.models.judges import JUDGE_TYPES, judge_class
from tests.judging import codes, judge
from tests.oracle.peft_merge import BF16, FP32, load_model, rewrite, save_base, saved_tensors, train
from tests.oracle.tiny import Task
from tests.quantised_models import quantise
from tests.readme import DOCUMENTATION, ROOT

# transformers and PEFT warn of tiny configs and tied embeddings: the scores are the test
pytestmark = pytest.mark.filterwarnings("ignore")

TOKENS = torch.tensor([[5, 9, 2, 17], [3, 3, 11, 8]])
YES, NO = 17, 23
WORDS = {"<pad>": 0, "yes": YES, "no": NO, "Ġyes": 40} | {f"t{number}": number for number in range(41, 96)}
PAGE = DOCUMENTATION / "tasks" / "judge.md"
EXACT = 2e-5
"""How far scores may be from the logits' difference in float32."""

MODELS: dict[str, dict[str, Any]] = {
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"final_logit_softcapping": None},
    "gemma3": {},
    "gpt2": {},
    "gpt_neox": {},
    "gpt_oss": {},
    "llama": {},
    "minicpm3": {"hidden_size": 64, "head_dim": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    "mistral": {},
    "mixtral": {},
    "opt": {},
    "phi3": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_5": {},
}
"""Model type → what its tiny model needs."""


def with_words(folder: Path, **settings: Any) -> Path:
    """Give a model the tokenizer of `WORDS`, and return its folder."""
    model = {"type": "BPE", "vocab": WORDS, "merges": []}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>", **settings}))
    return folder


def task_of(model_type: str) -> Task:
    return "image-text-to-text" if model_type in ("gemma3", "qwen3_5") else "causal-lm"


def judge_at(folder: Path, model_type: str, dtype: torch.dtype = FP32, **overrides: Any) -> Path:
    return with_words(save_base(folder, model_type, task_of(model_type), dtype, **overrides))


def difference(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(TOKENS).logits[:, -1]
    return logits[:, YES] - logits[:, NO]


def scores(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits[:, 0]
    return found


def load_classifier(folder: Path, **options: Any) -> PreTrainedModel:
    model, loaded = AutoModelForSequenceClassification.from_pretrained(
        folder, output_loading_info=True, **{"dtype": "auto", **options}
    )
    assert not loaded["missing_keys"]
    assert not loaded["unexpected_keys"]
    found: PreTrainedModel = model.eval()
    return found


def require_right(folder: Path, base: Path | None = None) -> None:
    """Assert that verify and validate have nothing to say of what was written."""
    assert verify(folder).report.findings == ()
    assert codes(judge(folder, base=base)) <= {"LT213", "LT504"}  # what PEFT saves along, and a resized vocabulary


@pytest.mark.parametrize("model_type", MODELS)
def test_a_model_scores_what_its_logits_say(model_type: str, tmp_path: Path) -> None:
    folder = judge_at(tmp_path / "judge", model_type, **MODELS[model_type])
    out = tmp_path / "out"
    convert(folder, "seq-cls", yes="yes", no="no", out=out)
    expected = difference(load_model(folder, task_of(model_type)).eval())
    assert torch.allclose(scores(load_classifier(out)), expected, rtol=0, atol=EXACT)
    require_right(out)
    before, after = saved_tensors(folder), saved_tensors(out)
    assert after.keys() - before.keys() == {"score.weight"}
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items() if name != "score.weight")


def test_verify_computes_the_head_again(tmp_path: Path) -> None:
    folder, out = judge_at(tmp_path / "judge", "llama"), tmp_path / "out"
    convert(folder, "seq-cls", yes="yes", no="no", out=out)
    with pytest.raises(LoraToolError, match="was converted from a model, but 1 adapter"):
        verify(out, adapters=[folder])
    table = saved_tensors(out)
    rewrite(out, table | {"score.weight": table["score.weight"] * 1.01})
    assert {finding.code for finding in verify(out).report.findings} == {"LT626"}
    told = json.loads((out / "lora_tool.json").read_text())
    (out / "lora_tool.json").write_text(json.dumps(told | {"asked": {"yes": 1}}))
    with pytest.raises(LoraToolError, match="`asked`: "):
        verify(out)


def test_the_classes_are_those_of_transformers(tmp_path: Path) -> None:
    for model_type in JUDGE_TYPES - {"gemma2"}:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({"model_type": model_type}))
        assert judge_class(read_model_config(path)).classifier == CLASSIFIERS[model_type]


def test_a_bias_moves_every_score_by_a_constant(tmp_path: Path) -> None:
    folder = judge_at(tmp_path / "judge", "phi")
    model = load_model(folder, "causal-lm")
    with torch.no_grad():
        model.lm_head.bias[YES] = 0.75
    model.save_pretrained(folder)
    done = convert(folder, "seq-cls", yes="yes", no="no", out=tmp_path / "out")
    assert "without `lm_head.bias`: every score is 0.75 lower than the difference of the logits" in done.plan.notes
    expected = difference(model.eval()) - 0.75
    assert torch.allclose(scores(load_classifier(tmp_path / "out")), expected, rtol=0, atol=EXACT)
    with pytest.raises(UnsupportedAdapter, match=r"`lm_head\.bias` differs between the labels"):
        convert(folder, "seq-cls", labels=["yes", "no"], out=tmp_path / "labels")


def test_the_head_of_a_bfloat16_judge_is_exact_in_float32(tmp_path: Path) -> None:
    folder = judge_at(tmp_path / "judge", "qwen2", BF16)
    out = tmp_path / "out"
    done = convert(folder, "seq-cls", yes="yes", no="no", out=out)
    assert any(note.startswith("score is F32") for note in done.plan.notes)
    wide = load_model(folder, "causal-lm").float().eval()
    expected = difference(wide)
    assert torch.allclose(scores(load_classifier(out, dtype=FP32)), expected, rtol=0, atol=EXACT)
    # a loader that rounds it to bfloat16 is off by no more than 2^-8 of Σ|w·h|
    with torch.no_grad():
        hidden = load_classifier(out, dtype=BF16).model(TOKENS).last_hidden_state[:, -1].double()
    head = saved_tensors(out)["score.weight"].double()
    exact, bound = (hidden @ head.T)[:, 0], (hidden.abs() @ head.abs().T)[:, 0] / 256
    assert bool(((scores(load_classifier(out)).double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("form", ["fp8-block", "nf4-double"])
def test_a_quantised_judge_stays_quantised(form: str, tmp_path: Path) -> None:
    if form.startswith("nf4"):
        pytest.importorskip("bitsandbytes")
    plain = judge_at(tmp_path / "plain", "llama", BF16, hidden_size=64, intermediate_size=128)
    folder, _ = quantise(plain, tmp_path / "judge", form, lambda module: "proj" in module)
    with_words(folder)
    done = convert(folder, "seq-cls", yes="yes", no="no", out=tmp_path / "out")
    assert any("loaders of quantised weights" in note for note in done.plan.notes)
    require_right(done.path)
    expected = difference(load_model(folder, "causal-lm").eval())
    assert torch.allclose(scores(load_classifier(done.path)), expected, rtol=2**-7, atol=2**-8)


_LORA = ["q_proj", "v_proj"]
_BOTH = [*_LORA, "embed_tokens", "lm_head"]
ADAPTERS: dict[str, Mapping[str, Any]] = {
    "on the layers": {},
    "on the output layer": {
        "target_modules": [*_LORA, "lm_head"],
        "rank_pattern": {"lm_head": 2},
        "alpha_pattern": {"lm_head": 9},
        "use_rslora": True,
    },
    "on the embedding": {"target_modules": [*_LORA, "embed_tokens"]},
    "on both ends": {"target_modules": _BOTH},
    "on both ends as one": {"target_modules": _BOTH, "ensure_weight_tying": True},
    "a saved output layer": {"modules_to_save": ["lm_head"]},
    "a saved embedding": {"modules_to_save": ["embed_tokens"]},
    "a saved embedding as one": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "both ends saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "trained tokens": {"trainable_token_indices": [YES, 5]},
    "trained tokens of both ends": {"trainable_token_indices": {"embed_tokens": [YES, 5], "lm_head": [YES, NO]}},
    "DoRA on the layers": {"use_dora": True},
    "a pattern": {"target_modules": r".*\.(q_proj|v_proj)|lm_head"},
}


UNTIED = (
    "on the output layer",
    "on the embedding",
    "a saved embedding",
    "trained tokens",
    "trained tokens of both ends",
)
"""Adapters that mean something else on a base with two ends."""


@pytest.mark.parametrize(("name", "tied"), [*((name, True) for name in ADAPTERS), *((name, False) for name in UNTIED)])
def test_an_adapter_scores_what_the_judge_says(name: str, tied: bool, tmp_path: Path) -> None:
    lora = ADAPTERS[name]
    base = judge_at(tmp_path / "base", "llama", pad_token_id=0, tie_word_embeddings=tied)
    options = {"target_modules": _LORA, **lora}
    train(load_model(base, "causal-lm"), tmp_path / "adapter", task_type="CAUSAL_LM", **options)
    expected = difference(PeftModel.from_pretrained(load_model(base, "causal-lm"), tmp_path / "adapter").eval())
    out = tmp_path / "out"
    convert(tmp_path / "adapter", "seq-cls", yes="yes", no="no", base=base, out=out)
    made = PeftModel.from_pretrained(load_model(base, "seq-cls", 1), out).eval()
    loaded = made.load_adapter(out, "again")
    assert ([*loaded.missing_keys], [*loaded.unexpected_keys]) == ([], [])
    assert torch.allclose(scores(made), expected, rtol=0, atol=EXACT)
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "adapter", out))
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items() if not name.endswith("score.weight"))
    assert {name for name in before.keys() - after.keys() if "lm_head" not in name} == set()
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["task_type"], "score" in config["modules_to_save"]) == ("SEQ_CLS", True)
    assert "lm_head" not in json.dumps({name: value for name, value in config.items() if name != "target_modules"})
    require_right(out, base)


@pytest.mark.parametrize(
    ("model_type", "lora"),
    [
        ("gpt2", {"target_modules": ["c_attn", "lm_head"], "fan_in_fan_out": True}),
        ("mixtral", {"target_parameters": ["mlp.experts.gate_up_proj"]}),
        ("gemma3", {}),
    ],
)
def test_an_adapter_of_another_architecture(model_type: str, lora: Mapping[str, Any], tmp_path: Path) -> None:
    base = judge_at(tmp_path / "base", model_type, pad_token_id=0)
    task, options = task_of(model_type), {"target_modules": _LORA, **lora}
    train(load_model(base, task), tmp_path / "adapter", task_type="CAUSAL_LM", **options)
    expected = difference(PeftModel.from_pretrained(load_model(base, task), tmp_path / "adapter").eval())
    convert(tmp_path / "adapter", "seq-cls", yes="yes", no="no", base=base, out=tmp_path / "out")
    merge(tmp_path / "out", base=base, task="reward", out=tmp_path / "merged")
    classifier = load_classifier(tmp_path / "merged")
    assert torch.allclose(scores(classifier), expected, rtol=0, atol=EXACT)


def test_labels_are_chosen_subtracted_and_scaled(tmp_path: Path) -> None:
    folder = judge_at(tmp_path / "judge", "llama")
    graded = tmp_path / "graded"
    convert(folder, "seq-cls", labels=["bad=no", "good=yes", "t50"], out=graded)
    assert load_classifier(graded).config.id2label == {0: "bad", 1: "good", 2: "t50"}
    rows = np.asarray(saved_tensors(graded)["score.weight"], np.float64)
    assert np.array_equal(rows, np.asarray(saved_tensors(folder)["lm_head.weight"], np.float64)[[NO, YES, 50]])
    made: dict[str, tuple[dict[str, Any], Any]] = {
        "one": ({"labels": ["good"]}, rows[1:2]),
        "turned": ({"labels": ["x=good", "bad"]}, rows[[1, 0]]),
        "reward": ({"yes": "good", "no": "bad", "scale": -0.5}, 0.5 * (rows[:1] - rows[1:2])),
        "scaled": ({"scale": 3}, 3 * rows),
    }
    for name, (options, expected) in made.items():
        done = convert(graded, "seq-cls", out=tmp_path / name, **options)
        head = saved_tensors(done.path)["score.weight"]
        assert np.allclose(head, expected, rtol=2**-23, atol=0), name
        assert load_classifier(done.path).config.num_labels == len(expected)
        require_right(done.path)


def named_in(folder: Path, how: str) -> None:
    """Have the folder itself name its tokens."""
    config = json.loads((folder / "config.json").read_text())
    if how == "vllm":
        config |= {"classifier_from_token": ["no", "yes"], "method": "from_2_way_softmax"}
    elif how == "qwen":
        config["is_original_qwen3_reranker"] = True
    else:
        modules = [{"path": "", "type": "a.Transformer"}, {"path": "1_LogitScore", "type": "a.b.LogitScore"}]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_LogitScore").mkdir()
        ids = {"true_token_id": YES, "false_token_id": NO}
        (folder / "1_LogitScore" / "config.json").write_text(json.dumps(ids))
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("how", ["vllm", "qwen", "sentence-transformers"])
def test_a_folder_may_name_its_tokens(how: str, tmp_path: Path) -> None:
    folder = judge_at(tmp_path / "judge", "qwen3")
    with pytest.raises(LoraToolError, match="does not say which tokens"):
        convert(folder, "seq-cls", out=tmp_path / "out")
    named_in(folder, how)
    convert(folder, "seq-cls", out=tmp_path / "out")
    expected = difference(load_model(folder, "causal-lm").eval())
    assert torch.allclose(scores(load_classifier(tmp_path / "out")), expected, rtol=0, atol=EXACT)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not any(config.get(name) for name in ("classifier_from_token", "method", "is_original_qwen3_reranker"))
    assert not (tmp_path / "out" / "modules.json").exists()


def test_the_pad_token_is_warned_of(tmp_path: Path) -> None:
    folder = judge_at(tmp_path / "judge", "llama", pad_token_id=0)
    template = "{% for m in messages %}{{ m['content'] + pad_token }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    (warning,) = convert(folder, "seq-cls", yes="yes", no="no", out=tmp_path / "out").warnings
    assert "prompts of the chat template end in the pad token, `<pad>`" in warning
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == template
    (folder / "tokenizer_config.json").write_text("{}")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    (warning,) = convert(folder, "seq-cls", yes="yes", no="no", out=tmp_path / "another").warnings
    assert warning.startswith("no pad_token_id")


REFUSED: dict[str, tuple[str, Task, dict[str, Any], str]] = {
    "soft cap": ("gemma2", "causal-lm", {"yes": "yes"}, "`final_logit_softcapping` 30.0 bends each logit"),
    "no class": (
        "granite",
        "causal-lm",
        {"yes": "yes"},
        "transformers has no sequence classifier of model_type granite",
    ),
    "layers before": ("modernbert-decoder", "causal-lm", {"yes": "yes"}, "follows other layers"),
    "head of its own": ("ctrl", "causal-lm", {"yes": "yes"}, "a head of its own, `classifier`"),
    "no output layer": ("llama", "token-cls", {"yes": "yes"}, "a LlamaForTokenClassification has no output layer"),
    "head with bias": (
        "bert",
        "seq-cls",
        {"labels": ["LABEL_1"]},
        "its head is `classifier.bias`, `classifier.weight`",
    ),
    "several layers": ("roberta", "seq-cls", {"labels": ["LABEL_1"]}, "`classifier.dense.weight`"),
    "no such label": ("llama", "seq-cls", {"labels": ["good"]}, "'good' is none of its labels"),
    "two tokens": ("llama", "causal-lm", {"yes": "yes no"}, "'yes no' is not one token of the tokenizer"),
    "another case": (
        "llama",
        "causal-lm",
        {"yes": "Yes"},
        "'Yes' is not one token of the tokenizer; 'yes' and ' yes' are",
    ),
    "one row": ("llama", "causal-lm", {"yes": " yes", "no": "Ġyes"}, "are the same row, 40"),
    "no such row": ("llama", "causal-lm", {"yes": "far"}, "'far' is token 400, but the output layer has 96 rows"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(
    case: tuple[str, Task, dict[str, Any], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, task, options, message = case
    monkeypatch.setitem(WORDS, "far", 400)
    folder = with_words(save_base(tmp_path / "judge", model_type, task, FP32))
    with pytest.raises(UnsupportedAdapter) as refused:
        convert(folder, "seq-cls", out=tmp_path / "out", **options)
    assert message in str(refused.value)
    assert refused.value.hint


REFUSED_ADAPTERS: dict[str, tuple[dict[str, Any], str]] = {
    "only on the output layer": ({"target_modules": ["lm_head"]}, "no LoRA besides that on the output layer"),
    "DoRA": ({"target_modules": [*_LORA, "lm_head"], "use_dora": True}, "`lm_head` has DoRA"),
    "an init": ({"target_modules": [*_LORA, "lm_head"], "init_lora_weights": "pissa"}, "pissa, which changes W"),
    "a bias": ({"target_modules": [*_LORA, "lm_head"], "lora_bias": True}, "`lm_head` has `lora_bias`"),
}


@pytest.mark.parametrize("case", REFUSED_ADAPTERS.values(), ids=REFUSED_ADAPTERS)
def test_adapters_that_are_refused(case: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    lora, message = case
    base = judge_at(tmp_path / "base", "llama", tie_word_embeddings=True)
    train(load_model(base, "causal-lm"), tmp_path / "adapter", task_type="CAUSAL_LM", **lora)
    with pytest.raises(UnsupportedAdapter, match=message) as refused:
        convert(tmp_path / "adapter", "seq-cls", yes="yes", no="no", base=base, out=tmp_path / "out")
    assert refused.value.hint is not None
    assert refused.value.hint.endswith("--untie")


def test_the_page_about_judges_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "fixtures" / "causal-llama", tmp_path / "fixtures" / "causal-llama")
    monkeypatch.chdir(tmp_path)
    convert("fixtures/causal-llama/base", "seq-cls", yes=" 1", no=" 0", out="reward")
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "page.py").write_text(program)
    runpy.run_path(str(tmp_path / "page.py"))


def test_an_adapter_keeps_the_names_of_its_labels(tmp_path: Path) -> None:
    adapter = ROOT / "fixtures" / "causal-llama" / "adapter"
    graded = convert(adapter, "seq-cls", labels=["good= 1", "bad= 0"], out=tmp_path / "graded").path
    merged = merge(graded, out=tmp_path / "merged").path
    assert load_classifier(merged).config.id2label == {0: "good", 1: "bad"}
    reward = convert(graded, "seq-cls", yes="good", no="bad", out=tmp_path / "reward").path
    require_right(reward)
    assert load_classifier(merge(reward, out=tmp_path / "one").path).config.num_labels == 1
