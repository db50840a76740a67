"""`verify --text`: the loss per token against that of transformers and PEFT, which load the models whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from lora_tool.verification import losses
from lora_tool.verification.verifying import verify
from tests.cli.calling import Caller
from tests.mutations import copy_of

WORDS = "The train is faster, and you can read. The sky is blue on a clear day. " * 8


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    return copy_of("causal-llama/merged", tmp_path)


def loss_of(model: Any, folder: Path, texts: list[str]) -> tuple[float, int]:
    """Return what transformers says of windows of 128 tokens, one at a time, and how many tokens were predicted."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    total, tokens = 0.0, 0
    for text in texts:
        ids = torch.tensor(tokenizer(text)["input_ids"])
        for window in torch.split(ids, 128):
            if len(window) > 1:
                with torch.no_grad():
                    loss = model.eval()(input_ids=window[None], labels=window[None]).loss
                total, tokens = total + float(loss) * (len(window) - 1), tokens + len(window) - 1
    return total / tokens, tokens


@pytest.mark.filterwarnings("ignore:Token indices sequence length is longer")
def test_losses_are_those_of_transformers_and_peft(
    merged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_LOGITS", 300 * 304)  # two windows at a time
    texts = [WORDS, "Short.", WORDS[:100]]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts) + '"\u2028 in a text"\n')
    texts.append("\u2028 in a text")
    found = verify(merged, text=path).loss
    assert found is not None
    assert (found.texts, found.window, found.streamed) == (4, 128, True)
    base = AutoModelForCausalLM.from_pretrained(merged.parent / "base", dtype=torch.float32)
    theirs, tokens = loss_of(base, merged, texts)
    assert found.tokens == tokens
    assert found.base == pytest.approx(theirs, abs=1e-5)
    adapted = PeftModel.from_pretrained(base, merged.parent / "adapter")
    assert found.unmerged == pytest.approx(loss_of(adapted, merged, texts)[0], abs=1e-5)
    whole = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    assert found.merged == pytest.approx(loss_of(whole, merged, texts)[0], abs=1e-5)
    assert 0 < abs(found.difference) < 0.01


def test_what_is_printed(call: Caller, merged: Path, tmp_path: Path) -> None:
    path = tmp_path / "plain.txt"
    path.write_text(WORDS)
    lines = call("verify", merged, "--text", path).out.splitlines()
    at = next(at for at, line in enumerate(lines) if "loss per token in nats" in line)
    assert str(path) in lines[at]
    assert lines[at + 1].startswith("    base alone ")
    told = call("verify", merged, "--text", path, "--json").json["verification"]["loss"]
    assert told["difference"] == pytest.approx(told["merged"] - told["unmerged"])
    assert f"merged {told['merged']:.4f}" in lines[at + 1]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.txt", " \n", "holds no text"),
        ("a.jsonl", '{"text": "a b c"}\n{"prompt": "p"}\n', "`line 2`: expected a text, or an object with a `text`"),
        ("a.jsonl", "{\n", "`line 1`: is not valid JSON"),
    ],
)
def test_a_wrong_file_is_one_error(
    call: Caller, merged: Path, tmp_path: Path, name: str, content: str, said: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    called = call("verify", merged, "--text", path)
    assert called.code == 3
    assert str(path) in called.err
    assert said in called.err


def test_a_classifier_has_no_loss_on_text(call: Caller, tmp_path: Path) -> None:
    path = tmp_path / "plain.txt"
    path.write_text(WORDS)
    called = call("verify", copy_of("reward-qwen2/merged", tmp_path), "--text", path)
    assert called.code == 3
    assert "is a classifier" in called.err
