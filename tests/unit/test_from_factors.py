"""Adapters computed from adapters and models, on the fixtures: what goes round comes back."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lora_tool import (
    Server,
    combine,
    diff,
    extract,
    merge,
    plan_combine,
    plan_merge,
    prepare,
    resize,
    verify,
)
from lora_tool.checkpoints import open_model
from lora_tool.core.errors import FindingsFound, UnsupportedAdapter, WrongValue
from lora_tool.formats.files import read_json
from lora_tool.workflows.inspection.comparison import Difference, ModuleChange
from tests.cli.calling import FIXTURES

BASE, ADAPTER = FIXTURES / "causal-llama" / "base", FIXTURES / "causal-llama" / "adapter"
RUN = FIXTURES / "reward-run"
REWARD, REWARD_BASE = FIXTURES / "reward-qwen2" / "adapter", FIXTURES / "reward-qwen2" / "base"


def farthest(first: Path, second: Path) -> float:
    """Return the largest relative distance of the ΔW of two adapters, whose modules are the same."""
    found: tuple[Difference, ...] = diff(first, second).differences
    assert {item.change for item in found} <= {ModuleChange.SAME, ModuleChange.ALIKE, ModuleChange.CHANGED}
    return max((item.relative or 0.0 for item in found), default=0.0)


def other_adapter(folder: Path) -> Path:
    """Return another adapter of the same base, with the same names."""
    shutil.copytree(ADAPTER, folder)
    weights = folder / "adapter_model.safetensors"
    save_file({name: values[::-1].copy() for name, values in load_file(weights).items()}, weights)
    return folder


@pytest.mark.parametrize(("noise", "figure"), [(0.0, "0%"), (1e-2, r"0\.\d+%"), (0.2, None)])
@pytest.mark.parametrize("rank", [None, 2])
def test_a_sum_that_cancels_is_warned_of(noise: float, figure: str | None, rank: int | None, tmp_path: Path) -> None:
    other = shutil.copytree(ADAPTER, tmp_path / "other")
    weights, chance = other / "adapter_model.safetensors", np.random.default_rng(0)
    held = {
        name: values * (1 + noise * chance.standard_normal(values.shape)) for name, values in load_file(weights).items()
    }
    save_file(held, weights)  # in float64: other weights, though of the same values
    plan = plan_combine([ADAPTER, other], weights=[1, -1], base=BASE, rank=rank)
    said = [text for text in plan.warnings if "nearly cancel: in 6 of 6 modules" in text]
    assert bool(said) == (figure is not None)
    assert not said or re.search(f"proj {figure}", said[0])


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return an adapter whose factors are a hundred times smaller than trained ones."""
    folder = shutil.copytree(ADAPTER, tmp_path / "small")
    weights = folder / "adapter_model.safetensors"
    save_file({name: values * np.float32(0.01) for name, values in load_file(weights).items()}, weights)
    return folder


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize(
    ("weight", "dtype", "warned"),
    [(1, "float16", False), (1e-4, "float16", True), (1e-4, "bfloat16", False), (1e-30, "float32", False)],
)
def test_a_type_without_such_small_numbers_is_warned_of(
    weight: float, dtype: str, warned: bool, rank: int | None, small: Path, tmp_path: Path
) -> None:
    """The figure is what rounding takes of the factors, compared with those in float64; of lower ranks no less."""
    made = {
        kind: combine(small, weights=[weight], base=BASE, rank=rank, dtype=kind, out=tmp_path / kind)
        for kind in (dtype, "float64")
    }
    said = [text for text in made[dtype].plan.warnings if "has no numbers between 0 and 6e-08" in text]
    assert bool(said) == warned
    if warned:
        held, exact = (load_file(each.path / "adapter_model.safetensors") for each in made.values())
        taken = max(np.linalg.norm(held[name] - exact[name]) / np.linalg.norm(exact[name]) for name in exact)
        figure = int(re.findall(r"by (\d+)% in", said[0])[0]) / 100
        assert 0.9 * taken < figure < (1.1 if rank is None else 3) * taken


def test_the_type_that_has_them_is_named(small: Path) -> None:
    for dtype, wider, weight in (("float16", "float32", 1e-4), ("float32", "float64", 3e-41)):
        (said,) = plan_combine(small, weights=[weight], base=BASE, dtype=dtype).warnings
        assert said.endswith(f"; {wider} does not")


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize(("weight", "dtype"), [(1e-9, "float16"), (1e-44, "float32")])
def test_a_sum_that_would_be_rounded_away_is_refused(weight: float, dtype: str, rank: int | None, small: Path) -> None:
    with pytest.raises(WrongValue, match=rf"{dtype} has no numbers between 0 and .*: in \d of 6 modules"):
        plan_combine(small, weights=[weight], base=BASE, rank=rank, dtype=dtype)


def test_no_computed_adapter_is_merged_into_a_model_that_has_its_parts(tmp_path: Path) -> None:
    other = other_adapter(tmp_path / "other")
    merged = merge(ADAPTER, out=tmp_path / "merged").path
    both = combine([ADAPTER, other], base=BASE, out=tmp_path / "both").path
    smaller = resize(both, rank=2, out=tmp_path / "smaller").path
    extracted = extract(merged, BASE, rank=4, out=tmp_path / "extracted").path
    for computed in (both, smaller, extracted):
        with pytest.raises(FindingsFound, match=f"LT511 .*already contains {ADAPTER}, which this .* computed from"):
            plan_merge(merged, computed, ignore=["LT520"])
    with pytest.raises(FindingsFound, match="LT511 .*already contains this adapter"):
        plan_merge(merge(smaller, base=BASE, out=tmp_path / "of smaller").path, ADAPTER, ignore=["LT520"])
    assert plan_merge(merged, other, ignore=["LT520"])
    assert [found.code for found in plan_merge(BASE, [both, other]).findings] == ["LT512"]


def test_a_lower_rank_is_given_up_only_where_that_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedAdapter, match=r"would keep 44\.24% of .* at rank 1"):
        prepare(ADAPTER, Server.VLLM, out=tmp_path / "out", max_rank=1)
    out = prepare(ADAPTER, Server.VLLM, out=tmp_path / "out", max_rank=1, approximate=True).path
    assert 1e-3 < farthest(ADAPTER, out) < 1


def test_what_was_added_is_taken_away_again(tmp_path: Path) -> None:
    first, second = RUN / "checkpoint-2", RUN / "checkpoint-4"
    both = combine([first, second], weights=[1, 0.5], head_of=first, out=tmp_path / "both").path
    back = combine([both, second], weights=[1, -0.5], head_of=both, out=tmp_path / "back").path
    assert farthest(first, back) < 1e-5
    rank = read_json(first / "adapter_config.json")["r"]  # the other's terms cancel, and leave no rank behind
    assert farthest(back, resize(back, rank=rank, out=tmp_path / "small").path) < 1e-5
    assert not verify(tmp_path / "small").report.findings


def test_what_a_merge_changed_is_extracted_and_merged_again(tmp_path: Path) -> None:
    model = merge(ADAPTER, out=tmp_path / "model", dtype="float32").path
    base = merge(resize(ADAPTER, rank=1, out=tmp_path / "one").path, out=tmp_path / "base", dtype="float32").path
    out = extract(model, base, rank=8, out=tmp_path / "out").path
    assert not verify(out).report.findings
    again = merge(out, base=base, out=tmp_path / "again", ignore=["LT511"]).path
    assert farthest_tensor(model, again) < 1e-6


def farthest_tensor(first: Path, second: Path) -> float:
    """Return the largest relative distance of the tensors of two models."""
    one, other = open_model(first), open_model(second)
    assert one.tensors.keys() == other.tensors.keys()
    return max((item.relative or 0.0 for item in diff(one, other).differences), default=0.0)
