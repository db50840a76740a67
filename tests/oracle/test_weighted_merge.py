"""A merge of adapters with weights, against PEFT with its layers' scale set, and against the sum that `combine` writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from lora_tool import combine, merge, plan_merge, verify
from lora_tool.core.errors import FindingsFound, UnsupportedAdapter, WrongValue
from tests.oracle.peft_merge import different, layout, load_model, save_adapter, save_base, saved_tensors

ALL: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
QV: dict[str, Any] = {"r": 8, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}


@pytest.fixture(name="pair")
def two(tmp_path: Path) -> tuple[Path, Path, Path]:
    """Return a base and two adapters on it, the first in a folder whose name has an equals sign."""
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.bfloat16)
    one = save_adapter(tmp_path / "lr=0.1", base, "causal-lm", ALL)
    return base, one, save_adapter(tmp_path / "b", base, "causal-lm", QV)


def with_peft(base: Path, adapters: dict[Path, float], out: Path) -> Path:
    first, *others = adapters
    model = PeftModel.from_pretrained(load_model(base, "causal-lm"), first, adapter_name="0")
    for number, other in enumerate(others, start=1):
        model.load_adapter(other, adapter_name=str(number))
    layers: Iterable[Any] = model.modules()
    for layer in layers:
        if hasattr(layer, "set_scale"):
            for name, weight in zip(map(str, range(len(adapters))), adapters.values(), strict=True):
                layer.set_scale(name, weight)
    model.merge_and_unload(adapter_names=[str(number) for number in range(len(adapters))]).save_pretrained(out)
    return out


def test_the_bits_are_those_of_peft_with_its_scales_set(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, one, other = pair
    theirs = saved_tensors(with_peft(base, {one: 0.7, other: -0.3}, tmp_path / "theirs"))
    out = merge([f"{one}=0.7", f"{other}=-0.3"], out=tmp_path / "ours", precision="peft").path
    ours = saved_tensors(out)
    assert layout(ours) == layout(theirs)
    assert different(ours, theirs) == []
    assert verify(out).report.findings == ()


def test_a_weight_in_the_name_is_not_overwritten_by_weights(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, one, other = pair
    for use in (partial(merge, out=tmp_path / "m"), partial(combine, out=tmp_path / "c"), partial(plan_merge, base)):
        with pytest.raises(WrongValue, match=r"b=0\.5 has a weight, but `weights` gives it another"):
            use([str(one), f"{other}=0.5"], weights=[1.0, 2.0])
    assert merge([str(one), str(other)], weights=[1.0, 2.0], out=tmp_path / "m").path.is_dir()  # lr=0.1 is a folder


def test_weights_are_recorded_guarded_and_proven(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, one, other = pair
    out = merge([f"{one}=0.7", f"{other}=0.3"], out=tmp_path / "out").path
    record = json.loads((out / "lora_tool.json").read_text())
    assert {name: entry.get("weight") for name, entry in record["inputs"].items() if name != "base"} == {
        "adapter": 0.7,
        "adapter 2": 0.3,
    }
    scalings = {term["scaling"] for entry in record["ledger"] for term in entry.get("terms", ())}
    assert scalings == {0.7 * 2.0, 0.3 * 0.5}
    assert verify(out).report.findings == ()
    assert verify(out, adapters=[f"{one}=0.7", f"{other}=0.3"]).report.findings == ()
    wrong = verify(out, adapters=[f"{one}=0.6", f"{other}=0.3"]).report
    assert {finding.code for finding in wrong.findings} <= {"LT608", "LT610"} != set()
    with pytest.raises(FindingsFound, match="LT511"):
        plan_merge(out, f"{one}=0.3")


def test_one_rounding_of_the_sum_whichever_way_it_is_made(pair: tuple[Path, Path, Path], tmp_path: Path) -> None:
    base, one, other = pair
    at_once = saved_tensors(merge([one, other], base=base, out=tmp_path / "plain", dtype="float32").path)
    weighted = saved_tensors(merge([f"{one}=1", other], base=base, out=tmp_path / "same", dtype="float32").path)
    assert different(weighted, at_once) == []
    summed = combine([one, other], weights=[0.25, 0.5], out=tmp_path / "sum").path
    through = saved_tensors(merge(summed, base=base, out=tmp_path / "through", dtype="float32").path)
    direct = saved_tensors(
        merge([f"{one}=0.25", f"{other}=0.5"], base=base, out=tmp_path / "direct", dtype="float32").path
    )
    assert max(float((through[name] - direct[name]).abs().max()) for name in direct) <= 1e-6


def test_what_a_weight_does_not_scale_is_refused_or_told(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", "causal-lm", torch.float32)
    dora = save_adapter(tmp_path / "dora", base, "causal-lm", QV | {"use_dora": True})
    with pytest.raises(UnsupportedAdapter, match=r"with weight 0\.5: DoRA"):
        plan_merge(base, f"{dora}=0.5")
    saved = save_adapter(tmp_path / "saved", base, "causal-lm", QV | {"modules_to_save": ["lm_head"]})
    assert any("scales only ΔW: lm_head" in note for note in plan_merge(base, f"{saved}=0.5").notes)
    shutil.copytree(saved, tmp_path / "saved=0.5")
    with pytest.raises(WrongValue, match="is ambiguous: it is a folder, and also the folder"):
        plan_merge(base, str(tmp_path / "saved=0.5"))
