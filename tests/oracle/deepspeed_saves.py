"""What DeepSpeed leaves of modules that several ranks share, by its own training: 4 processes on CPU.

    python tests/oracle/deepspeed_saves.py OUT [NAME…]

`OUT/NAME` holds the checkpoint and `truth.safetensors`: float32 masters, or weights where there are none, gathered live.
A policy with a value head is of LLaMA-Factory's and
TRL's form: the head lies outside of the PEFT model, and the norms are trained with it, as LongLoRA does.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ranks

RANKS = 4
IMPORTS = ["deepspeed", "peft", "transformers.models.qwen2.modeling_qwen2"]
TAG = "global_step2"
Module = Any
Maker = Callable[[Path], None]


def trained(out: Path, module: Module, batches: Any, config: Mapping[str, Any], groups: list[Any]) -> Module:
    """Train for two steps and save; return the engine."""
    import deepspeed
    import torch

    options = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True, **config}
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=options)
    for batch in batches:
        engine.backward(batch(engine))
        engine.step()
    engine.save_checkpoint(str(out), tag=TAG)
    return engine


def masters(engine: Module) -> dict[str, Any]:
    """Return each parameter's float32 master, or the parameter itself where it has none."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter) if parameter.requires_grad and engine.zero_optimization() else None
        with deepspeed.zero.GatheredParameters([parameter]):
            found[name] = (parameter if master is None else master).detach().clone()
    return found


def gathered(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the table of every rank."""
    import torch.distributed as dist

    tables: list[Any] = [None] * RANKS
    dist.all_gather_object(tables, dict(table))
    return tables


def keep(out: Path, truth: Mapping[str, Any]) -> None:
    """Write the truth, once."""
    import torch.distributed as dist
    from safetensors.torch import save_file

    if dist.get_rank() == 0:
        save_file({name: tensor.contiguous() for name, tensor in truth.items()}, out / "truth.safetensors")


def value_head(stage: int) -> Maker:
    """A policy of PEFT's with a value head around it, as LLaMA-Factory trains reward models, and with trained norms."""

    def make(out: Path) -> None:
        import peft
        import torch
        import torch.distributed as dist
        import transformers as hf

        class Head(torch.nn.Module):
            def __init__(self, width: int) -> None:
                super().__init__()
                self.summary = torch.nn.Linear(width, 1)

        class Policy(torch.nn.Module):
            def __init__(self, model: Module) -> None:
                super().__init__()
                self.pretrained_model, self.v_head = model, Head(model.config.hidden_size)

            def forward(self, rows: Module) -> Module:
                return self.v_head.summary(self.pretrained_model(rows, output_hidden_states=True).hidden_states[-1])

        torch.manual_seed(3)
        sizes = {"vocab_size": 67, "hidden_size": 20, "intermediate_size": 26, "num_hidden_layers": 2, "head_dim": 6}
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(num_attention_heads=4, num_key_value_heads=2, **sizes))
        if dist.get_rank() == 0:
            model.save_pretrained(out / "base")
        lora = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        policy = Policy(peft.get_peft_model(model, lora)).bfloat16()
        for name, parameter in policy.named_parameters():
            if "norm" in name:
                parameter.requires_grad = True
        options = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}

        def batch(step: int) -> Callable[[Module], Any]:
            rows = torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(10 * dist.get_rank() + step))
            return lambda engine: engine(rows).float().pow(2).mean()

        groups = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        keep(out, masters(trained(out, policy, map(batch, range(2)), options, groups)))

    return make


def round_robin(stage: int) -> Maker:
    """Groups whose parameters are dealt out to the ranks in turn. DeepSpeed's own function gives other masters than it has."""

    def make(out: Path) -> None:
        import torch
        import torch.distributed as dist

        torch.manual_seed(3)
        sizes = (8, 13, 7, 5)
        module = torch.nn.Sequential(*(torch.nn.Linear(*of) for of in itertools.pairwise(sizes))).bfloat16()
        options = {"zero_optimization": {"stage": stage, "round_robin_gradients": True}, "bf16": {"enabled": True}}

        def batch(step: int) -> Callable[[Module], Any]:
            rows = torch.randn(2, 8, generator=torch.Generator().manual_seed(10 * dist.get_rank() + step)).bfloat16()
            return lambda engine: engine(rows).float().pow(2).mean()

        engine = trained(out, module, map(batch, range(2)), options, list(module.parameters()))
        (group,) = engine.optimizer.round_robin_bit16_groups
        (own,) = engine.optimizer.single_partition_of_fp32_groups
        flat = torch.cat([table["own"] for table in gathered({"own": own.detach()})])
        names = {parameter: name for name, parameter in module.named_parameters()}
        truth = {}
        begin = 0
        for parameter in group:
            master, begin = flat[begin : begin + parameter.numel()], begin + parameter.numel()
            truth[names[parameter]] = master.view(parameter.shape)
            if not torch.equal(truth[names[parameter]].bfloat16(), parameter):
                raise AssertionError(names[parameter])
        keep(out, truth)

    return make


KINDS: dict[str, Maker] = {
    "round-robin-stage2": round_robin(2),
    "value-head-stage3": value_head(3),
}


def work(out: Path, names: list[str]) -> None:
    """Act as one rank."""
    import deepspeed
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # gloo does it alone; DeepSpeed would compile an operator for collectives on a CPU, for a minute and a half
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
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
        ranks.fork(RANKS, lambda: work(Path(sys.argv[2]), sys.argv[3:]), IMPORTS)
    else:
        make(Path(sys.argv[1]), *sys.argv[2:])
