"""Merge against `cp` and PEFT: `pytest -m bench -s tests/bench/test_merge_speed.py`.

The copy is synced because our output is. Ratios are taken round by round, so a drifting machine does not favour one.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bench.models import make_adapter, make_base
from tests.bench.processes import interleaved, run, table

LAYERS = 14
ROUNDS = 5

PEFT_MERGE = """
import sys, torch
from transformers import AutoModelForCausalLM
from peft import PeftModel
base, adapter, out = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)
"""

pytestmark = pytest.mark.bench


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("bench")
    make_base(root / "base", layers=LAYERS)
    make_adapter(root / "all-r64", layers=LAYERS, rank=64)
    make_adapter(root / "all-r256", layers=LAYERS, rank=256)
    make_adapter(root / "qv-r64", layers=LAYERS, rank=64, targets=("self_attn.q_proj", "self_attn.v_proj"))
    return root


def test_against_cp_and_peft(folders: Path) -> None:
    out = folders / "out"

    def ours(adapter: str, *options: str) -> list[str]:
        return [sys.executable, "-m", "lora_tool", "merge", str(folders / adapter), "-o", str(out), "-q", *options]

    commands = {
        "cp -r; sync": ["sh", "-c", f"cp -r {folders}/base {out} && sync {out}/* {out}"],
        "merge all-linear r64": ours("all-r64"),
        "merge q,v r64": ours("qv-r64"),
        "merge all-linear r256": ours("all-r256"),
        "merge r64 --precision peft": ours("all-r64", "--precision", "peft"),
        "merge r64 --precision float64": ours("all-r64", "--precision", "float64"),
    }
    runs = interleaved(commands, out=out, rounds=ROUNDS)
    peft = run([sys.executable, "-c", PEFT_MERGE, str(folders / "base"), str(folders / "all-r64"), str(out)])
    print("\n" + table(runs, against="cp -r; sync"))
    ratio = peft.cpu / min(one.cpu for one in runs["merge all-linear r64"])
    print(f"PEFT: wall {peft.wall:.1f} s, cpu {peft.cpu:.1f} s, {peft.rss:.0f} MB; {ratio:.1f}× our CPU at r64")
