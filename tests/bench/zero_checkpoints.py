"""ZeRO-3 checkpoints of real size, made on the spot in DeepSpeed's own layout by torch.save, rank by rank.

Run as a program (`python -m tests.bench.zero_checkpoints FOLDER full|lora`), so that torch's memory is not the test's.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

HIDDEN, INTERMEDIATE, VOCAB = 1280, 3456, 32000
LINEAR = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, HIDDEN),
    "self_attn.v_proj": (HIDDEN, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}
Shapes = dict[str, tuple[int, ...]]


def full_shapes(layers: int) -> Shapes:
    """Return a Llama's parameters: 18 layers are 425 million, 1.70 GB of float32."""
    shapes: Shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(layers):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in LINEAR.items()}
        shapes[f"model.layers.{layer}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"model.layers.{layer}.post_attention_layernorm.weight"] = (HIDDEN,)
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def lora_shapes(layers: int, rank: int) -> tuple[Shapes, Shapes]:
    """Return what is trained and what is frozen under LoRA on every linear layer."""
    trained: Shapes = {}
    frozen: Shapes = {}
    for name, shape in full_shapes(layers).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2].endswith("_proj"):
            stem = f"base_model.model.{module}"
            trained[f"{stem}.lora_A.default.weight"] = (rank, shape[1])
            trained[f"{stem}.lora_B.default.weight"] = (shape[0], rank)
            frozen[f"{stem}.base_layer.weight"] = shape
        else:
            frozen[f"base_model.model.{name}"] = shape
    return trained, frozen


def write(folder: Path, trained: Shapes, frozen: Shapes, ranks: int) -> None:
    """Write `folder` with the tag global_step10."""
    tag = folder / "global_step10"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step10")
    for rank in range(ranks):
        torch.manual_seed(rank)
        numel = sum(pieces(trained, ranks).values())
        flat = torch.randn(numel) * 0.02
        moments = {"step": torch.tensor(10.0), "exp_avg": flat * 0.1, "exp_avg_sq": flat * flat}
        optim = {
            "zero_stage": 3,
            "partition_count": ranks,
            "optimizer_state_dict": {"state": {0: moments}, "param_groups": [{"params": [0]}]},
            "fp32_flat_groups": [flat],
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save(
            {"optimizer_state_dict": optim, "ds_config": {}, "ds_version": "0.19.8"},
            tag / f"bf16_{name}_optim_states.pt",
        )
        torch.save(model_states(trained, frozen, ranks), tag / f"{name}_model_states.pt")


def pieces(shapes: Shapes, ranks: int) -> dict[str, int]:
    """Return how many elements of each parameter a rank holds."""
    return {name: -(-torch.Size(shape).numel() // ranks) for name, shape in shapes.items()}


def model_states(trained: Shapes, frozen: Shapes, ranks: int) -> dict[str, Any]:
    """Return the dictionary of a model file: placeholders, shapes and this rank's frozen pieces."""
    fragments = {name: (torch.randn(n) * 0.02).bfloat16() for name, n in pieces(frozen, ranks).items()}
    return {
        "module": OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in (*trained, *frozen)),
        "buffer_names": [],
        "param_shapes": [OrderedDict((name, torch.Size(shape)) for name, shape in trained.items())],
        "frozen_param_shapes": OrderedDict((name, torch.Size(shape)) for name, shape in frozen.items()),
        "frozen_param_fragments": OrderedDict(fragments),
        "shared_params": {},
        "global_steps": 10,
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "ds_config": {},
        "ds_version": "0.19.8",
    }


def main() -> None:
    """Write the checkpoint that the arguments name."""
    torch.set_num_threads(1)
    folder, sort = Path(sys.argv[1]), sys.argv[2]
    if sort == "full":
        write(folder, full_shapes(18), {}, ranks=4)
    else:
        trained, frozen = lora_shapes(18, rank=64)
        write(folder, trained, frozen, ranks=8)
        names = sorted({name.rpartition(".")[2] for name in LINEAR})
        listed = ", ".join(f'"{name}"' for name in names)
        config = f'{{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 64, "lora_alpha": 128, "target_modules": [{listed}]}}'
        (folder / "adapter_config.json").write_text(config)


if __name__ == "__main__":
    main()
