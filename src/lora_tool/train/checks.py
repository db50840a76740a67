"""What a run's configuration tells before anything is loaded: what is set for the user, and what cannot end well."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lora_tool.checkpoint.folders import read_folder
from lora_tool.errors import BadRunConfig
from lora_tool.report import Finding
from lora_tool.train.codes import adapter_as_base, error, warning
from lora_tool.train.config import RunConfig

_LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""How classes end that have no head for a reward."""

_HALF = ("float16", "fp16", "half", "torch.float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """An option that was absent and is set, because every run of the method needs it so."""

    name: str
    value: Any
    reason: str

    def __str__(self) -> str:
        value = str(self.value).lower() if isinstance(self.value, bool) else self.value
        return f"set {self.name}: {value} ({self.reason})"


def with_settings(run: RunConfig) -> tuple[RunConfig, tuple[Setting, ...]]:
    """Return the run with what was absent and is needed, and what that was. Nothing that was given is changed."""
    settings = tuple(item for item in _settings(run) if item.name not in run.given)
    added = {item.name: item.value for item in settings}
    given = run.given | added.keys()
    return replace(run, options={**run.options, **added}, file={**run.file, **added}, given=given), settings


def _settings(run: RunConfig) -> Iterator[Setting]:
    if run.method.task_type == "SEQ_CLS" and run.options.get("use_peft"):
        yield Setting(
            name="lora_task_type",
            value="SEQ_CLS",
            reason="a reward model's adapter; with TRL's default CAUSAL_LM its score head would not be saved",
        )
    if run.guard.mode != "off":
        yield Setting(name="logging_nan_inf_filter", value=False, reason="TRL's default shows a NaN loss as 0.0")


def require_inputs(run: RunConfig) -> None:
    """Return if a model and data are named. Raises `BadRunConfig`."""
    if run.text("model_name_or_path") is None:
        raise BadRunConfig("no model: model_name_or_path is not given", hint="model_name_or_path: FOLDER_OR_HUB_ID")
    if run.text("dataset_name") is None and not run.options.get("datasets"):
        hint = "dataset_name: FOLDER_OR_HUB_ID, or datasets: [{path: json, data_files: train.jsonl}]"
        raise BadRunConfig("no data: neither dataset_name nor datasets is given", hint=hint)


def static_findings(run: RunConfig) -> tuple[Finding, ...]:
    """Return what is wrong with the configuration itself, as far as it is not ignored."""
    checks = (
        *(_task_type, _without_peft, _adapter_as_base, _reward_model, _half_precision, _nan_filter, _conflicts),
        *(_packing, _old_checkpoints),
    )
    where = str(run.path) if run.path else "command line"
    found = (replace(item, path=item.path or where) for check in checks for item in check(run))
    return tuple(item for item in found if item.code not in run.guard.ignore)


def _old_checkpoints(run: RunConfig) -> Iterator[Finding]:
    output = run.output
    names = read_folder(output).checkpoints if output.is_dir() and not run.resuming else ()
    if names:
        message = f"holds {names[-1]} of an earlier run, which --resume auto would later take for one of this run"
        hint = "--resume auto resumes from it; else choose another output_dir, or move the old checkpoints away"
        yield warning("old-checkpoints", message, hint=hint, where=str(output))


def _task_type(run: RunConfig) -> Iterator[Finding]:
    expected, found = run.method.task_type, run.text("lora_task_type")
    if not run.options.get("use_peft") or "lora_task_type" not in run.given or found == expected:
        return
    if expected == "SEQ_CLS":
        why = "the score head would be trained and not saved, and every load would give it new random weights"
    else:
        why = f"the saved adapter would name another task than {run.method.name} trains, and loaders go by it"
    message = f"is {found or 'none'}, {run.method.name} needs {expected}: {why}"
    yield error("task-type", message, hint=run.line("lora_task_type", expected), subject="lora_task_type")


def _without_peft(run: RunConfig) -> Iterator[Finding]:
    """TRL reads its ``lora_`` options only with ``use_peft``, and without it trains the whole model silently."""
    unread = sorted(name for name in run.given if name.startswith("lora_"))
    if unread and "use_peft" not in run.given:
        message = "is given without use_peft, so TRL ignores it and trains the whole model"
        hint = f"{run.line('use_peft', 'true')}; use_peft: false, if the whole model is meant"
        yield warning("peft-off", f"{message} ({len(unread)} such options)", hint=hint, subject=unread[0])


def _adapter_as_base(run: RunConfig) -> Iterator[Finding]:
    named = run.text("model_name_or_path")
    folder = Path(named).expanduser() if named and run.options.get("use_peft") else None
    if folder and (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        yield adapter_as_base(run.line("model_name_or_path", "MERGED"), adapter=str(folder))


def _reward_model(run: RunConfig) -> Iterator[Finding]:
    """Yield a finding if the reward model is a language model: transformers would give it a head of random numbers."""
    named = run.text("reward_model_name_or_path")
    config = Path(named).expanduser() / "config.json" if named else None
    if config is None or not config.is_file():
        return
    try:
        raw = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # transformers says what is wrong with it
    classes = raw.get("architectures") if isinstance(raw, dict) else None
    if isinstance(classes, list) and classes and all(str(name).endswith(_LANGUAGE_MODELS) for name in classes):
        message = f"is a {classes[0]}, which has no head that gives a reward: it would get a random one"
        line = run.line("reward_model_name_or_path", "REWARD_MODEL")
        hint = f"{line} (lora-tool merge --rm makes one of an adapter)"
        yield error("reward-head", message, hint=hint, subject="reward_model_name_or_path")


def _model_option(run: RunConfig, name: str) -> str | None:
    """Return an option of ``model_init_kwargs`` as text, None where it is not there."""
    inner = run.options.get("model_init_kwargs")
    value = inner.get(name) if isinstance(inner, dict) else None
    return None if value is None else str(value)


def _conflicts(run: RunConfig) -> Iterator[Finding]:
    for code, name in (("dtype-conflict", "dtype"), ("attention-conflict", "attn_implementation")):
        outer, inner = run.text(name), _model_option(run, name)
        if outer is not None and inner is not None and outer != inner:
            message = f"is {outer}, but model_init_kwargs says {inner}, and TRL lets that win"
            hint = f"leave one of them: {run.line(name, outer)}, without {name} in model_init_kwargs"
            yield error(code, message, hint=hint, subject=name)


def _half_precision(run: RunConfig) -> Iterator[Finding]:
    inner = _model_option(run, "dtype")
    half = (inner or run.text("dtype")) in _HALF
    if half:
        yield warning(
            "fp16-weights",
            "float16 weights: one activation above 65504 makes the loss NaN, and no loss scaling helps against that",
            hint=f"{run.line('dtype', 'auto')} (as the checkpoint is stored), or bfloat16; with fp16: true on a GPU keep "
            "float32 weights, so that the loss is scaled",
            subject="model_init_kwargs" if inner else "dtype",
        )
    clipping = run.text("max_grad_norm")
    if (half or run.options.get("fp16")) and clipping is not None and float(clipping) == 0.0:
        message = "gradients are not clipped in float16, where one large step is enough to overflow"
        yield warning("no-clipping", message, hint=run.line("max_grad_norm", 1.0), subject="max_grad_norm")


def _nan_filter(run: RunConfig) -> Iterator[Finding]:
    name = "logging_nan_inf_filter"
    if name in run.given and run.options[name]:
        message = "a NaN loss will be shown as 0.0 or as the mean so far; the guard watches the gradients instead"
        yield warning("nan-filter", message, hint=run.line(name, "false"), subject=name)


def _packing(run: RunConfig) -> Iterator[Finding]:
    if run.method.name == "dpo" and run.options.get("padding_free"):
        message = "TRL's DPO does not have it and pads instead: the memory and the speed are those of padding"
        yield warning("padding-free-off", message, hint=run.line("padding_free", "false"), subject="padding_free")
    if run.method.name == "sft" and run.options.get("packing") and run.text("packing_strategy") == "wrapped":
        message = "documents are cut anywhere and joined without a border: each sees the one before it"
        yield warning("packing-wrapped", message, hint=run.line("packing_strategy", "bfd"), subject="packing_strategy")
