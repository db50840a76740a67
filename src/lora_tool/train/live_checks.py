"""What a model tells before its first step: the adapter, the dtypes, the attention, the rows."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from lora_tool.architectures.heads import CLASSIFICATION_HEADS
from lora_tool.report import Finding
from lora_tool.train.traps import trap

_LEAKING = frozenset(("opt", "falcon", "mpt", "bloom", "mamba", "mamba2", "falcon_mamba", "rwkv", "xlm", "ctrl"))
"""Model types that leaked when they were probed; asked only where a model cannot be probed itself."""

_LENGTH = 16
_TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-2}
_HALF_TOLERANCE = 5e-2


def coverage(model: Any) -> tuple[dict[str, int], list[str]]:
    """Return how many modules of each last name have LoRA, ``{"q_proj": 24}``, and the last names of linear layers without.

    Output layers are left out of the second, and so is what `modules_to_save` trains whole.
    """
    covered = Counter(name.rpartition(".")[2] for name in model.base_model.targeted_module_names)
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
        why = f"{name} is trained with task_type {task}, so its head would not be saved"
        yield trap("task-type", 'LoraConfig(task_type="SEQ_CLS", …)', where="model", subject="task_type", why=why)


def _packing(model: Any, collator: Any, args: Any, *, sharded: bool) -> Iterator[Finding]:
    """Yield a finding if documents that `collator` puts into one row see each other in `model`."""
    packing, flat = bool(getattr(args, "packing", False)), bool(getattr(collator, "padding_free", False))
    if getattr(args, "padding_free", False) and collator is not None and not flat:
        who = type(collator).__name__
        yield trap("padding-free-off", "padding_free: false", where="model", subject="padding_free", who=who)
    shared = flat and (packing or args.per_device_train_batch_size > 1)
    how = leak(model, collator, packing=packing, sharded=sharded) if shared else None
    if how is not None:
        attention = getattr(model.config, "_attn_implementation", None) or "its own attention"
        subject = "packing" if packing else "padding_free"
        hint = f"{subject}: false" + ("" if packing else " (or per_device_train_batch_size: 1)")
        kind = model.config.model_type
        yield trap("padding-free-leak", hint, where="model", subject=subject, model=kind, attention=attention, how=how)


def leak(model: Any, collator: Any, *, packing: bool, sharded: bool) -> str | None:
    """Return how it was seen that documents in a row that `collator` makes see each other in `model`, None if they do not.

    It is found by behaviour: names of attentions and models tell too little. Two rows differ in their first document
    alone; if the logits of the second differ, it sees the first. Mask-aware models give differences of 1e-6, leaking
    ones of 1 and more. A model that cannot be run here, as its weights are `sharded` or its code fails, is known by
    type.
    """
    training, why_not = model.training, "its weights are sharded"
    if not sharded:
        model.eval()
        try:
            with torch.no_grad():
                first, second = (_logits(model, collator, seed, packing=packing) for seed in (1, 2))
        except Exception as error:  # noqa: BLE001 - remote code may raise anything; that is no reason not to train
            why_not = next(iter(str(error).splitlines()), type(error).__name__)
        else:
            change = float((first - second).abs().max()) / (float(first.std()) or 1.0)
            leaks = change > _TOLERANCE.get(next(model.parameters()).dtype, _HALF_TOLERANCE)
            said = f"changing one document changes the logits of the next by {change:.2g} standard deviations"
            return said if leaks else None
        finally:
            model.train(training)
    kind = model.config.model_type
    return f"{kind} leaked wherever it was probed ({why_not} here)" if kind in _LEAKING else None


def _logits(model: Any, collator: Any, seed: int, *, packing: bool) -> torch.Tensor:
    """Return the logits of the second document, in float32; `seed` chooses the first one."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    vocabulary = min(inner.config.get_text_config().vocab_size, 1000)
    before, after = (
        torch.randint(0, vocabulary, (_LENGTH,), generator=torch.Generator().manual_seed(of)).tolist()
        for of in (seed, 0)
    )
    packed = [{"input_ids": before + after, "seq_lengths": [_LENGTH, _LENGTH]}]
    batch = collator(packed if packing else [{"input_ids": before}, {"input_ids": after}])
    taken = inspect.signature(inner.forward).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    given = {
        name: value.to(inner.device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
        if name != "labels" and (anything or name in taken)
    }
    logits: torch.Tensor = inner(**given).logits
    return logits[0, -_LENGTH:].float()
