"""What `validate --for` and `prepare --for` say about adapters is what vLLM and llama.cpp do with them, run on a CPU.

`.ci/servers` makes both and runs this; without it every test is skipped. Adapters on experts are loaded by vLLM, but not
computed: its kernels for them need a GPU.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_tool import Server, merge, prepare
from tests.cli.calling import FIXTURES
from tests.oracle.peft_merge import save_adapter
from tests.servers.agreement import NEAR, answers_of, compared, python_of
from tests.servers.cases import BASES, farthest, loaded, scores_of, values_of
from tests.servers.known import KNOWN

SERVERS = [Server.VLLM, Server.LLAMA_CPP]
OF_REWARDS = {"runner": "pooling", "skip_tokenizer_init": False}
REWARD = {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 7, "use_rslora": True}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads of tiny products wait for one another: on a busy machine ten times longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore")  # of PEFT, transformers and torch, about adapters that are odd on purpose
@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("name", BASES)
def test_what_is_said_is_what_the_server_does(server: Server, name: str, tmp_path: Path) -> None:
    python_of(server)
    if (server, name) == (Server.LLAMA_CPP, "gemma3"):
        pytest.skip("llama.cpp's runner loads no Gemma 3 this small")
    seen = compared(server, name, tmp_path)
    if report := os.environ.get("SERVERS_REPORT"):
        Path(report, f"{server.value}-{name}.json").write_text(json.dumps(vars(seen), indent=1))
    known = {kind: text for (where, base, kind), text in KNOWN.items() if (where, base) == (server, name)}
    assert seen.disagreements == known, seen.details


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize(("name", "lora"), [("llama", {"alpha_pattern": {"q_proj": 5}}), ("qwen2-tied", {"r": 3})])
def test_a_merged_model_gives_pefts_log_probabilities(
    server: Server, name: str, lora: dict[str, Any], tmp_path: Path
) -> None:
    python_of(server)
    base = BASES[name].write(tmp_path / "base")
    adapter = save_adapter(
        tmp_path / "adapter", base, "causal-lm", {"target_modules": "all-linear", "use_rslora": True, **lora}
    )
    model = merge(adapter, base=base, out=tmp_path / "model").path
    options = {"max_logprobs": 304} if server is Server.VLLM else {}
    answers = answers_of(server, {"model": str(model), "compute": True, "options": options}, tmp_path / "asked")
    assert farthest(answers[""]["values"], values_of(loaded(base, adapter))) < NEAR[server]


def with_tokenizer(base: Path) -> Path:
    """Give the base what vLLM asks every pooling model for."""
    for file in (FIXTURES / "causal-llama" / "base").glob("tokenizer*"):
        shutil.copy(file, base)
    return base


@pytest.mark.parametrize(("name", "labels"), [("llama", 1), ("llama", 3), ("qwen2", 1), ("qwen3", 1)])
def test_a_merged_reward_model_gives_pefts_scores(name: str, labels: int, tmp_path: Path) -> None:
    python_of(Server.VLLM)
    base = with_tokenizer(BASES[name].write(tmp_path / "base"))
    adapter = save_adapter(tmp_path / "adapter", base, "seq-cls", REWARD, num_labels=labels)
    model = merge(adapter, base=base, out=tmp_path / "model", task="reward" if labels == 1 else "seq-cls").path
    answers = answers_of(Server.VLLM, {"model": str(model), "compute": True, "options": OF_REWARDS}, tmp_path / "asked")
    assert torch.allclose(torch.tensor(answers[""]["values"]), scores_of(base, adapter, labels), atol=1e-5)


def test_a_reward_adapter_on_the_base_that_prepare_writes_gives_pefts_scores(tmp_path: Path) -> None:
    python_of(Server.VLLM)
    base = with_tokenizer(BASES["llama"].write(tmp_path / "base"))
    adapter = save_adapter(tmp_path / "adapter", base, "seq-cls", REWARD, num_labels=1)
    out, model = tmp_path / "out", tmp_path / "model"
    prepare(adapter, "vllm", base=base, out=out, reward_base=model)
    options = OF_REWARDS | {"enable_lora": True, "max_loras": 1}
    job = {"model": str(model), "adapters": {"as it is": str(adapter), "prepared": str(out)}, "compute": True}
    answers = answers_of(Server.VLLM, job | {"options": options}, tmp_path / "asked")
    expected = scores_of(base, adapter, 1)
    for name in ("as it is", "prepared"):
        assert torch.allclose(torch.tensor(answers[name]["values"]), expected, atol=1e-5)
