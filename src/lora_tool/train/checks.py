"""What a run's configuration tells before anything is loaded: what is set for the user, and what cannot end well."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lora_tool.architectures.heads import LANGUAGE_MODELS
from lora_tool.checkpoint.folders import read_folder
from lora_tool.errors import BadRunConfig, CheckpointError
from lora_tool.formats.files import expanded
from lora_tool.formats.model_config import read_model_config
from lora_tool.report import Finding
from lora_tool.train.config import RunConfig
from lora_tool.train.traps import trap

_HALF = ("float16", "fp16", "half", "torch.float16")


def with_settings(run: RunConfig) -> tuple[RunConfig, dict[str, tuple[Any, str]]]:
    """Return the run with what was absent and every such run needs; and those options, each with its value and why.

    Nothing that was given is changed.
    """
    needed: dict[str, tuple[Any, str]] = {}
    if run.method.task_type == "SEQ_CLS" and run.options.get("use_peft"):
        why = "with TRL's default CAUSAL_LM, the adapter's score head would not be saved"
        needed["lora_task_type"] = ("SEQ_CLS", why)
    if run.guard.mode != "off":
        needed["logging_nan_inf_filter"] = (False, "TRL's default shows a NaN loss as 0.0")
    settings = {name: setting for name, setting in needed.items() if name not in run.given}
    options = {**run.options, **{name: value for name, (value, _) in settings.items()}}
    return replace(run, options=options, given=run.given | settings.keys()), settings


def require_inputs(run: RunConfig) -> None:
    """Return if a model and data are named. Raises `BadRunConfig`."""
    if run.text("model_name_or_path") is None:
        raise BadRunConfig("no model is given: set model_name_or_path", hint="model_name_or_path: FOLDER_OR_HUB_ID")
    if run.text("dataset_name") is None and not run.options.get("datasets"):
        hint = "dataset_name: FOLDER_OR_HUB_ID, or datasets: [{path: json, data_files: train.jsonl}]"
        raise BadRunConfig("no data is given: set dataset_name or datasets", hint=hint)


def static_findings(run: RunConfig) -> tuple[Finding, ...]:
    """Return what is wrong with the configuration itself, as far as it is not ignored."""
    checks = (_adapter, _models, _precision, _conflicts, _packing, _old_checkpoints)
    where = str(run.path) if run.path else "command line"
    found = (replace(item, path=item.path or where) for check in checks for item in check(run))
    return tuple(item for item in found if item.code not in run.guard.ignore)


def _adapter(run: RunConfig) -> Iterator[Finding]:
    """TRL reads its ``lora_`` options only with ``use_peft``, and without it trains the whole model silently."""
    unread = sorted(name for name in run.given if name.startswith("lora_"))
    if unread and "use_peft" not in run.given:
        hint = f"{run.line('use_peft', 'true')}; or use_peft: false to train the whole model"
        yield trap("peft-off", hint, subject=unread[0], count=len(unread))
    name, method = "lora_task_type", run.method
    expected, given = method.task_type, run.text(name)
    if run.options.get("use_peft") and name in run.given and given != expected:
        if expected == "SEQ_CLS":
            why = "the score head would be trained but not saved, and every load would re-initialise it at random"
        else:
            why = f"the saved adapter would name another task than {method.name} trains, and loaders use that name"
        why = f"is {given or 'none'}, but {method.name} needs {expected}: {why}"
        yield trap("task-type", run.line(name, expected), subject=name, why=why)


def _models(run: RunConfig) -> Iterator[Finding]:
    base, judge = (_folder(run, name) for name in ("model_name_or_path", "reward_model_name_or_path"))
    adapter = base is not None and not (base / "config.json").is_file() and (base / "adapter_config.json").is_file()
    if adapter and run.options.get("use_peft"):
        hint = f"lora-tool merge {shlex.quote(str(base))} -o MERGED, then {run.line('model_name_or_path', 'MERGED')}"
        yield trap("adapter-as-base", hint, where="model", subject="model_name_or_path")
    try:
        classes = read_model_config(judge / "config.json").architectures if judge else ()
    except (CheckpointError, OSError):
        return  # transformers says what is wrong with it
    if classes and all(name.endswith(LANGUAGE_MODELS) for name in classes):
        line = run.line("reward_model_name_or_path", "REWARD_MODEL")
        hint = f"{line} (lora-tool merge --rm makes one of an adapter)"
        yield trap("reward-head", hint, subject="reward_model_name_or_path", model=classes[0])


def _folder(run: RunConfig, name: str) -> Path | None:
    """Return the folder that the option `name` names, None where it is none of this machine."""
    path = expanded(run.text(name) or "")
    return path if run.text(name) and path.is_dir() else None


def _inner(run: RunConfig, name: str) -> str | None:
    """Return an option of ``model_init_kwargs`` as text, None where it is not there."""
    inner = run.options.get("model_init_kwargs")
    value = inner.get(name) if isinstance(inner, dict) else None
    return None if value is None else str(value)


def _conflicts(run: RunConfig) -> Iterator[Finding]:
    for code, name in (("dtype-conflict", "dtype"), ("attention-conflict", "attn_implementation")):
        outer, inner = run.text(name), _inner(run, name)
        if outer is not None and inner is not None and outer != inner:
            hint = f"keep one of them: {run.line(name, outer)}, without {name} in model_init_kwargs"
            yield trap(code, hint, subject=name, outer=outer, inner=inner)


def _precision(run: RunConfig) -> Iterator[Finding]:
    inner = _inner(run, "dtype")
    half = (inner or run.text("dtype")) in _HALF
    if half:
        hint = (
            f"{run.line('dtype', 'auto')} (as the checkpoint is stored), or bfloat16; with fp16: true on a GPU keep "
            "float32 weights, so that the loss is scaled"
        )
        yield trap("fp16-weights", hint, subject="model_init_kwargs" if inner else "dtype", what="the weights are")
    clipping = run.text("max_grad_norm")
    if (half or run.options.get("fp16")) and clipping is not None and float(clipping) == 0.0:
        yield trap("no-clipping", run.line("max_grad_norm", 1.0), subject="max_grad_norm")
    name = "logging_nan_inf_filter"
    if name in run.given and run.options[name]:
        yield trap("nan-filter", run.line(name, "false"), subject=name)


def _packing(run: RunConfig) -> Iterator[Finding]:
    if run.method.name == "dpo" and run.options.get("padding_free"):
        yield trap("padding-free-off", run.line("padding_free", "false"), subject="padding_free", who="TRL's DPO")
    if run.method.name == "sft" and run.options.get("packing") and run.text("packing_strategy") == "wrapped":
        yield trap("packing-wrapped", run.line("packing_strategy", "bfd"), subject="packing_strategy")


def _old_checkpoints(run: RunConfig) -> Iterator[Finding]:
    names = read_folder(run.output).checkpoints if run.output.is_dir() and not run.resuming else ()
    if names:
        hint = "resume from it with --resume auto, choose another output_dir, or move the old checkpoints away"
        yield trap("old-checkpoints", hint, where=str(run.output), last=names[-1])
