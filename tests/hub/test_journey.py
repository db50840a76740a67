"""The whole way: a reward model trained under ZeRO-3 and saved the wrong way, until somebody loads it from the Hub."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import snapshot_download
from transformers import AutoModelForSequenceClassification

from tests.cli.calling import REPOSITORY, Caller
from tests.hub.conftest import REPO
from tests.hub.server import Hub


@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
@pytest.mark.usefixtures("hub")
def test_from_zero_to_the_hub_with_the_same_rewards(call: Caller, hub: Hub, tmp_path: Path) -> None:
    # LoRA on every linear layer and on the head, two processes, `save_pretrained` without gathering
    make = [sys.executable, str(REPOSITORY / "fixtures" / "make_zero.py"), "--out", str(tmp_path), "stage3-reward"]
    made = subprocess.run(make, capture_output=True, text=True, timeout=540, check=False)
    assert made.returncode == 0, made.stderr[-2000:]
    run, adapter, model = tmp_path / "stage3-reward", tmp_path / "adapter", tmp_path / "model"
    base = REPOSITORY / "fixtures" / "reward-qwen2" / "base"

    diseased = call("validate", run, "--base", base)
    assert diseased.code == 1
    assert "LT206" in diseased.out
    assert f"lora-tool consolidate {run}" in diseased.out

    rescued = call("consolidate", run, "-o", adapter)
    assert rescued.code == 0, rescued.err
    assert "score.base_layer.weight was frozen and random: put into the adapter" in rescued.out

    merged = call("merge", "--rm", adapter, "--base", base, "--dtype", "float32", "-o", model)
    assert merged.code == 0, merged.err
    verified = call("verify", model, "--adapter", adapter, "--base", base, "--logits", "--json")
    assert verified.code == 0, verified.err

    pushed = call("push", model, REPO, "--json")
    assert pushed.code == 0, pushed.err
    assert len(hub.repos[REPO].commits) == 2  # the one that creates the repository, and one

    loaded, info = AutoModelForSequenceClassification.from_pretrained(
        snapshot_download(REPO), dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values())
    assert loaded.config.num_labels == 1
    truth = json.loads((run / "rewards.json").read_text())
    with torch.no_grad():
        rewards = loaded.eval()(input_ids=torch.tensor(truth["prompts"])).logits.squeeze(-1).tolist()
    assert rewards == pytest.approx(truth["rewards"], rel=1e-5, abs=1e-5)
