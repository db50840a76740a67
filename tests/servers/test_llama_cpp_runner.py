"""llama.cpp's own runner with the files that `prepare` writes, against PEFT's log probabilities: the part of the gate."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from lora_tool import Server, prepare
from tests.servers.agreement import NEAR, answers_of
from tests.servers.cases import BASES, farthest, loaded, values_of

KINDS = ["linear", "rslora", "patterns", "embedding-and-lm-head", "tokens"]


@pytest.mark.filterwarnings("ignore")  # of PEFT, about patterns of parameters
def test_the_runner_gives_pefts_log_probabilities(tmp_path: Path) -> None:
    if any(importlib.util.find_spec(package) is None for package in ("gguf", "xllamacpp")):
        pytest.skip("gguf or xllamacpp is not installed")
    from tests.servers.gguf_base import write_base

    base = BASES["qwen3"].write(tmp_path / "base")
    expected, files = {"": values_of(loaded(base, None))}, {}
    for kind, case in BASES["qwen3"].kinds():
        if kind in KINDS:
            adapter = case.trained(base, tmp_path / kind)
            expected[kind] = values_of(loaded(base, adapter))
            out = prepare(adapter, Server.LLAMA_CPP, base=base, out=tmp_path / f"{kind}-out").path
            files[kind] = str(out / "adapter.gguf")
    job = {"model": str(write_base(base, tmp_path / "base.gguf")), "adapters": files}
    answers = answers_of(Server.LLAMA_CPP, job, tmp_path / "asked")
    assert {name: answer for name, answer in answers.items() if "error" in answer} == {}
    apart = {name: farthest(answers[name]["values"], values) for name, values in expected.items()}
    assert {name: each for name, each in apart.items() if each > NEAR[Server.LLAMA_CPP]} == {}
    assert len(apart) == 1 + len(KINDS)
