"""LT823 and LT824: servers that serve something else than the adapter."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.fake_server import TOKENS, FakeServer
from tests.mutations.registry import CAUSAL, FIXTURES, SHARDED, breaks

_BASE = FakeServer(lambda _: TOKENS)


@breaks("LT823", CAUSAL, verified=True, served=_BASE.url)
def _ignored(folder: Path) -> None:
    shutil.rmtree(folder.parent / "base")  # PEFT is not asked
    _BASE.answer_one_verification()


@cache
def _base() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FIXTURES / SHARDED, dtype=torch.float32)


def _of_the_base(asked: Mapping[str, Any]) -> Mapping[str, float]:
    """Answer as the fixture's base does, and with the adapter as another one would."""
    import torch

    with torch.inference_mode():
        found = _base()(torch.tensor([asked["prompt"]])).logits[0, -1].log_softmax(-1)
    likeliest = found.topk(5)
    answer = {f"token_id:{at}": value for at, value in zip(*map(torch.Tensor.tolist, likeliest[::-1]), strict=True)}
    return {token: value - 0.5 * (asked["model"] != "base") for token, value in answer.items()}


_OTHER = FakeServer(_of_the_base)


@breaks("LT824", CAUSAL, verified=True, served=_OTHER.url)
def _another(_: Path) -> None:
    _OTHER.answer_one_verification()
