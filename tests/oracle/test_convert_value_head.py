"""`convert --to peft --rm`: LLaMA-Factory's value head as a score head, whose rewards are the value head's less a constant."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForSequenceClassification

from lora_tool import convert
from lora_tool.core.errors import BrokenFile, UnsupportedAdapter
from tests.cli.calling import Caller
from tests.judging import codes, judge
from tests.oracle.peft_merge import load_model, save_adapter, save_base

TOKENS = torch.tensor([[5, 9, 2, 17], [3, 3, 11, 8]])


def head(hidden: int, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    weight = torch.randn((1, hidden), generator=generator)
    return {"v_head.summary.weight": weight, "v_head.summary.bias": torch.tensor([0.375]), **changes}


@pytest.fixture(params=["llama", "gpt2"])
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """Base, adapter with a value head beside it, and the head."""
    base = save_base(tmp_path / "base", request.param, "causal-lm", torch.float32, pad_token_id=0)
    gpt = {"target_modules": ["c_attn"], "fan_in_fan_out": True}
    lora: dict[str, Any] = gpt if request.param == "gpt2" else {"target_modules": ["q_proj", "up_proj"]}
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", {"r": 4, **lora})
    own = head(load_model(base, "causal-lm").config.hidden_size)
    save_file(own, adapter / "value_head.safetensors", {"format": "pt"})
    return base, adapter, own


def values(base: Path, adapter: Path, own: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return what the value head says of the last token, as LLaMA-Factory and TRL compute it."""
    model = PeftModel.from_pretrained(load_model(base, "causal-lm"), adapter).eval()
    with torch.no_grad():
        hidden = model(TOKENS, output_hidden_states=True).hidden_states[-1]
    return torch.nn.functional.linear(hidden, own["v_head.summary.weight"], own["v_head.summary.bias"])[:, -1, 0]


def test_the_rewards_are_those_of_the_value_head(
    trained: tuple[Path, Path, dict[str, torch.Tensor]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter, own = trained
    call = Caller(capsys)
    found = call("validate", adapter, "--format", "json").json["findings"]
    (hint,) = {each["hint"] for each in found if each["code"] == "LT222"}
    command = re.sub(r"^.*: ", "", hint).split()[1:]
    done = call(*command, "-o", tmp_path / "reward")
    assert done.code == 0, done.err
    assert "without its bias: every reward is 0.375 lower than the value head's" in done.out
    told = json.loads((tmp_path / "reward" / "lora_tool.json").read_text())
    assert told["value_head"] == {"file": "value_head.safetensors", "constant": 0.375}
    expected = values(base, adapter, own)
    classifier = load_model(base, "seq-cls", 1)
    again = PeftModel.from_pretrained(classifier, tmp_path / "reward").eval()
    loaded = again.load_adapter(tmp_path / "reward", "again")
    assert ([*loaded.missing_keys], [*loaded.unexpected_keys]) == ([], [])
    with torch.no_grad():
        scores = again(TOKENS).logits[:, 0]
    assert torch.allclose(scores + 0.375, expected, rtol=0, atol=2e-6)
    assert codes(judge(tmp_path / "reward", base=base, task="reward")) == set()
    assert call("merge", "--rm", tmp_path / "reward", "-o", tmp_path / "merged").code == 0
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        assert torch.allclose(merged(TOKENS).logits[:, 0] + 0.375, expected, rtol=0, atol=1e-5)


def test_what_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.float32)
    adapter = save_adapter(tmp_path / "adapter", base, "causal-lm", {"r": 4, "target_modules": ["q_proj", "lm_head"]})
    hidden = load_model(base, "causal-lm").config.hidden_size

    def refused(match: str, error: type[Exception] = UnsupportedAdapter) -> None:
        with pytest.raises(error, match=match):
            convert(adapter, "peft", reward=True, out=tmp_path / "out")

    refused("has no value head")
    path = adapter / "value_head.safetensors"
    save_file(head(hidden), path)
    refused("the adapter changes the output layer")
    for wrong in (head(hidden + 1), head(hidden, **{"v_head.summary.bias": torch.zeros(2)})):
        save_file(wrong, path)
        refused("hidden size of|expected one float")
    save_file({"v_head.summary.weight": torch.zeros(2, hidden)}, path)
    refused("expected v_head.summary.weight of shape")
    save_file(head(hidden, **{"v_head.other": torch.zeros(1)}), path)
    refused("expected v_head.summary.weight of shape")
    path.write_bytes(b"\x00")
    refused("value_head", BrokenFile)
    save_file(head(hidden), path)
    (base / "config.json").rename(base / "gone")
    refused("the base is not at hand")
