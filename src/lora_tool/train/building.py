"""Building TRL's own trainer from TRL's own dataclasses, as `trl/scripts` do, for the methods without a script too."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lora_tool.errors import BadRunConfig, TrainingFailed
from lora_tool.train.methods import Method

REWARD_FUNCTIONS = (
    "accuracy_reward",
    "reasoning_accuracy_reward",
    "think_format_reward",
    "get_soft_overlong_punishment",
)
_PLAIN_NAME = re.compile(r"[\w.]+\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """TRL's parsed dataclasses."""

    script: Any
    training: Any
    model: Any
    mixture: Any


def resolve(method: Method, name: str) -> Any:
    """Return TRL's class `name` from the first of the method's homes that has it. Raises `TrainingFailed`."""
    for home in method.homes:
        try:
            return getattr(importlib.import_module(home), name)
        except (ImportError, AttributeError) as error:
            reason = error
    version = importlib.import_module("trl").__version__
    raise TrainingFailed(f"trl {version} has no {name} ({reason})", hint="pip install -U trl")


def parse(method: Method, options: Mapping[str, Any], arguments: Sequence[str]) -> Arguments:
    """Return TRL's dataclasses filled from the config file and the command line by TRL's own parser."""
    trl = importlib.import_module("trl")
    script = method.script or "trl.scripts.utils.ScriptArguments"
    module, _, name = script.rpartition(".")
    classes = (
        getattr(importlib.import_module(module), name),
        resolve(method, method.config),
        trl.ModelConfig,
        importlib.import_module("trl.scripts.utils").DatasetMixtureConfig,
    )
    parser = trl.TrlParser(classes, prog=f"lora-tool train {method.name}", allow_abbrev=False)
    parser.error = _refuse
    try:
        parser.set_defaults_with_config(**options)
        parsed = parser.parse_args_into_dataclasses(args=list(arguments))
    except (ValueError, TypeError) as error:
        raise BadRunConfig(f"TRL does not accept the options: {error}", hint=f"trl {method.name} --help") from error
    return Arguments(script=parsed[0], training=parsed[1], model=parsed[2], mixture=parsed[3])


def _refuse(message: str) -> NoReturn:
    raise BadRunConfig(f"TRL does not accept the options: {message}")


def load_data(arguments: Arguments) -> Mapping[str, Any]:
    """Return the splits that the arguments name. Raises `TrainingFailed` where there are none."""
    datasets = importlib.import_module("datasets")
    script, mixture = arguments.script, arguments.mixture
    try:
        splits: Mapping[str, Any] = (
            importlib.import_module("trl").get_dataset(mixture)
            if mixture.datasets
            else datasets.load_dataset(
                script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming
            )
        )
    except StopIteration as error:  # what datasets raises for a file without a line
        raise TrainingFailed(f"{script.dataset_name}: has no rows", hint="another dataset_name") from error
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())[:300]
        hint = "dataset_name: a Hub id, or a folder of .jsonl, .csv or .parquet files"
        raise TrainingFailed(f"the data cannot be loaded: {said}", hint=hint) from error
    return splits


def split(data: Mapping[str, Any], name: str, option: str) -> Any:
    """Return the split that `option` names. Raises `TrainingFailed` naming those that are there."""
    if name not in data:
        no_evaluation = ", or eval_strategy: no" if option == "dataset_test_split" else ""
        raise TrainingFailed(
            f"the data has no split {name!r}, it has: {', '.join(data)}",
            hint=f"{option}: {next(iter(data), 'NAME')}{no_evaluation}",
        )
    return data[name]


def peft_config(arguments: Arguments) -> Any:
    """Return the adapter's config; one plain module name stays a name, where TRL makes it a regular expression."""
    config = importlib.import_module("trl").get_peft_config(arguments.model)
    target = None if config is None else config.target_modules
    if isinstance(target, str) and target != "all-linear" and _PLAIN_NAME.match(target):
        config.target_modules = {target}
    return config


def build(
    method: Method,
    arguments: Arguments,
    *,
    train: Any,
    evaluation: Any,
    tokenizer: Any,
    callbacks: Sequence[Any],
) -> Any:
    """Return TRL's trainer for the method, with what its constructor takes of what we have."""
    trainer = resolve(method, method.trainer)
    taken = inspect.signature(trainer.__init__).parameters
    arguments.training.model_init_kwargs = _model_settings(arguments)
    offered: dict[str, Any] = {
        "model": arguments.model.model_name_or_path,
        "args": arguments.training,
        "train_dataset": train,
        "eval_dataset": evaluation,
        "processing_class": tokenizer,
        "peft_config": peft_config(arguments),
        "quantization_config": importlib.import_module("trl").get_quantization_config(arguments.model),
        "callbacks": list(callbacks),
    }
    if "reward_funcs" in taken:
        offered["reward_funcs"] = reward_functions(arguments.script)
    if offered["quantization_config"] is not None and "quantization_config" not in taken:
        arguments.training.model_init_kwargs["quantization_config"] = offered["quantization_config"]
    return trainer(**{name: value for name, value in offered.items() if name in taken})


def _model_settings(arguments: Arguments) -> dict[str, Any]:
    settings = {
        "revision": arguments.model.model_revision,
        "trust_remote_code": arguments.training.trust_remote_code,
        "attn_implementation": arguments.model.attn_implementation,
        "dtype": arguments.model.dtype,
    }
    return settings | (arguments.training.model_init_kwargs or {})


def reward_functions(script: Any) -> list[Any]:
    """Return the rewards that the arguments name: a reward model, TRL's own functions, or import paths.

    Raises `TrainingFailed` for a name that is neither.
    """
    found: list[Any] = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    found += [_trl_reward(name) if name in REWARD_FUNCTIONS else _imported(name) for name in script.reward_funcs or ()]
    if not found:
        raise TrainingFailed(
            "no reward: neither reward_funcs nor reward_model_name_or_path is given",
            hint="reward_funcs: [my_module.my_reward]",
        )
    return found


def _trl_reward(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module("trl.rewards"), name)
    # the one that is a maker of functions; the figures are those of TRL's script
    return function(max_completion_len=1280, soft_punish_cache=256) if name.startswith("get_") else function


def _imported(name: str) -> Callable[..., Any]:
    module, _, function = name.rpartition(".")
    if not module or "/" in name:
        raise TrainingFailed(
            f"reward_funcs: {name!r} is neither an import path nor one of: {', '.join(REWARD_FUNCTIONS)}",
            hint=f"reward_model_name_or_path: {name}" if "/" in name else "reward_funcs: [my_module.my_reward]",
        )
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise TrainingFailed(
            f"reward_funcs: {name}: {error}", hint="run it from the folder that holds the module"
        ) from error
    return found
