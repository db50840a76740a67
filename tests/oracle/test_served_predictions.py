"""`lora-tool verify ADAPTER --served URL` where the base is here: a server's answers against PEFT's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from lora_tool import verify
from tests.checkpoint_edits import fields, renamed
from tests.fake_server import CARDS, TOKENS, FakeServer
from tests.mutations import CAUSAL, FIXTURES, copy_of

ADAPTER, FOLDER = FIXTURES / "causal-llama/adapter", FIXTURES / "causal-llama/base"
Rows = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(scope="module")
def model() -> Any:
    base = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    return PeftModel.from_pretrained(base, str(ADAPTER)).eval()


def _answers(model: Any, with_adapter: Rows, without: Rows, name: Callable[[int], str]) -> Any:
    def answer(asked: Mapping[str, Any]) -> Mapping[str, float]:
        ids = torch.tensor([asked["prompt"]])
        with torch.inference_mode():
            adapter = model(ids).logits[0, -1].log_softmax(-1)
            with model.disable_adapter():
                base = model(ids).logits[0, -1].log_softmax(-1)
        values, tokens = (without if asked["model"] == "base" else with_adapter)(adapter, base).topk(5)
        return {name(at): value for at, value in zip(tokens.tolist(), values.tolist(), strict=True)}

    return answer


def _by_id(at: int) -> str:
    return f"token_id:{at}"


def _coarse(row: torch.Tensor) -> torch.Tensor:
    return (row * 64).round() / 64


@pytest.mark.parametrize(
    ("with_adapter", "without", "by_text", "findings", "skipped"),
    [
        pytest.param(lambda a, _: a, lambda _, b: b, False, [], [], id="exact"),
        pytest.param(lambda a, _: a, lambda _, b: b, True, [], [], id="tokens by their text"),
        pytest.param(lambda a, _: _coarse(a), lambda _, b: _coarse(b), False, [], [], id="in 16 bits"),
        pytest.param(lambda a, b: 2 * a - b, lambda _, b: b, False, ["LT824"], [], id="another scaling"),
        pytest.param(lambda _, b: b, lambda _, b: b, False, ["LT823"], [], id="the base"),
        pytest.param(lambda a, _: a.flip(0), lambda _, b: b.flip(0), False, [], ["LT824"], id="of another base"),
    ],
)
def test_a_servers_answers_against_pefts(
    model: Any, with_adapter: Rows, without: Rows, *, by_text: bool, findings: list[str], skipped: list[str]
) -> None:
    name = AutoTokenizer.from_pretrained(FOLDER).decode if by_text else _by_id
    with FakeServer(_answers(model, with_adapter, without, name), cards=CARDS).running() as server:
        found = verify(ADAPTER, served=server.url, base=FOLDER)
    assert [each.code for each in found.report.findings] == findings
    assert [each.code for each in found.report.skipped] == skipped
    assert found.served is not None
    assert found.served.peft is not None
    if not findings and not skipped:
        assert found.served.peft.adapter <= 4 * found.served.peft.base + 1e-5


@pytest.mark.parametrize("fault", ["LT503", "no_such_model"])
def test_what_cannot_be_compared_with_peft_is_asked_about_all_the_same(fault: str, tmp_path: Path) -> None:
    folder = copy_of(CAUSAL, tmp_path)
    if fault == "LT503":
        renamed(folder, lambda name: name.replace(".layers.0.", ".layers.9."))
    else:
        with fields(folder.parent / "base", "config.json") as config:
            config["model_type"] = fault
    with FakeServer(lambda _: TOKENS).running() as server:
        found = verify(folder, served=server.url)
    assert [each.code for each in found.report.findings] == ["LT823"]
    assert fault in found.report.skipped[0].reason


@pytest.mark.parametrize(("by", "findings"), [(1.0, []), (0.5, ["LT824"]), (0.0, ["LT823"])])
def test_scores_against_pefts(by: float, findings: list[str]) -> None:
    folder = FIXTURES / "reward-qwen2"
    base = AutoModelForSequenceClassification.from_pretrained(folder / "base", num_labels=1, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(folder / "adapter")).eval()

    def answer(asked: Mapping[str, Any]) -> Any:
        factor = by if asked["model"] == "ours" else 0.0
        layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        scalings = [dict(layer.scaling) for layer in layers]
        for layer, scaling in zip(layers, scalings, strict=True):
            layer.scaling = {name: value * factor for name, value in scaling.items()}
        with torch.inference_mode():
            scores = model(torch.tensor([asked["input"]])).logits[0].tolist()
        for layer, scaling in zip(layers, scalings, strict=True):
            layer.scaling = scaling
        return {"data": [{"probs": scores}]}

    with FakeServer(answer).running() as server:
        found = verify(folder / "adapter", served=server.url, base=folder / "base", logits=True)
    assert [each.code for each in found.report.findings] == findings
    assert not found.report.skipped
    if not findings:
        assert found.served is not None
        assert found.served.peft is not None
        assert found.served.peft.adapter < 1e-5
