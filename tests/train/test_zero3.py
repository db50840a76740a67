"""Trap 4: a reward model with LoRA under DeepSpeed ZeRO-3, two processes. It ends with a whole adapter and its head."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
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


BARE_SAVE = """
import sys
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import RewardConfig, RewardTrainer

base, data, out, deepspeed = sys.argv[1:]
options = {"max_steps": 2, "save_steps": 2, "use_cpu": True, "bf16": True, "report_to": "none", "deepspeed": deepspeed}
lora = LoraConfig(task_type="SEQ_CLS", target_modules="all-linear")
rows = load_dataset(data, split="train")
trainer = RewardTrainer(base, args=RewardConfig(out, learning_rate=1e-3, **options), train_dataset=rows, peft_config=lora)
trainer.train()
if trainer.is_world_process_zero():
    trainer.model.save_pretrained(out)
torch.distributed.destroy_process_group()  # its threads can abort a process that ends without
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


def test_a_bare_save_is_found_and_can_be_consolidated(tmp_path: Path, call: Caller) -> None:
    script, data, out = tmp_path / "script.py", write_rows(tmp_path / "data", pairs(32)), tmp_path / "out"
    script.write_text(BARE_SAVE)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = [*launch, str(script), str(QWEN2), str(data), str(out), str(tmp_path / "ds.json")]
    done = subprocess.run(
        [sys.executable, "-m", "lora_tool", "guard", "--", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
        env=environment(tmp_path),
    )
    assert done.returncode == 1, done.stderr[-4000:]
    assert "LT206" in done.stderr
    assert "lora-tool consolidate" in done.stderr  # the hint names it
    assert call("consolidate", out / "checkpoint-2", "-o", tmp_path / "whole", "--what", "adapter").code == 0
    whole = open_checkpoint(tmp_path / "whole")
    assert isinstance(whole, AdapterDir)
    assert not validate(whole, task="reward", deep=True).findings
    # the Trainer's own checkpoint was gathered well: the truth
    truth = load_file(out / "checkpoint-2" / "adapter_model.safetensors")
    found = load_file(tmp_path / "whole" / "adapter_model.safetensors")
    assert found.keys() == truth.keys()
    assert all(torch.equal(tensor.to(truth[name].dtype), truth[name]) for name, tensor in found.items())


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
