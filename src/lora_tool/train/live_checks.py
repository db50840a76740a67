"""What the built trainer tells before its first step: the adapter, the dtypes, the attention, the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from lora_tool.architectures.heads import CLASSIFICATION_HEADS
from lora_tool.report import Finding
from lora_tool.train.codes import adapter_as_base, error, warning
from lora_tool.train.leak_probe import probe

_LORA = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")


def adapter_config(model: Any) -> Any:
    """Return the config of the model's active adapter, None for a model without one."""
    configs = getattr(model, "peft_config", None)
    return configs.get(_active(model)[0]) if configs and _active(model) else None


def _active(model: Any) -> list[str]:
    active = getattr(model, "active_adapters", ())
    return list(active() if callable(active) else active)


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


def batch_note(trainer: Any) -> tuple[str, int]:
    """Return the effective batch size, in words and as a number."""
    args, processes = trainer.args, trainer.accelerator.num_processes
    total = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
    words = f"effective batch size {total}: {args.per_device_train_batch_size} per device × {args.gradient_accumulation_steps} accumulation × {processes} processes"
    generations = getattr(args, "num_generations", None)
    return words + (f", {generations} completions per prompt" if generations else ""), total


def process_findings(asked: int | None, running: int) -> Iterator[Finding]:
    """Yield a finding if accelerate started another number of processes than it was asked for."""
    if asked is not None and asked != running:
        yield warning(
            "processes",
            f"{asked} processes were requested, {running} run: the effective batch size differs",
            hint=f"num_processes: {running}; with cpu: true accelerate starts only one (multi_gpu: true with TRL's "
            "use_cpu: true starts several)",
            where="launch",
            subject="num_processes",
        )


def model_findings(model: Any, collator: Any, args: Any, *, sharded: bool) -> Iterator[Finding]:
    """Yield what is wrong with a model about to be trained on the rows that `collator` makes, whoever built it."""
    yield from _frozen(model)
    if hasattr(model, "get_base_model") and getattr(model.get_base_model(), "_hf_peft_config_loaded", False):
        yield adapter_as_base("load MERGED as the base")
    yield from _headless(model)
    half = [name for name, parameter in model.named_parameters() if parameter.dtype is torch.float16]
    if half:
        message = f"{len(half)} parameters are float16: one activation above 65504 makes the loss NaN"
        hint = "dtype: bfloat16 (or float32, with fp16: true for speed)"
        yield warning("fp16-weights", message, hint=hint, where="model", subject=half[0])
    asked_attention = (getattr(args, "model_init_kwargs", None) or {}).get("attn_implementation")
    in_effect = getattr(model.config, "_attn_implementation", None)
    if asked_attention is not None and in_effect is not None and asked_attention != in_effect:
        message = f"{asked_attention} was requested, {in_effect} is in effect"
        hint = f"attn_implementation: {in_effect}, or install what {asked_attention} needs"
        yield warning("attention-in-effect", message, hint=hint, where="model", subject="attn_implementation")
    yield from _packing(model, collator, args, sharded=sharded)


def _frozen(model: Any) -> Iterator[Finding]:
    if not getattr(model, "peft_config", None):
        return
    lora = [parameter for name, parameter in model.named_parameters() if "lora_" in name]
    off = any(getattr(module, "disable_adapters", False) is True for module in model.modules())
    if off and lora:
        message = "its LoRA layers are switched off (disable_adapter): training cannot change the adapter"
        yield error("frozen-adapter", message, hint="model.enable_adapter_layers()", where="model")
    elif lora and not any(parameter.requires_grad for parameter in lora):
        message = "its LoRA layers have requires_grad False: training cannot change the adapter"
        hint = "is_trainable=True where the adapter is loaded, or model.set_adapter(name)"
        yield error("frozen-adapter", message, hint=hint, where="model")


def _headless(model: Any) -> Iterator[Finding]:
    config = adapter_config(model)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = type(inner).__name__
    if config is None or not name.endswith("ForSequenceClassification"):
        return
    task = getattr(config.task_type, "value", config.task_type)
    if task != "SEQ_CLS" and not CLASSIFICATION_HEADS & set(config.modules_to_save or ()):
        message = f"{name} is trained with task_type {task}: its head would not be saved"
        yield error("task-type", message, hint='LoraConfig(task_type="SEQ_CLS", …)', where="model", subject="task_type")


def _packing(model: Any, collator: Any, args: Any, *, sharded: bool) -> Iterator[Finding]:
    """Yield a finding if documents that `collator` puts into one row see each other in `model`."""
    collator = getattr(collator, "data_collator", collator)  # transformers wraps it to drop columns
    packing = bool(getattr(args, "packing", False))
    flat = bool(getattr(collator, "padding_free", False))
    if getattr(args, "padding_free", False) and collator is not None and not flat:
        message = f"padding_free was requested, but {type(collator).__name__} pads: the memory and the speed are those of padding"
        yield warning("padding-free-off", message, hint="padding_free: false", where="model", subject="padding_free")
    if not (flat and (packing or args.per_device_train_batch_size > 1)):
        return
    seen = probe(model, collator, packing=packing, sharded=sharded)
    if not seen.leaks:
        return
    config = model.config
    how = (
        f"changing one document changes the logits of the next by {seen.difference:.2g} standard deviations"
        if seen.difference is not None
        else f"{config.model_type} leaked wherever it was probed ({seen.why_not} here)"
    )
    off = "packing: false" if packing else "padding_free: false"
    attention = getattr(config, "_attn_implementation", None) or "its own attention"
    yield error(
        "padding-free-leak",
        f"documents in one row see each other: {config.model_type} has no variable-length attention ({attention} is in effect); {how}",
        hint=off + ("" if packing else " (or per_device_train_batch_size: 1)"),
        where="model",
        subject="packing" if packing else "padding_free",
    )
