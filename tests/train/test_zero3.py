"""Trap 4: a reward model with LoRA under DeepSpeed ZeRO-3, two processes. It ends with a whole adapter and its head."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from lora_tool.checkpoints import AdapterDir, open_checkpoint
from lora_tool.core.report import Severity
from lora_tool.verification.validating import validate
from tests.cli.calling import Caller
from tests.train.running import COMMON, QWEN2, pairs, write_rows

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install -e '.[dev]'"
)

DEEPSPEED = {
    # 0: tiny tensors would otherwise be kept whole on every rank, and nothing would be tested
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": False,
    },
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
}
WITHOUT_COMPILER = """
import os
if "RANK" in os.environ:  # in a worker: gloo does alone what DeepSpeed would compile an operator for
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
"""


def environment(tmp_path: Path) -> dict[str, str]:
    """Write DeepSpeed's config and return the environment in which it trains on a CPU."""
    (tmp_path / "ds.json").write_text(json.dumps(DEEPSPEED))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WITHOUT_COMPILER)
    return {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }


def test_reward_under_zero3_with_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Caller) -> None:
    run = {
        **COMMON,
        "model_name_or_path": str(QWEN2),
        "dataset_name": str(write_rows(tmp_path / "data", pairs(32))),
        "output_dir": str(tmp_path / "out"),
        "bf16": True,
        "save_strategy": "steps",
        "save_steps": 2,
        "accelerate_config": str(tmp_path / "accelerate.yaml"),
    }
    (tmp_path / "accelerate.yaml").write_text(
        yaml.safe_dump(
            {
                "compute_environment": "LOCAL_MACHINE",
                "distributed_type": "DEEPSPEED",
                "deepspeed_config": {"deepspeed_config_file": str(tmp_path / "ds.json"), "zero3_init_flag": True},
                "machine_rank": 0,
                "num_machines": 1,
                "num_processes": 2,
                "use_cpu": True,
            }
        )
    )
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    done = call("train", "reward", "--config", tmp_path / "run.yaml", "--json")
    assert done.code == 0, done.err[-4000:]
    assert (done.json["status"], done.json["findings"]) == ("done", [])

    out = tmp_path / "out"
    whole = load_file(out / "adapter_model.safetensors")
    assert whole["base_model.model.score.weight"].shape == (1, 16)
    assert all(tensor.numel() and tensor.isfinite().all() for tensor in whole.values())
    for name in (".", "checkpoint-2", "checkpoint-4"):
        opened = open_checkpoint(out / name)
        assert isinstance(opened, AdapterDir)
        assert not validate(opened, task="reward", deep=True).at_least(Severity.ERROR), name
        assert opened.tensors.keys() == whole.keys()

    # the rank files hold the same adapter: what consolidate makes of them is what was gathered
    assert call("consolidate", out / "checkpoint-4", "-o", tmp_path / "consolidated", "--what", "adapter").code == 0
    put_together = load_file(tmp_path / "consolidated" / "adapter_model.safetensors")
    assert put_together.keys() == whole.keys()
    for name, tensor in put_together.items():
        assert torch.equal(tensor.to(whole[name].dtype), whole[name]), name
