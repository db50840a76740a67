"""Checkpoints of 1.7 GB as other trainers save them, by torch's own functions: 4 processes on CPU.

python -m tests.bench.trainer_checkpoints FOLDER verl|ranks|dcp-tp|universal
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import torch

from tests.bench.zero_checkpoints import full_shapes

RANKS = 4
LAYERS = 18
BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
KINDS = ("verl", "ranks", "dcp-tp", "universal")


def write(folder: Path, kind: str) -> None:
    """Write what this process, one of `RANKS`, has of a Llama: rows, or under tensor parallelism columns of some."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict_saver import save
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (RANKS,))
    state: OrderedDict[str, torch.Tensor] = OrderedDict()
    torch.manual_seed(rank)
    for name, shape in full_shapes(LAYERS).items():
        dim = 1 if kind == "dcp-tp" and name.endswith(BY_COLUMNS) else 0
        local = list(shape)
        local[dim] //= RANKS
        state[name] = DTensor.from_local(torch.randn(local) * 0.02, mesh, [Shard(dim)], run_check=False)
    match kind:
        case "dcp-tp":
            save({**state}, checkpoint_id=str(folder))
        case "verl":
            torch.save(state, folder / f"model_world_size_{RANKS}_rank_{rank}.pt")
        case _:
            torch.save(state, folder / f"pytorch_model_fsdp_0_rank{rank}.bin")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort a normal end


def write_universal(folder: Path) -> None:
    """Write what `ds_to_universal.py` makes of a checkpoint of stage 2: a folder for each parameter."""
    tag = folder / "global_step10_universal"
    shapes = full_shapes(LAYERS)
    for name, shape in shapes.items():
        (tag / "zero" / name).mkdir(parents=True)
        torch.save({"param": torch.randn(shape) * 0.02}, tag / "zero" / name / "fp32.pt")
    model = {
        "module": OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in shapes),
        "buffer_names": [],
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in shapes.items())],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "global_steps": 10,
        "dp_world_size": RANKS,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 2}},
        "ds_version": "0.19.8",
    }
    torch.save(model, tag / "mp_rank_00_model_states.pt")
    (folder / "latest_universal").write_text(tag.name)


def main() -> None:
    """Write the checkpoint that the arguments name."""
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "universal":
        write_universal(folder)
    elif "RANK" in os.environ:
        write(folder, kind)
    else:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
        subprocess.run([*launcher, "-m", __spec__.name, str(folder), kind], check=True)


if __name__ == "__main__":
    main()
