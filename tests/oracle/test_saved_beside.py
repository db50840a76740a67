"""What PEFT saves with an adapter by its own choice: repeats of the base, tied tensors under other names, second copies.

And layers that a base has and the adapter's class does not. PEFT's merge and ours, bit by bit; no rule complains.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForMaskedLM, PreTrainedModel

from lora_tool.core.errors import FindingsFound, UnsupportedAdapter
from lora_tool.core.report import Severity
from tests.judging import codes, judge
from tests.oracle.peft_merge import different, layout, merge_with_ours, saved_tensors
from tests.oracle.quantised_bases import edit
from tests.oracle.test_task_types import save_base
from tests.oracle.tiny import AUTO, NUM_LABELS, Task, tiny_config, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass(frozen=True)
class Case:
    """A tiny model, the class that is trained on it, and its LoRA."""

    kind: str
    task: Task
    lora: dict[str, Any]
    base: Task | Literal["masked-lm"] | None = None
    """The class of the base where it is another; `masked-lm` is one."""
    sizes: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    also: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """What the base stores besides."""
    carries: str = ""
    """What PEFT saves with the adapter by its own choice."""

    def save_base(self, folder: Path) -> None:
        if self.base == "masked-lm":
            model = AutoModelForMaskedLM.from_config(tiny_config(self.kind, "feature-extraction"))
        else:
            model = tiny_model(self.kind, self.base or self.task, **self.sizes)
        save_base(model, folder / "base", self.dtype)
        if self.also:
            more = {name: torch.ones(size, dtype=self.dtype) for name, size in self.also.items()}
            save_file(saved_tensors(folder / "base") | more, folder / "base" / "model.safetensors", {"format": "pt"})

    def loaded(self, folder: Path) -> PreTrainedModel:
        labels = {"num_labels": NUM_LABELS} if self.base and self.task.endswith("cls") else {}
        auto = AutoModelForMaskedLM if self.task == "feature-extraction" and self.base else AUTO[self.task]
        model: PreTrainedModel = auto.from_pretrained(folder / "base", dtype="auto", **labels)
        return model

    def train(self, folder: Path) -> None:
        """Write base and adapter, with random tensors, as PEFT saves it."""
        self.save_base(folder)
        lora = {"r": 4, "lora_alpha": 7, "task_type": self.task.upper().replace("-", "_"), **self.lora}
        save = lora.pop("save", "auto")
        adapted = get_peft_model(self.loaded(folder), LoraConfig(**lora))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in (p for p in adapted.parameters() if p.requires_grad):
                parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.1)
        adapted.save_pretrained(str(folder / "adapter"), save_embedding_layers=save)
        assert not self.carries or self.carries in saved_tensors(folder / "adapter")

    def require_pefts(self, folder: Path) -> None:
        model = PeftModel.from_pretrained(self.loaded(folder), folder / "adapter")
        model.merge_and_unload().save_pretrained(folder / "theirs")
        theirs, ours = saved_tensors(folder / "theirs"), saved_tensors(merged(folder, "peft"))
        assert layout(ours) == layout(theirs)
        assert not different(ours, theirs)
        assert layout(saved_tensors(merged(folder, "float32"))) == layout(theirs)

    def require_answers(self, folder: Path) -> None:
        """Assert that the model with its ends parted loads whole, and answers as the adapter on its base."""
        ours, info = AUTO[self.task].from_pretrained(merged(folder, "float32", untie=True), output_loading_info=True)
        assert not any(info.values())
        trained = PeftModel.from_pretrained(self.loaded(folder), folder / "adapter").eval()
        tokens = torch.arange(3, 13)[None]
        inputs = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if self.task == "seq-2-seq-lm" else {})
        with torch.no_grad():
            assert torch.allclose(trained(**inputs).logits, ours.eval()(**inputs).logits, atol=1e-5)


def merged(folder: Path, precision: str, **choices: Any) -> Path:
    return merge_with_ours(folder / "base", folder / "adapter", folder / f"ours-{precision}", precision, **choices)


def errors(folder: Path) -> set[str]:
    return codes(judge(folder / "adapter", base=folder / "base"), Severity.ERROR)


def on(*targets: str, **more: Any) -> dict[str, Any]:
    return {"target_modules": [*targets], **more}


def tied(kind: str, lora: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> Case:
    return Case(kind, "causal-lm", lora, sizes={"tie_word_embeddings": True}, dtype=dtype)


POOLER = {"roberta.pooler.dense.weight": (32, 32), "roberta.pooler.dense.bias": (32,)}  # as the published one has it
DENSE = on("query", "value", "dense", exclude_modules=["classifier.dense"])
"""`dense` names the pooler in the base too, as `all-linear` does; it is no layer that was lost."""
CASES = {
    "magnitude of an embedding under both names": Case(
        "llama", "causal-lm", on("embed_tokens", "q_proj", use_dora=True)
    ),
    "an embedding beside a recomputed init": Case(
        "llama", "causal-lm", on("embed_tokens", "q_proj", init_lora_weights="pissa", r=48)
    ),
    "three names of one matrix": Case("seamless_m4t", "seq-2-seq-lm", on("q_proj", save=True)),
    "a convolution as the first layer": Case("dinov2", "feature-extraction", on("q_proj", save=True)),
    # BERT's kin tie the weight to the embeddings, and the bias to another bias: both are untied
    "an output layer saved whole with its bias": Case(
        "mpnet", "feature-extraction", on("q", modules_to_save=["decoder"], task_type=None), base="masked-lm"
    ),
    "a pooler that the classifier is without": Case("roberta", "seq-cls", DENSE, base="causal-lm", also=POOLER),
    "a pooler that the tagger is without": Case("bert", "token-cls", DENSE, base="feature-extraction"),
    "a new pooler as a part of the head": Case(
        "bert", "seq-cls", on("query", modules_to_save=["pooler", "classifier"]), base="masked-lm"
    ),
    # PEFT saves the layer as it was before training, and loads it over the base's
    "the bias under the LoRA of an output layer": Case(
        "phi", "causal-lm", on("lm_head"), carries="base_model.model.lm_head.base_layer.bias"
    ),
    # OLoRA takes the factors out of the weight; PEFT saves what is left of an output layer
    "a changed weight that is not changed again": Case(
        "llama",
        "causal-lm",
        on("lm_head", "q_proj", init_lora_weights="olora"),
        sizes={"tie_word_embeddings": False},
        dtype=torch.float32,
        carries="base_model.model.lm_head.base_layer.weight",
    ),
    # PEFT saves `score` and `classifier`; a trained classifier's head that is called otherwise is in the base
    **{
        f"a head of another name: {kind}": Case(kind, "seq-cls", on("v_lin", "value"))
        for kind in ("flaubert", "perceiver")
    },
    # LayoutLMv3 has one layer up to nine labels, and two beyond
    **{
        f"a head for {labels} labels": Case(
            "layoutlmv3", "token-cls", on("query", "value"), sizes={"num_labels": labels}
        )
        for labels in (NUM_LABELS, 12)
    },
}


@pytest.mark.parametrize("name", CASES)
def test_the_merge_is_pefts_and_no_rule_complains(name: str, tmp_path: Path) -> None:
    CASES[name].train(tmp_path)
    CASES[name].require_pefts(tmp_path)
    assert not errors(tmp_path)


def test_another_value_than_the_bases_is_not_loaded_over_it_without_a_word(tmp_path: Path) -> None:
    case = CASES["a convolution as the first layer"]
    case.train(tmp_path)
    tensors = saved_tensors(tmp_path / "adapter")
    name = "base_model.model.embeddings.patch_embeddings.projection.bias"
    save_file(tensors | {name: tensors[name] + 1}, tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(
        FindingsFound, match="LT207 .*it belongs to no entry of `target_modules` or `modules_to_save`"
    ) as refused:
        merged(tmp_path, "peft")
    # the way out that it names
    assert "`modules_to_save`" in (refused.value.hint or "")
    module = name.removeprefix("base_model.model.").removesuffix(".bias")
    edit(tmp_path / "adapter" / "adapter_config.json", modules_to_save=[module])
    case.require_pefts(tmp_path)


FLOAT32: Any = {"dtype": torch.float32}


@pytest.mark.parametrize(
    "case",
    [
        # BERT's kin have a second name of the output bias, ProphetNet one of the embeddings
        *(
            Case("roberta", "causal-lm", on("query", end, bias="all"), **FLOAT32)
            for end in ("decoder", "word_embeddings")
        ),
        Case("prophetnet", "causal-lm", on("query_proj", "lm_head", bias="all"), **FLOAT32),
        tied("qwen2", on("q_proj", trainable_token_indices=[3, 7]), torch.float32),
    ],
    ids=lambda case: f"{case.kind}-{case.lora['target_modules'][-1]}",
)
def test_what_was_trained_at_tied_ends_is_at_both_when_they_part(case: Case, tmp_path: Path) -> None:
    case.train(tmp_path)
    case.require_answers(tmp_path)


@pytest.mark.parametrize("saved", ["shared", "lm_head"])
def test_embeddings_of_several_layers_saved_whole_at_one_are_refused(saved: str, tmp_path: Path) -> None:
    """BART's encoder and decoder have the matrix of both: PEFT's merge writes the copy, and drops theirs."""
    case = Case("bart", "seq-2-seq-lm", on("q_proj", modules_to_save=[saved]), **FLOAT32)
    case.train(tmp_path)
    with pytest.raises(UnsupportedAdapter, match="transformers re-initialises it at every load") as refused:
        merged(tmp_path, "peft")
    assert "untie=True" in (refused.value.hint or "")
    case.require_answers(tmp_path)


def test_a_bias_that_peft_forgets_is_written_or_refused(tmp_path: Path) -> None:
    """The embeddings are trained whole, so nothing is tied any more, and the second name of the bias is nowhere."""
    case = Case("roberta", "causal-lm", on("query", modules_to_save=["word_embeddings"]))
    case.train(tmp_path)
    with pytest.raises(UnsupportedAdapter, match="`lm_head.decoder.bias` is no longer tied to `lm_head.bias`"):
        merged(tmp_path, "peft")
    model = PeftModel.from_pretrained(case.loaded(tmp_path), tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "theirs")
    theirs, ours = saved_tensors(tmp_path / "theirs"), saved_tensors(merged(tmp_path, "peft", untie=True))
    assert ours.keys() - theirs.keys() == {"lm_head.decoder.bias"}
    assert not different({name: ours[name] for name in theirs}, theirs)


def test_tied_ends_that_are_stored_as_the_output_layer_stay_tied(tmp_path: Path) -> None:
    case = tied("blt", on("v_proj", save=True))
    case.train(tmp_path)
    assert not any("local_encoder.embed_tokens" in name for name in saved_tensors(tmp_path / "base"))
    case.require_pefts(tmp_path)
    for folder in tmp_path.glob("ours-*"):
        assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is True
        _, info = AUTO["causal-lm"].from_pretrained(folder, output_loading_info=True)
        assert not any(info.values())


@pytest.mark.parametrize(
    ("case", "choices", "words"),
    [
        (
            Case("marian", "seq-2-seq-lm", on("embed_positions", "q_proj")),
            {"precision": "peft"},
            "LT501 .*adapts `model.decoder.embed_positions`",  # which are computed
        ),
        *(
            (
                tied("qwen2", on("lm_head", init_lora_weights="pissa")),
                choices,
                "the init changed both before the training",
            )
            for choices in ({"precision": "float32"}, {"precision": "float32", "untie": True})
        ),
        (tied("blt", on("lm_head")), {"precision": "float32"}, "is one layer in several places"),
    ],
)
def test_what_no_merge_can_hold_is_refused_by_its_reason(
    case: Case, choices: dict[str, Any], words: str, tmp_path: Path
) -> None:
    case.train(tmp_path)
    with pytest.raises((FindingsFound, UnsupportedAdapter), match=words):
        merged(tmp_path, **choices)
