"""A training that runs here and now in the installed DeepSpeed, and its own zero_to_fp32 as a second opinion.

The committed fixtures are of one version; this is of the one that is installed. LORA_TOOL_DEEPSPEED_PYTHON may name an
interpreter of another environment that has it.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lora_tool.checkpoint import open_sharded
from lora_tool.execution.engine import execute
from lora_tool.plan.consolidate.plan_consolidate import plan_consolidate

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("LORA_TOOL_DEEPSPEED_PYTHON") or sys.executable
ZERO_TO_FP32 = """
import sys, torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
torch.save({n: t.contiguous() for n, t in get_fp32_state_dict_from_zero_checkpoint(sys.argv[1]).items()}, sys.argv[2])
"""

pytestmark = pytest.mark.skipif(
    sys.executable == PYTHON and importlib.util.find_spec("deepspeed") is None,
    reason="deepspeed is not installed: pip install -e '.[dev]'",
)


@pytest.mark.parametrize("name", ["stage3-reward", "stage2-full-3"])
def test_a_checkpoint_trained_now(tmp_path: Path, name: str) -> None:
    command = [PYTHON, str(ROOT / "fixtures" / "make_zero.py"), "--out", str(tmp_path), name]
    made = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert made.returncode == 0, made.stderr[-2000:]
    execute(plan_consolidate(open_sharded(tmp_path / name), what="state"), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    truth = load_file(tmp_path / name / "truth.safetensors")
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[key], truth[key]) and found[key].dtype == truth[key].dtype for key in truth)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    theirs = tmp_path / "theirs.pt"
    subprocess.run([PYTHON, "-c", ZERO_TO_FP32, str(tmp_path / name), str(theirs)], env=environment, check=True)
    state = torch.load(theirs)
    assert state.keys() >= {key for key in truth if ".base_layer." not in key and "lora" in key}
    for key, tensor in state.items():
        assert torch.equal(found[key].float(), tensor.float()), key
