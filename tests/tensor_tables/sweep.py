"""Saves tiny models of every type with transformers, and asks `validate` for errors in them: there must be none.

    python -m tests.tensor_tables.sweep [MODEL_TYPE…]

Each type is built under its tiny config and under chance changes of it: inner configs that are null, ends that are tied
or not, other sizes, switches. The check of the tables' generator; it takes minutes, and no run of the tests collects it.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from lora_tool import validate
from lora_tool.core.report import Finding, Severity
from tests.oracle.tiny import Task, buildable, tiny_config, tiny_model
from tests.tensor_tables.changes import all_of, fields_of, longer, overrides, source_of
from tests.tensor_tables.classes import type_of

TASKS: tuple[Task, ...] = ("causal-lm", "seq-cls", "image-text-to-text")
_OF_TENSORS = ("LT310", "LT317", "LT318", "LT319")
_TRIES = 12
_LARGE = 8 << 20


def variations(model_type: str, task: Task, count: int = 3) -> list[tuple[Mapping[str, Any], PreTrainedModel]]:
    """Return the tiny model, and `count` more under chance changes, each with them."""
    chance = random.Random(f"{model_type} {task}")
    found: list[tuple[Mapping[str, Any], PreTrainedModel]] = [({}, tiny_model(model_type, task))]
    config = tiny_config(model_type, task)
    every = [*longer(config), *overrides(config, source_of(type_of(model_type, task)))]
    every = [change for change in every if _is_usable(change)]
    nulls = [{name: None} for name, value in fields_of(config) if isinstance(value, PretrainedConfig)]
    ties = {"tie_word_embeddings": not getattr(config, "tie_word_embeddings", True)}
    for at in range(count):
        for _ in range(_TRIES):
            drawn = chance.sample(every, min(len(every), 1 + at))
            change = all_of([*drawn, *chance.sample(nulls, min(len(nulls), at % 2)), *[ties] * (at == 1)])
            with contextlib.suppress(Exception):  # values that do not go together
                if _is_large(tiny_model(model_type, task, device="meta", **change)):
                    continue
                found.append((change, tiny_model(model_type, task, **change)))
                break
    return found


def _is_large(model: PreTrainedModel) -> bool:
    """Return whether it is a whole model: an inner config that is null may mean the class's default."""
    return bool(sum(tensor.numel() for tensor in model.state_dict().values()) > _LARGE)


def _is_usable(change: Mapping[str, Any]) -> bool:
    """Return whether a model of such a config has all its parts: none of its sizes is 0."""
    return all(
        _is_usable(value)
        if isinstance(value, dict)
        else not (type(value) is int and value == 0) and "vocab_size" not in name
        for name, value in change.items()
    )


def findings(model: PreTrainedModel) -> tuple[Sequence[Finding], bool]:
    """Return the errors of the model as it is saved, with what is said of its tensors; and whether nothing was skipped."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        report = validate(Path(folder))
    found = [each for each in report.findings if each.severity is Severity.ERROR or _says_warning(each)]
    return found, not any(each.code in _OF_TENSORS for each in report.skipped)


def _says_warning(finding: Finding) -> bool:
    return finding.code in _OF_TENSORS and finding.severity is Severity.WARNING


def main(asked: Sequence[str]) -> int:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    count: Counter[str] = Counter()
    for task in TASKS:
        for model_type in (name for name in buildable(task) if not asked or name in asked):
            print(task, model_type, file=sys.stderr, flush=True)
            try:
                for change, model in variations(model_type, task):
                    found, whole = findings(model)
                    count.update({"models": 1, "compared": whole, "wrong": bool(found)})
                    for each in found[:4]:
                        print(task, model_type, change, each.code, each.subject, each.message, flush=True)
            except Exception as error:  # noqa: BLE001 - a type that cannot be made tiny
                count["not built"] += 1
                print(task, model_type, "is left out:", repr(error)[:150], file=sys.stderr, flush=True)
    print(dict(count))
    return bool(count["wrong"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
