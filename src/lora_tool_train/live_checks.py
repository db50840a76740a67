"""The checks before the first step: of the adapter, the dtypes, the rows, and documents that share a row."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch

from lora_tool.core.choices import closest
from lora_tool.core.report import Finding, Severity
from lora_tool.models.ends import CLASSIFICATION_HEADS
from lora_tool_train.methods import Method
from lora_tool_train.traps import LOW, trap

_LEAKING = frozenset(("opt", "falcon", "mpt", "bloom", "mamba", "mamba2", "falcon_mamba", "rwkv", "xlm", "ctrl"))
"""Model types that leaked when they were probed; read only where a model cannot be probed."""

_ADAPTED = re.compile(r"lora_|\.modules_to_save\.|trainable_tokens_")
"""Parameters that are saved with an adapter."""
SCANNED = 20_000
"""Rows that are read, spread over the data: seconds, whatever its size."""
_PAIRS = (("chosen_ids", "rejected_ids"), ("chosen_input_ids", "rejected_input_ids"), ("chosen", "rejected"))
"""Columns of a pair: as TRL's trainers tokenise them, and as text or messages."""
_LENGTH = 16
_TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-2}
_HALF_TOLERANCE = 5e-2


def model_findings(model: Any, collator: Any, args: Any, *, sharded: bool) -> Iterator[Finding]:
    """Yield what is wrong with a model about to be trained on the rows that `collator` makes, whoever built it.

    `args` are the Trainer's; of a model whose weights are `sharded` a process has a part, so that it cannot be run.
    """
    if getattr(model, "peft_config", None):
        yield from _adapter(model)
        yield from _targets(model)
    half = [name for name, parameter in model.named_parameters() if parameter.dtype is torch.float16]
    if half:
        hint = "dtype: bfloat16 (or float32, with fp16: true for speed)"
        yield trap("fp16-weights", hint, where="model", subject=half[0], what=f"{len(half)} parameters are")
    yield from _packing(model, getattr(collator, "data_collator", collator), args, sharded=sharded)


def active_adapter(model: Any) -> str | None:
    """Return the name of the first active adapter, of PEFT's own class or of transformers' with adapters; None without one."""
    active = model.active_adapters() if callable(model.active_adapters) else model.active_adapters
    return next(iter(active), None)


def base_of(model: Any) -> Any:
    """Return the model inside PEFT's own class; one of transformers' classes as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _adapter(model: Any) -> Iterator[Finding]:
    config = model.peft_config.get(active_adapter(model))
    kind = getattr(config, "peft_type", "")
    lora = [item for item in model.named_parameters() if "lora_" in item[0] and kind == "LORA"]
    if lora and any(getattr(module, "disable_adapters", False) is True for module in model.modules()):
        why = "are switched off (disable_adapter)"
        yield trap("frozen-adapter", "model.enable_adapter_layers()", where="model", why=why)
    elif lora and not any(item.requires_grad for name, item in model.named_parameters() if _ADAPTED.search(name)):
        hint = "is_trainable=True where the adapter is loaded, or model.set_adapter(name)"
        yield trap("frozen-adapter", hint, where="model", why="have requires_grad False")
    base = base_of(model)
    if base is not model and getattr(base, "_hf_peft_config_loaded", False):
        hint = "lora-tool merge ADAPTER -o MERGED, then load MERGED as the base"
        yield trap("adapter-as-base", hint, where="model", subject="model_name_or_path")
    name = type(base).__name__
    if config is None or not name.endswith("ForSequenceClassification"):
        return
    task = getattr(config.task_type, "value", config.task_type)
    if task != "SEQ_CLS" and not CLASSIFICATION_HEADS & set(config.modules_to_save or ()):
        why = f"{name} is trained with task_type {task}, so its head would not be saved"
        yield trap("task-type", 'LoraConfig(task_type="SEQ_CLS", …)', where="model", subject="task_type", why=why)


def _targets(model: Any) -> Iterator[Finding]:
    """Yield the entries of `target_modules` and `modules_to_save` that PEFT passed over, as they end no module's path."""
    paths = [name for name, _ in model.named_modules()]
    ends = {part for path in paths for part in _ends(path.replace(".base_layer", ""))}
    for config in model.peft_config.values():
        targets = getattr(config, "target_modules", None) or ()
        # PEFT itself adds the names of heads, of which a classifier has one
        whole = set(getattr(config, "modules_to_save", None) or ()) - CLASSIFICATION_HEADS
        for entry in sorted({*whole, *(() if isinstance(targets, str) else targets)} - ends):
            close = closest(entry.lower(), {path.rpartition(".")[2] for path in paths})
            hint = f"did you mean {close}?" if close else "lora_target_modules: all-linear"
            yield trap("unmatched-target", hint, where="model", subject="lora_target_modules", entry=entry)


def _ends(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.partition(".")[2]


def rate_findings(model: Any, scheduler: Any, steps: int) -> Iterator[Finding]:
    """Yield that the learning rate is 0, or too low for LoRA, in every one of `steps`, where the schedule is known."""
    peak = _peak_rate(getattr(scheduler, "scheduler", scheduler), steps)
    if peak == 0:
        hint = "learning_rate: above 0, and fewer warmup_steps than max_steps"
        yield trap("learning-rate", hint, where="optimizer", why=f"the learning rate is 0 in each of the {steps} steps")
    elif peak is not None and peak < LOW and any("lora_" in name for name, _ in model.named_parameters()):
        hint = "learning_rate: 1e-5 for methods that compare answers, 2e-4 for sft"
        why = f"the learning rate is at most {peak:.3g}, the scale of full training: LoRA takes ten times that"
        yield trap("learning-rate", hint, where="optimizer", severity=Severity.WARNING, why=why)


def _peak_rate(scheduler: Any, steps: int) -> float | None:
    """Return the highest rate that transformers' `scheduler` gives any group, None of other schedulers."""
    if type(scheduler) is not torch.optim.lr_scheduler.LambdaLR or steps < 1:
        return None
    at = {*range(0, steps, max(1, steps // 1000)), steps - 1}
    curves = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    return max((float(rate) * max(curve(step) for step in at) for rate, curve in curves), default=None)


def _packing(model: Any, collator: Any, args: Any, *, sharded: bool) -> Iterator[Finding]:
    packing = bool(getattr(args, "packing", False))
    shared = getattr(collator, "padding_free", False) and (packing or args.per_device_train_batch_size > 1)
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
    inner = base_of(model)
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


def row_findings(method: Method, data: Any) -> Iterator[Finding]:
    """Yield what is wrong with the rows; nothing for streamed data, which have no length."""
    if not hasattr(data, "__len__"):
        return
    if not len(data):
        hint = "another dataset_name or split; or raise max_length, which may have dropped all rows"
        yield trap("no-rows", hint, where="train data")
        return
    rows, columns = data.select(range(0, len(data), -(-len(data) // SCANNED))), set(data.column_names)
    chosen, rejected = next((pair for pair in _PAIRS if columns.issuperset(pair)), ("", ""))
    same = sum(one == other for one, other in zip(rows[chosen], rows[rejected], strict=True)) if chosen else 0
    if same:
        code, share = "chosen-equals-rejected", f"{same} of {len(rows)}"
        hint = f"filter them out of the data, or lora_tool: {{guard: {{ignore: [{code}]}}}}"
        severity = Severity.ERROR if same == len(rows) else Severity.WARNING
        yield trap(code, hint, where="train data", subject="chosen", severity=severity, share=share)
    if method.name == "kto" and "label" in columns and len(set(rows["label"])) == 1:
        hint, label = "add rows of the other label", rows["label"][0]
        yield trap("one-label", hint, where="train data", subject="label", label=label, count=len(rows))
