"""What trainers leave behind, made by their own save functions: 4 processes on CPU, and the truth beside it.

One process imports what is slow to import and makes the model; it is forked for the ranks.

    python tests/oracle/trainer_saves.py OUT [NAME…]

Every folder `OUT/NAME` holds what the framework wrote; `OUT/truth-fp32.safetensors` and `-bf16` the module's own state
dict, gathered whole, `OUT/adapter-…` what PEFT saves of the same module, `OUT/base` the base model. Sizes are uneven for
4 ranks; LoRA is on every linear layer, and the head is in `modules_to_save`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import ranks

RANKS = 4
IMPORTED = (
    "accelerate.utils.fsdp_utils",
    "deepspeed",  # by accelerate, where it saves
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
)
Maker = Callable[[Path], None]
Module = Any
"""torch's, transformers' and PEFT's own types, which are imported in the workers alone."""


MODULES: dict[str, Module] = {}
"""The model with a trained adapter, by its dtype: made before the process is forked."""


def adapted(dtype: str = "float32") -> Module:
    """Return a model with a trained adapter: every rank has the same values."""
    return deepcopy(MODULES[dtype])


def new_modules(out: Path) -> None:
    """Make `MODULES`, and write their base, their states and what PEFT saves of them."""
    import peft
    import torch
    import transformers as hf
    from safetensors.torch import save_file

    new_base(out / "base")
    for short, dtype in (("fp32", "float32"), ("bf16", "bfloat16")):
        model = hf.AutoModelForSequenceClassification.from_pretrained(out / "base", dtype=torch.float32)
        config = peft.LoraConfig(
            task_type="SEQ_CLS",
            r=3,
            lora_alpha=5,
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        )
        module = peft.get_peft_model(model, config).to(getattr(torch, dtype))
        torch.manual_seed(7)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.requires_grad:
                    parameter.normal_()
        save_file(module.state_dict(), out / f"truth-{short}.safetensors")
        module.save_pretrained(str(out / f"adapter-{short}"))
        MODULES[dtype] = module


def new_base(folder: Path) -> None:
    """Write a Qwen2 with one label whose sizes are odd."""
    import torch
    import transformers as hf

    torch.manual_seed(1)
    config = hf.Qwen2Config(
        vocab_size=53,
        hidden_size=30,
        intermediate_size=42,
        num_hidden_layers=2,
        num_attention_heads=5,
        num_key_value_heads=1,
        head_dim=6,
        max_position_embeddings=32,
        pad_token_id=0,
        num_labels=1,
    )
    hf.Qwen2ForSequenceClassification(config).save_pretrained(folder)


def sharded(module: Module, mesh: Any) -> Module:
    """Return the module under FSDP2."""
    from torch.distributed.fsdp import fully_shard

    for layer in module.base_model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def tensor_parallel(module: Module, mesh: Any) -> Module:
    """Return the module cut as transformers and torchtitan cut it: q, k, v, gate and up by rows, o and down by columns."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    cut: dict[str, Any] = {}
    for name, _ in module.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            cut |= {f"{name}.base_layer": ColwiseParallel(), f"{name}.lora_B.default": ColwiseParallel()}
        elif leaf in ("o_proj", "down_proj"):
            cut |= {f"{name}.base_layer": RowwiseParallel(), f"{name}.lora_A.default": RowwiseParallel()}
    return parallelize_module(module, mesh, cut)


def mesh_of(*sizes: int) -> Any:
    """Return a mesh of all ranks: of one dimension FSDP's, of two as the maker names them."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :] if sizes[1:] else ("dp",))


def dcp(folder: Path, state: dict[str, Any], **options: Any) -> None:
    """Save as torch does."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save(state, checkpoint_id=str(folder), **options)


def dcp_tp(folder: Path) -> None:
    """Tensor parallelism alone, as a training program of one's own saves it."""
    dcp(folder, {"model": tensor_parallel(adapted(), mesh_of(RANKS)).state_dict()})


def dcp_alone(folder: Path) -> None:
    """Every rank writes its own metadata, of what it saved itself."""
    dcp(folder, {"model": sharded(adapted(), mesh_of(RANKS)).state_dict()}, use_collectives=False)


def dcp_fsdp_tp(folder: Path) -> None:
    """FSDP2 over tensor parallelism: rows of rows, and rows of columns; flat names, as torchtitan has them."""
    mesh = mesh_of(2, 2)
    module = tensor_parallel(adapted("bfloat16"), mesh["tp"])
    dcp(folder, {**sharded(module, mesh["dp"]).state_dict()})


def wrapped(module: Module, mesh: Any = None, *, original: bool = True) -> Module:
    """Return the module under FSDP1, each layer and all of it."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel

    module.base_model.model.model.layers = torch.nn.ModuleList(
        FullyShardedDataParallel(layer, device_mesh=mesh, use_orig_params=original, device_id=torch.device("cpu"))
        for layer in module.base_model.model.model.layers
    )
    return FullyShardedDataParallel(module, device_mesh=mesh, use_orig_params=original, device_id=torch.device("cpu"))


def accelerate_saves(module: Module, folder: Path, state: str, *, version: int = 2, **options: Any) -> None:
    """Save as accelerate and the HF Trainer do, which ask for the adapter alone."""
    from accelerate import PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import save_fsdp_model

    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=state, cpu_offload=version == 1)
    save_fsdp_model(plugin, PartialState(), module, str(folder), **options)


def accelerate_fsdp2(dtype: str, state: str, **options: Any) -> Maker:
    """FSDP2 as accelerate saves it."""

    def make(folder: Path) -> None:
        accelerate_saves(sharded(adapted(dtype), mesh_of(RANKS)), folder, state, **options)

    return make


def accelerate_fsdp1(state: str, *, original: bool = True, meshed: bool = False, **options: Any) -> Maker:
    """FSDP1 as accelerate saves it: the whole model."""

    def make(folder: Path) -> None:
        module = wrapped(adapted(), mesh_of(RANKS) if meshed else None, original=original)
        accelerate_saves(module, folder, state, version=1, **options)
        if state == LOCAL:  # shapes are in no file, and those of heads follow from the hidden size
            (folder / "config.json").write_bytes((folder.parent / "base" / "config.json").read_bytes())

    return make


def accelerate_fsdp1_full(folder: Path) -> None:
    """FSDP1 as accelerate saves it whole: torch's own gathering ends the process on a CPU, so that parameters are summoned."""
    from accelerate.utils import fsdp_utils
    from torch.distributed.fsdp import FullyShardedDataParallel

    module = wrapped(adapted())
    with FullyShardedDataParallel.summon_full_params(module, writeback=False):
        state = {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in module.named_parameters()
        }
    gather = vars(fsdp_utils)["_get_model_state_dict"]
    vars(fsdp_utils)["_get_model_state_dict"] = lambda *_, **__: state
    accelerate_saves(module, folder, FULL, version=1)
    vars(fsdp_utils)["_get_model_state_dict"] = gather


def verl(dtype: str, *, version: int = 2, meshed: tuple[int, ...] = (RANKS,), lora_only: bool = False) -> Maker:
    """What `FSDPCheckpointManager.save_checkpoint` of verl writes for an actor, by the same calls of torch."""

    def make(folder: Path) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType

        rank = dist.get_rank()
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", meshed, mesh_dim_names=("ddp", "fsdp")[-len(meshed) :])
        module = adapted(dtype)
        if version == 1:
            module = wrapped(module, mesh)
            with FullyShardedDataParallel.state_dict_type(
                module, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False)
            ):
                state = module.state_dict()
        else:
            state = sharded(module, mesh).state_dict()
        if lora_only:
            state = {name: tensor for name, tensor in state.items() if "lora_" in name or ".adapter_" in name}
        actor = folder / "global_step_3" / "actor"
        actor.mkdir(parents=True, exist_ok=True)
        torch.save(state, actor / f"model_world_size_{RANKS}_rank_{rank}.pt")
        torch.save({"state": {}, "param_groups": []}, actor / f"optim_world_size_{RANKS}_rank_{rank}.pt")
        torch.save({"lr_scheduler": {"last_epoch": 3}}, actor / f"extra_state_world_size_{RANKS}_rank_{rank}.pt")
        if rank == 0:
            (actor / "fsdp_config.json").write_text(json.dumps({"FSDP_version": version, "world_size": RANKS}))
            told = {"r": 3, "lora_alpha": 5, "task_type": "SEQ_CLS"}
            (actor / "lora_train_meta.json").write_text(json.dumps(told))
            (actor / "huggingface").mkdir(exist_ok=True)
            (actor / "huggingface" / "config.json").write_bytes((folder.parent / "base" / "config.json").read_bytes())
            (folder / "latest_checkpointed_iteration.txt").write_text("3")

    return make


def verl_over_tp(folder: Path) -> None:
    """Rank files of FSDP2 over tensor parallelism, whose rows are cut in strides."""
    import torch
    import torch.distributed as dist

    mesh = mesh_of(2, 2)
    state = sharded(tensor_parallel(adapted(), mesh["tp"]), mesh["dp"]).state_dict()
    torch.save(state, folder / f"model_world_size_{RANKS}_rank_{dist.get_rank()}.pt")


def cut_safetensors(folder: Path) -> None:
    """Torch's HuggingFaceStorageWriter, as `save_pretrained(distributed_checkpoint=True)` of transformers calls it."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    state = sharded(adapted(), mesh_of(RANKS)).state_dict()
    save(state, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    (folder / "config.json").write_bytes((folder.parent / "base" / "config.json").read_bytes())


SHARDED, FULL, LOCAL = "SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"
KINDS: dict[str, Maker] = {
    "dcp-tp": dcp_tp,
    "dcp-fsdp-tp-bf16": dcp_fsdp_tp,
    "dcp-without-collectives": dcp_alone,
    "fsdp2-dcp-bf16": accelerate_fsdp2("bfloat16", SHARDED, adapter_only=True),
    "fsdp2-full": accelerate_fsdp2("float32", FULL, adapter_only=True),
    "fsdp2-ranks": accelerate_fsdp2("float32", SHARDED, adapter_only=True, use_dcp=False),
    "fsdp1-full-model": accelerate_fsdp1_full,
    "fsdp1-dcp": accelerate_fsdp1(SHARDED),
    "fsdp1-dcp-flat-mesh": accelerate_fsdp1(SHARDED, original=True, meshed=True),
    "fsdp1-ranks": accelerate_fsdp1(SHARDED, use_dcp=False),
    "fsdp1-local": accelerate_fsdp1(LOCAL),
    "safetensors": cut_safetensors,
    "verl-fsdp1-bf16": verl("bfloat16", version=1),
    "verl-fsdp2": verl("float32"),
    "verl-hsdp": verl("float32", meshed=(2, 2)),
    "verl-lora-only-bf16": verl("bfloat16", lora_only=True),
    "verl-tp": verl_over_tp,
}


def work(out: Path, names: list[str]) -> None:
    """Act as one rank."""
    import torch.distributed as dist
    from accelerate import PartialState

    PartialState(cpu=True, backend="gloo")
    for name in names:
        (out / name).mkdir(exist_ok=True)
        dist.barrier()
        KINDS[name](out / name)
    dist.barrier()


def make(out: Path, *names: str) -> None:
    """Make the kinds that are named, by default all."""
    ranks.launch(__file__, str(out), *(names or KINDS))


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        new_modules(Path(sys.argv[2]))
        ranks.fork(RANKS, lambda: work(Path(sys.argv[2]), sys.argv[3:]), IMPORTED)
    else:
        make(Path(sys.argv[1]), *sys.argv[2:])
