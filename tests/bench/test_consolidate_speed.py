"""Consolidation against `cp` and zero_to_fp32: `pytest -m bench -s tests/bench/test_consolidate_speed.py`.

1.7 GB of float32 masters on 4 ranks, and a LoRA checkpoint on 8. `cp` copies as many bytes as we write, and is synced
because our output is. zero_to_fp32 takes part where deepspeed is installed, or where LORA_TOOL_DEEPSPEED_PYTHON names
an interpreter that has it. As many bytes again as every other kind of checkpoint has them, one after the other.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
from pathlib import Path

import pytest

from tests.bench.processes import interleaved, ratio, run, table

ROUNDS = 5
THEIRS = "zero_to_fp32 --safe_serialization"
ZERO_TO_FP32 = """
import sys
from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict
convert_zero_checkpoint_to_fp32_state_dict(sys.argv[1], sys.argv[2], safe_serialization=True)
"""

pytestmark = pytest.mark.bench


def ours(checkpoint: Path, out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "lora_tool", "consolidate", str(checkpoint), "-o", str(out), "-q", *options]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bench")
    for sort in ("full", "lora"):
        run([sys.executable, "-m", "tests.bench.zero_checkpoints", str(root / sort), sort])
    run(ours(root / "full", root / "bytes", "--what", "state"))
    return root


def test_against_cp_and_zero_to_fp32(folders: Path) -> None:
    out = folders / "out"
    commands = {
        "cp -r; sync": ["sh", "-c", f"cp -r {folders}/bytes {out} && sync {out}/* {out}"],
        "consolidate 1.7 GB": ours(folders / "full", out, "--what", "state"),
        "  to bfloat16": ours(folders / "full", out, "--what", "state", "--dtype", "bf16"),
        "  without checks of values": ours(
            folders / "full", out, "--what", "state", "--ignore", "LT411,LT412,LT413,LT414"
        ),
        "adapter of 8 ranks": ours(folders / "lora", out),
    }
    python = os.environ.get("LORA_TOOL_DEEPSPEED_PYTHON") or sys.executable
    if python != sys.executable or importlib.util.find_spec("deepspeed"):
        commands[THEIRS] = ["env", "DS_ACCELERATOR=cpu", python, "-c", ZERO_TO_FP32, f"{folders}/full", str(out)]
    runs = interleaved(commands, out=out, rounds=ROUNDS)
    print("\n" + table(runs, against="cp -r; sync"))
    print(
        f"consolidate 1.7 GB: {ratio(runs['consolidate 1.7 GB'], runs['cp -r; sync'], 'wall'):.2f} × the copy (aim ≤ 1.0)"
    )
    eight = statistics.median(one.wall for one in runs["adapter of 8 ranks"])
    print(f"adapter of 8 ranks: {eight:.2f} s (aim ≤ 0.5, towards 0.35)")
    if THEIRS in runs:
        print(f"{THEIRS} takes {ratio(runs[THEIRS], runs['consolidate 1.7 GB'], 'wall'):.1f} times as long as ours")
    assert max(one.rss for one in runs["consolidate 1.7 GB"]) <= 250
    assert max(one.rss for one in runs["adapter of 8 ranks"]) <= 80
