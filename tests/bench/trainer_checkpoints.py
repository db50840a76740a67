"""Checkpoints of about 1.7 GB as other trainers save them, by torch's own functions: 4 processes on CPU.

python -m tests.bench.trainer_checkpoints FOLDER KIND
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.bench.zero_checkpoints import LINEAR, Shapes, full_shapes

RANKS = 4
LAYERS = 18
BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
State = OrderedDict[str, Any]


def mesh_of(*sizes: int) -> Any:
    """Return a mesh of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes)


def cut(shapes: Shapes, *, columns: bool = False, fsdp: bool = False) -> State:
    """Return what this rank has of every tensor: rows, under tensor parallelism `columns` of some, of these rows (`fsdp`)."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = mesh_of(2, 2) if fsdp else mesh_of(RANKS)
    state: State = OrderedDict()
    for name, shape in shapes.items():
        dim = 1 if columns and name.endswith(BY_COLUMNS) else 0
        local = list(shape)
        for at, size in ((0, 2), (dim, 2)) if fsdp else ((dim, RANKS),):
            local[at] //= size
        placements = [Shard(0), Shard(dim)] if fsdp else [Shard(dim)]
        state[name] = DTensor.from_local(torch.randn(local) * 0.02, mesh, placements, run_check=False)
    return state


def dcp(folder: Path, state: State) -> None:
    """Save as torch's distributed checkpoints do."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save({**state}, checkpoint_id=str(folder))


def verl(folder: Path, rank: int) -> None:
    torch.save(cut(full_shapes(LAYERS)), folder / f"model_world_size_{RANKS}_rank_{rank}.pt")


def ranks(folder: Path, rank: int) -> None:
    torch.save(cut(full_shapes(LAYERS)), folder / f"pytorch_model_fsdp_0_rank{rank}.bin")


def local(folder: Path, rank: int) -> None:
    """FSDP1's local state: of each layer's parameters, one after the other, each rank has a quarter."""
    state: State = OrderedDict(_flat_param=torch.zeros(1))
    for layer in range(LAYERS + 4):
        shapes: dict[str, int] = {}
        for name, (out, inner) in LINEAR.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            shapes |= {f"{module}.base_layer.weight": out * inner, f"{module}.lora_A.default.weight": 8 * inner}
            shapes[f"{module}.lora_B.default.weight"] = out * 8
        part, at = sum(shapes.values()) // RANKS, 0
        for name, numel in shapes.items():
            held = min(at + numel, (rank + 1) * part) - max(at, rank * part)
            state[name] = torch.randn(max(0, held)) * 0.02
            at += numel
    torch.save(state, folder / f"pytorch_model_fsdp_rank{rank}.bin")


def full(folder: Path, rank: int) -> None:
    if rank == 0:
        tensors = OrderedDict((name, torch.randn(shape) * 0.02) for name, shape in full_shapes(LAYERS).items())
        torch.save(tensors, folder / "pytorch_model_fsdp.bin")


def safetensors(folder: Path, _: int) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    save({**cut(full_shapes(LAYERS))}, storage_writer=writer)


HEADS, GROUPS, HEAD_DIM, FFN, RANK = 32, 8, 128, 14336, 256
HIDDEN = HEADS * HEAD_DIM
DEPTH = 24


def megatron(folder: Path, rank: int) -> None:
    """LoRA of rank 256 on a Llama of 8 billion, a stack of layers in each tensor; tensor parallelism cuts every layer."""
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard

    modules = {
        "self_attention.linear_qkv": ((HEADS + 2 * GROUPS) * HEAD_DIM, HIDDEN, 0),
        "self_attention.linear_proj": (HIDDEN, HIDDEN, 1),
        "mlp.linear_fc1": (2 * FFN, HIDDEN, 0),
        "mlp.linear_fc2": (HIDDEN, FFN, 1),
    }
    state: State = OrderedDict()
    for name, (out, inner, dim) in modules.items():
        for side, shape, at in (("in", (RANK, inner), dim), ("out", (out, RANK), 0)):
            sizes = [1, *shape]
            sizes[at + 1] //= RANKS
            shards = []
            for layer in range(DEPTH):
                offsets = [layer, 0, 0]
                offsets[at + 1] = rank * sizes[at + 1]
                shards.append(Shard.from_tensor_and_offsets(torch.randn(sizes) * 0.02, offsets, rank))
            whole = init_from_local_shards(shards, DEPTH, *shape)
            state[f"decoder.layers.{name}.adapter.linear_{side}.weight"] = whole
    dcp(folder, state)
    if rank == 0:
        (folder / "run_config.yaml").write_text(
            "model:\n  _target_: megatron.bridge.models.llama.llama_provider.Llama31ModelProvider8B\n"
            f"  num_layers: {DEPTH}\n  hidden_size: {HIDDEN}\n  ffn_hidden_size: {FFN}\n"
            f"  num_attention_heads: {HEADS}\n  num_query_groups: {GROUPS}\n  kv_channels: {HEAD_DIM}\n"
            f"peft:\n  _target_: megatron.bridge.peft.lora.LoRA\n  dim: {RANK}\n  alpha: 32\n"
        )


def universal(folder: Path, rank: int) -> None:
    """Write what `ds_to_universal.py` makes of a checkpoint of stage 2: a folder for each parameter."""
    if rank:
        return
    tag = folder / "global_step10_universal"
    shapes = full_shapes(LAYERS)
    for name, shape in shapes.items():
        (tag / "zero" / name).mkdir(parents=True)
        torch.save({"param": torch.randn(shape) * 0.02}, tag / "zero" / name / "fp32.pt")
    model = {
        "module": OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in shapes),
        "buffer_names": [],
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in shapes.items())],
        "frozen_param_shapes": OrderedDict(),
        "frozen_param_fragments": OrderedDict(),
        "shared_params": {},
        "global_steps": 10,
        "dp_world_size": RANKS,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 2}},
        "ds_version": "0.19.8",
    }
    torch.save(model, tag / "mp_rank_00_model_states.pt")
    (folder / "latest_universal").write_text(tag.name)


KINDS: dict[str, Callable[[Path, int], None]] = {
    "verl": verl,
    "ranks": ranks,
    "local": local,
    "full": full,
    "safetensors": safetensors,
    "fsdp2": lambda folder, _: dcp(folder, cut(full_shapes(LAYERS))),
    "dcp-tp": lambda folder, _: dcp(folder, cut(full_shapes(LAYERS), columns=True)),
    "fsdp-tp": lambda folder, _: dcp(folder, cut(full_shapes(LAYERS), columns=True, fsdp=True)),
    "megatron": megatron,
    "universal": universal,
}
"""The last one, DeepSpeed's, and the one whole file are written by one process alone."""


def main() -> None:
    """Write the checkpoint that the arguments name: what this process, one of `RANKS`, has of it."""
    folder, kind = Path(sys.argv[1]), sys.argv[2]
    folder.mkdir(parents=True, exist_ok=True)
    if "RANK" not in os.environ:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
        subprocess.run([*launcher, "-m", __spec__.name, str(folder), kind], check=True)
        return
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    KINDS[kind](folder, dist.get_rank())
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads sometimes abort a normal end


if __name__ == "__main__":
    main()
