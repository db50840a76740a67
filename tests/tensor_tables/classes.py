"""The classes of a model type: those in the table, and those that are built otherwise."""

from __future__ import annotations

import contextlib
import importlib
import json
import pkgutil
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from lora_tool.formats.model_config import model_config_of
from lora_tool.models import ARCHITECTURES
from lora_tool.models.model_tensors import model_tensors
from tests.oracle.tiny import AUTO, Task, buildable, tiny_config


def classes(model_type: str) -> Iterator[tuple[Task, str]]:
    """Yield the classes of a model type that auto classes load, those of the table of architectures first."""
    row = ARCHITECTURES[model_type]
    found: dict[str, Task] = {}
    tasks: tuple[Task, ...] = (
        "causal-lm",
        "seq-cls",
        "seq-2-seq-lm",
        "token-cls",
        "question-ans",
        "feature-extraction",
    )
    for task in tasks:
        with contextlib.suppress(Exception):
            if model_type in buildable(task):
                name = type_of(model_type, task)
                if task not in ("causal-lm", "seq-cls") or name in (row.causal_lm, row.sequence_classification):
                    found.setdefault(name, task)
    yield from ((task, name) for name, task in found.items())


def type_of(model_type: str, task: Task) -> str:
    found = AUTO[task]._model_mapping._model_mapping[model_type]
    return str(found if isinstance(found, str) else found[0])


def other_classes(model_type: str, known: Collection[str]) -> Iterator[PreTrainedModel]:
    """Yield the classes of a model type that are not `known`, each under its smallest config, without memory."""
    config_class = CONFIG_MAPPING[model_type]
    package = importlib.import_module(config_class.__module__.rpartition(".")[0])
    modules = [each.name for each in pkgutil.iter_modules(package.__path__) if each.name.startswith("modeling_")]
    for module in modules:
        for name, found in vars(importlib.import_module(f"{package.__name__}.{module}")).items():
            own = isinstance(found, type) and issubclass(found, PreTrainedModel)
            own = own and getattr(found, "config_class", None) is config_class
            if not own or name in known or not hasattr(transformers, name):
                continue
            model: PreTrainedModel | None = None
            with contextlib.suppress(Exception), torch.device("meta"):  # a class that only others build
                model = found(tiny_config(model_type, "feature-extraction"))
            if model is not None:
                yield model


def lacks_what_all_have(model: PreTrainedModel) -> bool:
    """Return whether a class outside the table lacks a tensor that all classes in it have, or has it in another shape."""
    raw = {**json.loads(model.config.to_json_string()), "architectures": [type(model).__name__]}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = model_tensors(model_config_of(raw, Path()), shapes)
    said = found.shapes.items() if found else ()
    others = [
        n
        for n, s in said
        if len(s) != len(shapes[n]) or any(a not in (None, b) for a, b in zip(s, shapes[n], strict=True))
    ]
    return bool(others or (found and found.missing))


def apart(model_type: str, known: Collection[str]) -> list[str]:
    """Return the classes outside the table that are not built like those in it: a decoder or an encoder alone."""
    return sorted(type(model).__name__ for model in other_classes(model_type, known) if lacks_what_all_have(model))
