"""The fuzzer's targets under hypothesis, a little of each: `python -m tests.fuzz` goes on from here."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.choices import Choices
from tests.fuzz.commands import must_hold
from tests.fuzz.injuries import VALUES, changed, edited, repickled
from tests.fuzz.targets import FIXTURES, TARGETS, folders, seeds

DECISIONS = st.binary(min_size=48, max_size=64)
FEW = settings(max_examples=40, suppress_health_check=list(HealthCheck))


@given(DECISIONS)
@FEW
def test_an_injured_folder_gives_documented_exits(decisions: bytes) -> None:
    folders(decisions)


@pytest.mark.parametrize("target", ["safetensors", "torch-file", "torch-pickle", "rank-pickle", "dcp", "configs"])
@given(DECISIONS, st.integers(0, 9))
@FEW
def test_a_changed_file_gives_documented_errors(target: str, decisions: bytes, which: int) -> None:
    known = [seed for seed in seeds(target) if len(seed) < 100_000]
    seed, choices = known[which % len(known)], Choices(decisions)
    structured = {"configs": edited, "torch-pickle": repickled, "rank-pickle": repickled, "dcp": repickled}.get(
        target, changed
    )
    try:
        data = (structured if choices.below(3) else changed)(seed, choices)
    except ValueError:
        data = changed(seed, choices)
    TARGETS[target](data)


FIELDS = [
    (file, field)
    for file in ("adapter/adapter_config.json", "base/config.json", "base/model.safetensors.index.json")
    for field in json.loads((FIXTURES / "reward-qwen2" / file).read_text())
] + [("base/config.json", field) for field in ("id2label", "text_config", "quantization_config", "num_labels")]


@given(st.sampled_from(FIELDS), st.sampled_from(VALUES), st.sampled_from(["validate", "merge", "inspect"]))
@FEW
def test_any_value_in_any_field_gives_documented_exits(place: tuple[str, str], value: object, command: str) -> None:
    file, field = place
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        shutil.copytree(FIXTURES / "reward-qwen2", root, dirs_exist_ok=True)
        table = json.loads((root / file).read_text())
        (root / file).write_text(json.dumps({**table, field: value}))
        base: tuple[str | Path, ...] = () if command == "inspect" else ("--base", root / "base")
        options = ("-o", root / "out", "--dry-run") if command == "merge" else ()
        must_hold((command, root / "adapter", *base, *options))
