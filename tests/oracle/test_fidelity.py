"""What rounding leaves of a change, against the whole tensors: in the manifest, in the summary, and as advice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.calling import Caller
from tests.oracle.peft_merge import Table, save_adapter, save_base, saved_tensors
from tests.oracle.test_merge_against_peft import exact_inputs

LORA = {"r": 8, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


def pair(folder: Path, size: float, dtype: torch.dtype = torch.bfloat16) -> tuple[Path, Path]:
    """Return a base and an adapter whose change is about `size` times as large as the weights."""
    base = save_base(folder / "base", "llama", "causal-lm", dtype, hidden_size=256, intermediate_size=512)
    adapter = save_adapter(folder / "adapter", base, "causal-lm", LORA)
    weight, a, b, scaling = next(iter(exact_inputs(base, adapter).values()))
    ratio = float((b @ a * scaling).norm() / weight.norm())
    tensors = saved_tensors(adapter)
    scaled = {n: t * (size / ratio) if "lora_B" in n else t for n, t in tensors.items()}
    save_file(scaled, adapter / "adapter_model.safetensors")
    return base, adapter


def truth(base: Path, adapter: Path, merged: Path) -> dict[str, tuple[float, float]]:
    """Return kept and cosine of every changed tensor, over all of its values."""
    written: Table = saved_tensors(merged)
    found = {}
    for name, (weight, a, b, scaling) in exact_inputs(base, adapter).items():
        meant = b @ a * scaling
        effect = written[name].double() - weight
        shared = float((meant * effect).sum())
        found[name] = (
            shared / float((meant * meant).sum()),
            shared / float(meant.norm() * effect.norm()) if effect.norm() else 0.0,
        )
    return found


def recorded(merged: Path) -> dict[str, Any]:
    table: dict[str, Any] = json.loads((merged / "lora_tool.json").read_text())
    return table


@pytest.mark.parametrize(
    ("size", "precision"), [(1e-3, "float32"), (1e-3, "peft"), (1e-2, "peft"), (1e-1, "float32"), (1e-2, "float64")]
)
def test_the_samples_tell_what_happened_to_all(size: float, precision: str, tmp_path: Path, call: Caller) -> None:
    base, adapter = pair(tmp_path, size)
    done = call("merge", adapter, "--base", base, "-o", tmp_path / "out", "--precision", precision)
    assert done.code == 0, done.err
    manifest = recorded(tmp_path / "out")
    measured = {entry["name"]: entry["fidelity"] for entry in manifest["ledger"] if "fidelity" in entry}
    expected = truth(base, adapter, tmp_path / "out")
    assert measured.keys() == expected.keys()
    for name, (kept, cosine) in expected.items():
        assert measured[name]["kept"] == pytest.approx(kept, abs=0.08), name
        assert measured[name]["cosine"] == pytest.approx(cosine, abs=0.05), name
    assert "ΔW after rounding: " in done.out
    bad = [warning for warning in manifest["warnings"] if "distorts ΔW" in warning]
    assert bool(bad) == (size == 1e-3)
    assert ("--dtype float32" in done.err) == (size == 1e-3)
    if size == 1e-3:
        assert 0.5 < manifest["fidelity"]["cosine"] < 0.75


def test_a_wide_type_keeps_all_of_it(tmp_path: Path, call: Caller) -> None:
    base, adapter = pair(tmp_path, 1e-3)
    done = call("merge", adapter, "--base", base, "-o", tmp_path / "out", "--dtype", "float32", "--json")
    assert done.code == 0, done.err
    assert done.json["fidelity"]["cosine"] > 0.9999
    assert done.json["warnings"] == []


def test_the_same_whatever_the_number_of_workers(tmp_path: Path, call: Caller) -> None:
    base, adapter = pair(tmp_path, 1e-2)
    for jobs in ("1", "3"):
        assert call("merge", adapter, "--base", base, "-o", tmp_path / jobs, "--jobs", jobs).code == 0
    assert recorded(tmp_path / "1") == recorded(tmp_path / "3")
