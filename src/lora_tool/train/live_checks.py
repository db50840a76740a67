"""What a model tells before its first step: the adapter, the dtypes, the attention, the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from lora_tool.architectures.heads import CLASSIFICATION_HEADS
from lora_tool.report import Finding
from lora_tool.train.leak_probe import probe
from lora_tool.train.traps import trap

_LORA = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


def coverage(model: Any) -> tuple[dict[str, int], list[str]]:
    """Return how many modules of each last name have LoRA, ``{"q_proj": 24}``, and the last names of linear layers without.

    Output layers are left out of both, and so is what `modules_to_save` trains whole.
    """
    modules = {
        name.partition(f".{part}.")[0] for name, _ in model.named_parameters() for part in _LORA if f".{part}." in name
    }
    covered = Counter(module.rpartition(".")[2] for module in modules)
    others = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and not name.endswith((".base_layer", "lm_head"))
        and not any(part in name for part in ("lora_", "modules_to_save", "original_module"))
    }
    return dict(sorted(covered.items())), sorted(others - covered.keys())


def process_findings(asked: int | None, running: int) -> Iterator[Finding]:
    """Yield a finding if accelerate started another number of processes than it was asked for."""
    if asked is not None and asked != running:
        hint = (
            f"num_processes: {running}; with cpu: true accelerate starts only one (multi_gpu: true with TRL's use_cpu: "
            "true starts several)"
        )
        yield trap("processes", hint, where="launch", subject="num_processes", asked=asked, running=running)


def model_findings(model: Any, collator: Any, args: Any, *, sharded: bool) -> Iterator[Finding]:
    """Yield what is wrong with a model about to be trained on the rows that `collator` makes, whoever built it.

    `args` are the Trainer's; of a model whose weights are `sharded` a process has a part, so that it cannot be run.
    """
    if getattr(model, "peft_config", None):
        yield from _adapter(model)
    half = [name for name, parameter in model.named_parameters() if parameter.dtype is torch.float16]
    if half:
        hint = "dtype: bfloat16 (or float32, with fp16: true for speed)"
        yield trap("fp16-weights", hint, where="model", subject=half[0], what=f"{len(half)} parameters are")
    asked = (getattr(args, "model_init_kwargs", None) or {}).get("attn_implementation")
    used = getattr(model.config, "_attn_implementation", None)
    if asked is not None and used is not None and asked != used:
        hint = f"attn_implementation: {used}, or install what {asked} needs"
        yield trap("attention-in-effect", hint, where="model", subject="attn_implementation", asked=asked, used=used)
    yield from _packing(model, getattr(collator, "data_collator", collator), args, sharded=sharded)


def _adapter(model: Any) -> Iterator[Finding]:
    """Yield what is wrong with an adapter: it is not trained, lies on another one, or is saved without its head."""
    lora = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    if lora and any(getattr(module, "disable_adapters", False) is True for module in model.modules()):
        why = "are switched off (disable_adapter)"
        yield trap("frozen-adapter", "model.enable_adapter_layers()", where="model", why=why)
    elif lora and not any(parameter.requires_grad for parameter in lora):
        hint = "is_trainable=True where the adapter is loaded, or model.set_adapter(name)"
        yield trap("frozen-adapter", hint, where="model", why="have requires_grad False")
    base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT's own class, or transformers'
    if base is not model and getattr(base, "_hf_peft_config_loaded", False):
        hint = "lora-tool merge ADAPTER -o MERGED, then load MERGED as the base"
        yield trap("adapter-as-base", hint, where="model", subject="model_name_or_path")
    active = model.active_adapters() if callable(model.active_adapters) else model.active_adapters
    config, name = model.peft_config.get(next(iter(active), None)), type(base).__name__
    if config is None or not name.endswith("ForSequenceClassification"):
        return
    task = getattr(config.task_type, "value", config.task_type)
    if task != "SEQ_CLS" and not CLASSIFICATION_HEADS & set(config.modules_to_save or ()):
        why = f"{name} is trained with task_type {task}: its head would not be saved"
        yield trap("task-type", 'LoraConfig(task_type="SEQ_CLS", …)', where="model", subject="task_type", why=why)


def _packing(model: Any, collator: Any, args: Any, *, sharded: bool) -> Iterator[Finding]:
    """Yield a finding if documents that `collator` puts into one row see each other in `model`."""
    packing, flat = bool(getattr(args, "packing", False)), bool(getattr(collator, "padding_free", False))
    if getattr(args, "padding_free", False) and collator is not None and not flat:
        who = type(collator).__name__
        yield trap("padding-free-off", "padding_free: false", where="model", subject="padding_free", who=who)
    if not (flat and (packing or args.per_device_train_batch_size > 1)):
        return
    seen = probe(model, collator, packing=packing, sharded=sharded)
    if seen.leaks:
        kind = model.config.model_type
        how = f"{kind} leaked wherever it was probed ({seen.why_not} here)"
        if seen.difference is not None:
            how = f"changing one document changes the logits of the next by {seen.difference:.2g} standard deviations"
        attention = getattr(model.config, "_attn_implementation", None) or "its own attention"
        subject = "packing" if packing else "padding_free"
        hint = f"{subject}: false" + ("" if packing else " (or per_device_train_batch_size: 1)")
        yield trap("padding-free-leak", hint, where="model", subject=subject, model=kind, attention=attention, how=how)
