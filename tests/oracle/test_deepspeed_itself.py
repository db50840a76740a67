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

from lora_tool.checkpoints import open_sharded
from lora_tool.execution.engine import execute
from lora_tool.plans.consolidate.library import plan_consolidate

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


# the tutorial trains stage3-reward in this environment, and is held against the same truth
NAMES = ["stage2-full-3"] if sys.executable == PYTHON else ["stage2-full-3", "stage3-reward"]


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_trained_now(tmp_path: Path, name: str) -> None:
    command = [PYTHON, str(ROOT / "fixtures" / "make_zero.py"), "--out", str(tmp_path), name]
    made = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert made.returncode == 0, made.stderr[-2000:]
    require_truth(tmp_path / name, tmp_path)


def require_truth(trained: Path, work: Path) -> None:
    """Assert that we put a checkpoint together as it was gathered in the run, and as DeepSpeed's own program does."""
    execute(plan_consolidate(open_sharded(trained), what="state"), work / "state")
    found = load_file(work / "state" / "model.safetensors")
    truth = load_file(trained / "truth.safetensors")
    assert found.keys() == truth.keys()
    assert all(torch.equal(found[key], truth[key]) and found[key].dtype == truth[key].dtype for key in truth)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu"}
    theirs = work / "theirs.pt"
    subprocess.run([PYTHON, "-c", ZERO_TO_FP32, str(trained), str(theirs)], env=environment, check=True)
    state = torch.load(theirs)
    assert state.keys() >= {key for key in truth if ".base_layer." not in key and "lora" in key}
    for key, tensor in state.items():
        assert torch.equal(found[key].float(), tensor.float()), key
