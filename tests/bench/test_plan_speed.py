"""The plan of a merge into hundreds of billions of parameters, from headers alone:
`pytest -m bench -s tests/bench/test_plan_speed.py`.

CPU of the dry run on two cores at a load of 14: bf16 with LoRA on every linear layer 5.9 s, on the attention alone 2.0 s;
fp8 6.5 s and 3.4 s; Qwen3-235B 4.0 s and 2.3 s; 266, 115, 319, 171, 216 and 99 MB. The aims are 5 s and 10 s on a quiet
machine. As JSON, by turns with the code that asked transformers where the experts lie: bf16 13.3 s → 6.8 s, fp8 12.0 s →
8.8 s, attention 7.3 s → 2.8 s and 8.1 s → 4.4 s, Qwen3 8.1 s → 5.3 s and 5.6 s → 2.4 s, 815 MB → 438 MB, the same bytes.
A table of mixtures says now what transformers was imported for (5 s: torch 1.6, `modeling_utils` with torch.distributed
and torch._dynamo 2.5, its list of models 0.6). The rest is flat: headers a fifth, steps on disk a sixth, view and rules a
fifth.
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

OF_VALUES = "LT208,LT209,LT219,LT220,LT227,LT228,LT311"
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
