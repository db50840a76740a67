"""The second formula of PiSSA and OLoRA: PEFT's and our merges are inside its bound, what is wrong is not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lora_tool import verify
from lora_tool.rules.merged.evidence import Verdict
from lora_tool.verification.initial import taken
from lora_tool.verification.pieces import CannotTellError
from tests.oracle.peft_merge import merge_with_ours, merge_with_peft, save_adapter, save_base, saved_tensors

pytestmark = pytest.mark.filterwarnings("ignore")


def inputs(folder: Path, model_type: str, init: str, dtype: torch.dtype) -> tuple[Path, Path]:
    base = save_base(folder / "base", model_type, "causal-lm", dtype)
    targets = ["c_attn"] if model_type == "gpt2" else ["q_proj", "k_proj", "down_proj", "up_proj"]
    lora = {"r": 4, "lora_alpha": 12, "target_modules": targets, "init_lora_weights": init}
    return base, save_adapter(folder / "adapter", base, "causal-lm", lora)


@pytest.mark.parametrize(
    ("model_type", "init", "dtype"),
    [
        ("llama", "pissa", torch.float32),
        ("llama", "pissa", torch.bfloat16),
        ("llama", "olora", torch.float16),
        ("llama", "olora", torch.float32),
        ("gpt2", "pissa", torch.bfloat16),
    ],
)
def test_good_merges_are_right_and_bad_ones_are_not(
    model_type: str, init: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    base, adapter = inputs(tmp_path, model_type, init, dtype)
    theirs = merge_with_peft(base, adapter, tmp_path / "theirs", "causal-lm")
    ours = merge_with_ours(base, adapter, tmp_path / "ours", "float32")
    for merged in (theirs, ours):
        found = verify(merged, base=base, adapters=[adapter])
        assert {each.verdict for each in found.evidence.values()} == {Verdict.RIGHT}
        assert not found.report.findings
        assert {each.code for each in found.report.skipped} <= {"LT320"}  # which needs a tokenizer

    config = adapter / "adapter_config.json"
    said = config.read_text()
    config.write_text(json.dumps({**json.loads(said), "init_lora_weights": True}))
    plain = merge_with_ours(base, adapter, tmp_path / "plain", "float32")
    config.write_text(said)
    found = verify(plain, base=base, adapters=[adapter])
    changed = [each for each in found.evidence.values() if each.rank]
    assert changed
    assert {each.verdict for each in changed} <= {Verdict.DIFFERENT, Verdict.UNRELATED, Verdict.SCALED}

    tensors = saved_tensors(ours)
    name = changed[0].name
    tensors[name][3, 5] += 0.25
    save_file(tensors, tmp_path / "one.safetensors", metadata={"format": "pt"})
    for path in ours.glob("*.safetensors*"):
        path.unlink()
    (tmp_path / "one.safetensors").rename(ours / "model.safetensors")
    wrong = verify(ours, base=base, adapters=[adapter]).evidence[name]
    assert wrong.verdict is Verdict.DIFFERENT
    assert wrong.wrong == 1
    assert wrong.first == 3 * tensors[name].shape[1] + 5


@pytest.mark.parametrize("shape", [(48, 64), (64, 48), (40, 40)])
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_what_is_taken_out_is_what_peft_takes(init: str, shape: tuple[int, int]) -> None:
    weight = np.random.default_rng(5).normal(size=shape)
    weight[:, 0] *= 30
    found = taken(init, weight, 5, 1.5)
    left, values, right = np.linalg.svd(weight, full_matrices=False)
    q, r = np.linalg.qr(weight)
    expected = (left[:, :5] * values[:5]) @ right[:5] if init == "pissa" else 1.5 * q[:, :5] @ r[:5]
    np.testing.assert_allclose(found.left @ found.right, expected, atol=1e-11)
    rows, columns = np.indices(shape).reshape(2, -1)
    assert 0 < found.room(rows, columns).max() < 0.01 * np.abs(expected).max()


@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.parametrize("weight", [np.zeros((8, 8)), np.ones((8, 8)), np.full((8, 8), np.nan)], ids=["0", "1", "nan"])
def test_where_no_bound_is_honest_there_is_none(init: str, weight: np.ndarray) -> None:
    with pytest.raises(CannotTellError):
        taken(init, weight, 4, 1.0)


def with_equal_singular_values(base: Path, ending: str) -> str:
    """Make one weight of the base the identity, of which pissa may take out anything, and return its name."""
    tensors = saved_tensors(base)
    name = next(name for name in tensors if name.endswith(ending))
    tensors[name] = torch.eye(*tensors[name].shape)
    for path in base.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    return name


def test_a_tensor_without_a_bound_is_said_by_name(tmp_path: Path) -> None:
    base, adapter = inputs(tmp_path, "llama", "pissa", torch.float32)
    name = with_equal_singular_values(base, "q_proj.weight")
    merged = merge_with_ours(base, adapter, tmp_path / "merged", "float32")
    found = verify(merged, base=base, adapters=[adapter])
    assert found.evidence[name].verdict is Verdict.UNKNOWN
    (skipped,) = (each for each in found.report.skipped if each.code != "LT320")  # which needs a tokenizer
    assert name in skipped.reason
    assert not found.report.findings
