"""What the rows teach, as the collator makes them, and what is shown of them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model

from lora_tool_train.live_checks import model_findings, rate_findings
from lora_tool_train.rows import label_findings, one_row, read_rows
from tests.train.running import LLAMA, QWEN2

EOS, PAD = 1, 0


class Words:
    """A tokenizer of which a row needs little."""

    eos_token, eos_token_id, chat_template = "</s>", EOS, None

    def __init__(self, pad: int) -> None:
        self.pad_token_id = pad

    def decode(self, tokens: list[int]) -> str:
        return "".join(f"<{token}>" for token in tokens)


def like_transformers(pad: int) -> Any:
    """Collate as DataCollatorForLanguageModeling does: the labels are the tokens, but for those that are padding."""

    def collate(rows: list[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([row["input_ids"] for row in rows])
        return {"input_ids": tokens, "labels": tokens.masked_fill(tokens == pad, -100)}

    return collate


def given(rows: list[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    torch.rand(1)  # as a collator that masks at random does
    return {name: torch.tensor([row[name] for row in rows]) for name in ("input_ids", "labels")}


ENDED = [{"input_ids": [5, 6, EOS]}] * 4
HALF = [{"input_ids": [5, 6], "labels": [-100, -100]}, {"input_ids": [5, 6], "labels": [5, 6]}]


@pytest.mark.parametrize(
    ("rows", "collate", "pad", "codes"),
    [
        (ENDED, like_transformers(EOS), EOS, {"eos-masked": "warning"}),
        (ENDED, like_transformers(PAD), PAD, {}),
        ([{"input_ids": [5, 6, 7]}], like_transformers(EOS), EOS, {}),  # text without an end
        ([{"input_ids": [5, 6, EOS], "attention_mask": [1, 1, 0]}], like_transformers(EOS), EOS, {}),  # padding
        ([{"input_ids": [EOS, 5, 6]}], like_transformers(EOS), EOS, {}),  # the beginning, in GPT-2 and OPT
        ([{"input_ids": [5, EOS], "labels": [-100, EOS]}], given, EOS, {}),
        ([{"input_ids": [5, EOS], "labels": [0, -100]}], given, EOS, {}),  # classes of tokens
        ([{"input_ids": [5, 6], "labels": [-100, -100]}], given, PAD, {"no-labels": "error"}),
        ([{"input_ids": [5, 6], "labels": [-100, -100]}] * 100, given, PAD, {"no-labels": "warning"}),  # not all read
        (HALF, given, PAD, {"no-labels": "warning"}),
        ([*HALF, *HALF[1:]], given, PAD, {}),
        ([{"prompt": "5"}], lambda rows: rows, PAD, {}),
    ],
)
def test_what_the_labels_cannot_teach(rows: Any, collate: Any, pad: int, codes: dict[str, str]) -> None:
    loader = SimpleNamespace(dataset=rows, collate_fn=collate)
    state = torch.get_rng_state()
    read = read_rows(loader)
    assert torch.equal(state, torch.get_rng_state())
    found = label_findings(read, Words(pad), are_all=len(read) == len(rows))
    assert {item.code: str(item.severity) for item in found} == codes


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({"input_ids": [5, 6, EOS], "labels": [-100, 6, EOS]}, ["<5>[[<6><1>]]"]),
        ({"prompt_ids": [5], "chosen_ids": [6, EOS]}, ["prompt: <5>", "chosen: <6><1>"]),
        ({"chosen_input_ids": [5, 6], "chosen_labels": [-100, 6]}, ["chosen: <5>[[<6>]]"]),
        ({"prompt": "two\nlines"}, ["prompt: two\\nlines"]),
    ],
)
def test_one_row_is_shown_with_its_labels(row: Any, shown: list[str]) -> None:
    loader = SimpleNamespace(dataset=iter([row]), collate_fn=given)  # streamed
    assert one_row(loader, read_rows(loader), Words(PAD)) == shown


@pytest.mark.parametrize(
    ("rate", "schedule", "steps", "severity"),
    [
        (2e-4, "linear", 10, None),
        (2e-4, "cosine", 10, None),
        (5e-6, "constant", 10, None),
        (2e-4, "constant_with_warmup", 1, "error"),  # its one step is the first of the warm-up
        (0.0, "linear", 10, "error"),
        (1e-6, "linear", 10, "warning"),
        (0.0, "reduce_lr_on_plateau", 10, None),  # of which nothing is known
    ],
)
def test_rates_that_teach_nothing(rate: float, schedule: str, steps: int, severity: str | None) -> None:
    layer = torch.nn.Linear(1, 1)
    model = torch.nn.ModuleDict({"lora_A": layer})
    optimizer = torch.optim.SGD(layer.parameters(), lr=rate)
    scheduler = hf.get_scheduler(schedule, optimizer, num_warmup_steps=2, num_training_steps=steps)
    found = [str(item.severity) for item in rate_findings(model, scheduler, steps)]
    assert found == ([severity] if severity else [])


def test_targets_that_name_nothing_are_named_with_what_was_meant() -> None:
    lists: dict[str, Any] = {
        "target_modules": ["Q_proj", "v_proj", "layers.0.mlp.up_proj"],
        "modules_to_save": ["lm_heads"],
    }
    base = hf.AutoModelForCausalLM.from_pretrained(LLAMA)
    found = list(model_findings(get_peft_model(base, LoraConfig(**lists)), None, SimpleNamespace(), sharded=False))
    assert [(item.code, item.message.partition(" ")[0], item.hint) for item in found] == [
        ("unmatched-target", "Q_proj", "did you mean q_proj?"),
        ("unmatched-target", "lm_heads", "did you mean lm_head?"),
    ]


def test_a_head_over_frozen_lora_is_trained() -> None:
    base = hf.AutoModelForSequenceClassification.from_pretrained(QWEN2, num_labels=1)
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("modules_to_save" in name)
    assert not list(model_findings(model, None, SimpleNamespace(), sharded=False))
    model.requires_grad_(requires_grad=False)
    assert [item.code for item in model_findings(model, None, SimpleNamespace(), sharded=False)] == ["frozen-adapter"]
