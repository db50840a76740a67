"""The plan of a merge into hundreds of billions of parameters, from headers alone:
`pytest -m bench -s tests/bench/test_plan_speed.py`.

A quiet machine takes 9.7 s for bf16 and 10.1 s for fp8 with LoRA on every linear layer, 5.7 s and 7.2 s with LoRA on the
attention alone: the aims are 5 s and 10 s. On two cores at a load of 7 to 11, by turns with the code before, CPU of the
whole dry run: bf16 17.0 s → 11.3 s, fp8 20.8 s → 13.7 s, and 650 and 730 MB → 605 and 660 MB. Of the 11.3 s, 5 are the import of torch (1.6) and transformers (2.5 for `modeling_utils` with
torch.distributed and torch._dynamo, 0.6 to list its models), which has to be asked where experts are fused. The rest:
headers 1.9, view and rules 1.2, transformers' mapping 1.2, steps on disk 1.1, files and manifest 0.4.
What made the difference: rules ask one layer of each kind, not 45,000; the collector, a tenth of it all, waits for three
million objects; a quantised base is read once; sizes, tiles, types and shapes of headers are worked out once for each
form; names are put in order by their parts; keys that differ in numbers alone are parsed once. Tried before: row numbers
as Python lists made the plan 97 s; as numpy ranges 12 s.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.bench.processes import run
from tests.bench.sparse_models import DEEPSEEK_V3, QWEN3_235B, Mixture, make_adapter, make_base

OF_VALUES = "LT208,LT209,LT219,LT220,LT227,LT311"
"""The rules that read the adapter's values."""

pytestmark = pytest.mark.bench


@pytest.mark.parametrize("model", [DEEPSEEK_V3, QWEN3_235B], ids=["deepseek-v3", "qwen3-235b"])
def test_planned_from_headers(model: Mixture, tmp_path: Path) -> None:
    everywhere, attention = tmp_path / "everywhere", tmp_path / "attention"
    make_adapter(everywhere, model)
    make_adapter(attention, model, only="self_attn")
    print()
    for form, aim in (("bf16", 5), ("fp8", 10)):
        base = tmp_path / form
        count = make_base(base, model, fp8=form == "fp8")
        for adapter in (everywhere, attention):
            # an adapter is as sparse as its base, and so all zeros, which is a finding
            command = ["merge", str(adapter), "--base", str(base), "-o", str(tmp_path / "out"), "--ignore", OF_VALUES]
            for how in ("--dry-run", "--dry-run --json"):
                done = run([sys.executable, "-m", "lora_tool", *command, *how.split()])
                print(
                    f"{form:>5} {count:>7,} tensors, {adapter.name:<11} {how:<17}"
                    f"{done.wall:6.1f} s wall {done.cpu:6.1f} s CPU {done.rss:6.0f} MB (aim {aim} s)"
                )


def test_every_value_of_the_adapter_looked_at(tmp_path: Path) -> None:
    make_base(tmp_path / "base", DEEPSEEK_V3)
    make_adapter(tmp_path / "adapter", DEEPSEEK_V3)
    command = ["merge", str(tmp_path / "adapter"), "--base", str(tmp_path / "base"), "-o", str(tmp_path / "out")]
    done = run([sys.executable, "-m", "lora_tool", *command, "--ignore", "LT208", "--dry-run"])
    print(f"\n13 GB of zeros looked at, then planned: {done.wall:.1f} s wall, {done.cpu:.1f} s CPU, {done.rss:.0f} MB")


def test_an_adapter_beside_its_base(tmp_path: Path) -> None:
    make_base(tmp_path / "base", DEEPSEEK_V3)
    make_adapter(tmp_path / "adapter", DEEPSEEK_V3)
    command = ["validate", str(tmp_path / "adapter"), "--base", str(tmp_path / "base"), "--headers-only"]
    done = run([sys.executable, "-m", "lora_tool", *command])
    print(f"\nvalidate --base: {done.wall:.1f} s wall, {done.cpu:.1f} s CPU, {done.rss:.0f} MB")
