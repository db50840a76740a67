"""Merge against `cp` and PEFT: `pytest -m bench -s tests/bench/test_merge_speed.py`.

The copy is synced because our output is. Ratios are taken round by round, so a drifting machine does not favour one.

Where the CPU goes, all-linear r=64 into 1.5 GB, on a busy 2.5 GHz Xeon (AVX-512, no SHA instructions, 1 MB of L2 a core),
5.4 to 7.5 s in all, PEFT 18.5 s in one run of its own. Parts by themselves: interpreter, imports and plan 0.3, sha256 of
the adapter 0.36, samples read back 0.35; per weight, one thread, 4.69 ns: product 1.85, rounding 0.81, write 0.58,
widening 0.4, read 0.33, add 0.31, finite 0.19. Two threads beside other processes cost more than the sum of these.
Estimate from the parts: were widening, adding, checking and rounding free, 2.7 s would be left; an eighth of PEFT is 2.3.

Tried, in place of blocks of 2^19 weights with 2^17 per pass (4.69 ns, one thread, best of 7 interleaved rounds):
- reading and writing pass by pass, 64, 128 or 256 KB at a time: 5.36, 4.94, 4.70; blocks of 2^18, 2^17: 5.24, 5.56
- products of column tiles, 256 rows by 256 or 512 columns: 4.69, 4.53; 128 by 512: 4.81; 512 by 256: 5.78
- sgemm with beta=1 into the widened weights, by ctypes into numpy's own BLAS: 4.33 to 4.84; not worth a private symbol
- rounding by integer passes instead of ml_dtypes (0.62 ns): a strided copy of halves alone is 0.42; five
  passes and a narrowing would be 0.65 by their single costs (not run as a whole)
- one ufunc over bf16 and float32 with buffered casts: 1.07 at best for what separate passes do in 1.05
- the even and the odd weights of a block apart (two products with half of A's columns each), so that pairs are widened,
  rounded and joined as 32-bit integers, twelve passes without a narrowing: 2.85 against 2.53 ns for what is not the product,
  in a slow phase of the machine; the same bits
- batched products of tiles, 32 by 256 or 64 by 128, which OpenBLAS may do without packing: the same
  bits; k=16 0.7 against 1.1 ns, k=64 no better (2.0 to 2.5 against 2.0 to 2.9), k=256 worse
- interleaved halves to widen: 0.37 to 0.42 ns, shifting 0.26 to 0.45, the cast of ml_dtypes 0.23 to 0.29
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lora_tool.checkpoints import open_model
from tests.bench.models import make_adapter, make_base
from tests.bench.processes import interleaved, ratio, run, table

LAYERS = 14
ROUNDS = 5
FIELDS = ("wall", "cpu", "rss")

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

    peft = [sys.executable, "-c", PEFT_MERGE, str(folders / "base"), str(folders / "all-r64"), str(out)]
    commands = {
        "cp -r; sync": ["sh", "-c", f"cp -r {folders}/base {out} && sync {out}/* {out}"],
        "merge all-linear r64": ours("all-r64"),
        "merge q,v r64": ours("qv-r64"),
        "merge all-linear r256": ours("all-r256"),
        "merge r64 --precision peft": ours("all-r64", "--precision", "peft"),
        "merge r64 --precision float64": ours("all-r64", "--precision", "float64"),
        "PEFT load, merge, save": peft,
    }
    runs = interleaved(commands, out=out, rounds=ROUNDS)
    print("\n" + table(runs, against="cp -r; sync"))
    weights = sum(tensor.spec.numel for tensor in open_model(folders / "base").tensors.values())
    for name, taken in runs.items():
        cpu = statistics.median(one.cpu for one in taken)
        print(f"{name:<32}{1e9 * cpu / weights:>8.2f} ns of CPU per weight of the base")
    less = {field: ratio(runs["PEFT load, merge, save"], runs["merge all-linear r64"], field) for field in FIELDS}
    print("PEFT against merge all-linear r64: " + ", ".join(f"{field} {times:.1f} ×" for field, times in less.items()))


def test_cold(folders: Path) -> None:
    """Base and adapter out of the page cache, as after a download or a restart."""
    out = folders / "out"
    merge = [sys.executable, "-m", "lora_tool", "merge", str(folders / "all-r64"), "-o", str(out), "-q"]
    commands = {
        "cp -r; sync": ["sh", "-c", f"cp -r {folders}/base {out} && sync {out}/* {out}"],
        "merge all-linear r64": merge,
    }
    runs = interleaved(commands, out=out, rounds=ROUNDS, cold=(folders / "base", folders / "all-r64"))
    print("\n" + table(runs, against="cp -r; sync"))


def test_precision_peft_has_pefts_bits_at_this_size(folders: Path) -> None:
    theirs, ours = folders / "peft", folders / "ours"
    run([sys.executable, "-c", PEFT_MERGE, str(folders / "base"), str(folders / "all-r256"), str(theirs)])
    adapter = str(folders / "all-r256")
    run([sys.executable, "-m", "lora_tool", "merge", adapter, "-o", str(ours), "-q", "--precision", "peft"])
    expected = {name: tensor for path in theirs.glob("*.safetensors") for name, tensor in load_file(path).items()}
    found = {name: tensor for path in ours.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert expected.keys() == found.keys()
    unlike = [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]
    print(f"\n{len(unlike)} of {len(expected)} tensors differ from PEFT's at rank 256")
    assert not unlike
