"""The checks of a run's configuration that no later one makes up for, as TRL ignores or guesses silently."""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from lora_tool.core.errors import CheckpointError
from lora_tool.core.report import Finding, Severity
from lora_tool.formats.files import expanded
from lora_tool.formats.model_config import read_model_config
from lora_tool.models.ends import LANGUAGE_MODELS
from lora_tool_train.config import RunConfig
from lora_tool_train.traps import LOW, BadRunConfig, trap

_OF_LORA = 5e-5
"""TRL's default of a method below it is full training's; RewardConfig's 1e-4 is LoRA's, too."""


def with_task_type(run: RunConfig) -> RunConfig:
    """Return the run, with a task type where a classifier's adapter was given none: TRL's default is CAUSAL_LM."""
    name, task = "lora_task_type", run.method.task_type
    if task != "SEQ_CLS" or not run.options.get("use_peft") or name in run.given:
        return run
    return replace(run, options={**run.options, name: task}, given=run.given | {name})


def require_inputs(run: RunConfig) -> None:
    """Return if a model and data are named, and steps. Raises `BadRunConfig`."""
    if run.text("model_name_or_path") is None:
        raise BadRunConfig("no model is given: set model_name_or_path", hint="model_name_or_path: FOLDER_OR_HUB_ID")
    if run.text("dataset_name") is None and not run.options.get("datasets"):
        hint = "dataset_name: FOLDER_OR_HUB_ID, or datasets: [{path: json, data_files: train.jsonl}]"
        raise BadRunConfig("no data is given: set dataset_name or datasets", hint=hint)
    if run.options.get("max_steps") == 0:
        raise BadRunConfig("max_steps is 0: the run has no step", hint="max_steps: -1, with num_train_epochs")


def static_findings(run: RunConfig) -> Iterator[Finding]:
    """Yield what is wrong with the configuration itself."""
    unread = sorted(name for name in run.given if name.startswith("lora_"))
    if unread and "use_peft" not in run.given:
        hint = "use_peft: true; or use_peft: false to train the whole model"
        yield trap("peft-off", hint, where=run.where(unread[0]), subject=unread[0], count=len(unread))
    name, given, expected = "lora_task_type", run.text("lora_task_type"), run.method.task_type
    if run.options.get("use_peft") and name in run.given and given != expected:
        why = f"is {given or 'none'}, but {run.method.name} needs {expected}"
        why += ": the score head would not be saved" if expected == "SEQ_CLS" else ", by which loaders choose the model"
        yield trap("task-type", f"{name}: {expected}", where=run.where(name), subject=name, why=why)
    rate = run.options.get("learning_rate", 0.0)
    if run.options.get("use_peft") and "learning_rate" not in run.given and LOW <= rate < _OF_LORA:
        why = f"no learning_rate is given, and TRL's {rate:g} is for training all weights: LoRA takes ten times that"
        yield trap("learning-rate", "learning_rate: 2.0e-4", severity=Severity.WARNING, why=why)
    judge_name = "reward_model_name_or_path"
    judge = run.text(judge_name)
    try:
        classes = () if judge is None else read_model_config(expanded(judge) / "config.json").architectures
    except (CheckpointError, OSError):
        return  # of the Hub, or transformers says what is wrong with it
    if classes and all(name.endswith(LANGUAGE_MODELS) for name in classes):
        hint = "reward_model_name_or_path: REWARD_MODEL (lora-tool merge --rm makes one of an adapter)"
        yield trap("reward-head", hint, where=run.where(judge_name), subject=judge_name, model=classes[0])
