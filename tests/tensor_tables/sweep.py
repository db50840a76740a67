"""Asks the rules about untouched models of every type, under many configs: they must find nothing wrong with them.

    python -m tests.tensor_tables.sweep [MODEL_TYPE…]

Each class is built on the meta device under its tiny config and under changes of it: inner configs that are null, every
field by itself, switches with the sizes that they need, sizes that the table was not made with, other numbers of labels,
and several of these at once; then every class of every type by itself. Rules are asked with transformers and without. The check of the tables' generator;
it takes an hour, and no run of the tests collects it.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from msgspec.structs import replace
from transformers import PretrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import logging

from lora_tool.checkpoints import ModelDir, open_model
from lora_tool.core.report import Finding, Severity
from lora_tool.core.tensors import DType, Span, StoredTensor, TensorSpec
from lora_tool.formats.model_config import model_config_of
from lora_tool.models.mapping.class_tensors import class_tensors
from lora_tool.rules import judging  # noqa: F401 - which registers all rules
from lora_tool.rules.engine.registry import RULES
from lora_tool.rules.engine.subjects import ModelSubject
from tests.mutations import FIXTURES
from tests.oracle.tiny import AUTO, Task, buildable, tiny_config
from tests.tensor_tables.changes import all_of, companions, fields_of, longer, merged, others, source_of
from tests.tensor_tables.classes import other_classes, type_of
from tests.tensor_tables.models import NO_GENERATION

TASKS: tuple[Task, ...] = ("causal-lm", "seq-cls", "token-cls", "question-ans", "seq-2-seq-lm", "image-text-to-text")
_OF_TENSORS = ("LT307", "LT310", "LT317", "LT318", "LT319")
_LARGE = 1 << 22
_AT_ONCE = 30
_FEW = 8
_PAIRS = 160
_LABELS = (1, 2, 3, 12)
Tried = dict[str, frozenset[str]]
"""A change of a config → the names of the tensors that a model has under it."""


def changes_of(config: PretrainedConfig, lines: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield changes of one field each: to null, for a part; of a number also to those that the table was not made with."""
    for name, value in fields_of(config):
        if isinstance(value, PretrainedConfig):
            yield {name: None}
            yield from ({name: inner} for inner in changes_of(value, lines))
        elif type(value) is int and value:
            yield from ({name: other} for other in dict.fromkeys((value + 1, value * 2, value * 3, value // 2, 1, 0)))
        else:
            yield from ({name: other} for other in others(name, value, lines))


def variants(model_type: str, task: Task, tried: Tried, *, whole: bool) -> Iterator[dict[str, Any]]:
    """Yield the changes of the tiny config under which a class of the type is tried; not the `whole` list: a few.

    `tried` has the models that could be built of the changes so far. Switches that made another model are tried
    with every other one, or so many.
    """
    config = tiny_config(model_type, task)
    single = [*changes_of(config, source_of(type_of(model_type, task)))]
    needed = [*companions(config), *longer(config)]
    chance = random.Random(f"{model_type} {task}")
    yield {}
    yield from needed
    if whole:
        switches = [change for change in single if _is_switch(change, config)]
        yield from single
        apart = [*switches, *(merged(more, change) for more in needed for change in switches)]
        yield from apart[len(switches) :]
        structures = {tried[json.dumps(change)]: change for change in apart if json.dumps(change) in tried}
        telling = [change for names, change in structures.items() if names != tried[json.dumps({})]]
        pairs = [merged(one, two) for one in telling for two in switches if one != two]
        yield from chance.sample(pairs, min(len(pairs), _PAIRS))
    for at in range(_AT_ONCE if whole else _FEW):
        yield all_of(chance.sample([*single, *needed], min(len(single), 2 + at % 4)))
    yield from ({"num_labels": number} for number in (_LABELS if task in ("seq-cls", "token-cls") else ()))


def _is_switch(change: Mapping[str, Any], config: PretrainedConfig) -> bool:
    return all(
        _is_switch(value, getattr(config, name))
        if isinstance(value, dict)
        else value is None or isinstance(value, bool | str) or not vars(config).get(name)
        for name, value in change.items()
    )


def built(model_type: str, task: Task, change: Mapping[str, Any]) -> PreTrainedModel | None:
    """Return the model on the meta device; None of values that do not go together, and of one of full size: an inner
    config that is null may mean the class's default.
    """
    with contextlib.suppress(Exception):
        config = tiny_config(model_type, task, **change)
        if _layers(config) > 64:
            return None
        with torch.device("meta"), no_init_weights(), NO_GENERATION:
            model: PreTrainedModel = AUTO[task].from_config(config)
        sizes = [tensor.numel() for tensor in model.state_dict().values()]
        return model if all(sizes) and sum(sizes) < _LARGE else None
    return None


def _layers(config: PretrainedConfig) -> int:
    found = json.loads(config.to_json_string())
    every = [found, *(value for value in found.values() if isinstance(value, dict))]
    return max((v for each in every for n, v in each.items() if "layers" in n and type(v) is int), default=0)


def as_saved(model: PreTrainedModel) -> Mapping[str, tuple[int, ...]]:
    """Return the names and shapes of what `save_pretrained` writes."""
    left_out = model.all_tied_weights_keys.keys() | set(model._keys_to_ignore_on_save or ())
    held = {name: tensor for name, tensor in model.state_dict().items() if name not in left_out}
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, held).items()}


def subject_of(model: PreTrainedModel, like: ModelDir) -> ModelSubject:
    """Return the subject of the model's folder, whose files are those of `like`."""
    raw = {**json.loads(model.config.to_json_string()), "architectures": [type(model).__name__]}
    tensors = {
        name: StoredTensor(
            spec=TensorSpec(name=name, dtype=DType.F32, shape=shape),
            spans=(Span(path=like.root, offset=0, nbytes=4 * prod(shape)),),
        )
        for name, shape in as_saved(model).items()
    }
    saved = replace(
        like, config=model_config_of(raw, like.root / "config.json"), weights=replace(like.weights, tensors=tensors)
    )
    return ModelSubject(checkpoint=saved)


def findings(subject: ModelSubject) -> list[Finding]:
    """Return what the rules about tensors find wrong."""
    found = [each for code in _OF_TENSORS for each in RULES[code].findings(subject)]
    return [each for each in found if each.severity is not Severity.INFO]


def swept(model_type: str, task: Task, like: ModelDir, count: Counter[str], *, whole: bool) -> None:
    """Print what is found in the type's models; `count` has how many there were, and of how many anything was."""
    tried: Tried = {}
    for change in variants(model_type, task, tried, whole=whole):
        if (model := built(model_type, task, change)) is None:
            continue
        tried[json.dumps(change)] = frozenset(model.state_dict())
        judged(f"{task} {model_type} {change}", model, like, count)


def judged(what: str, model: PreTrainedModel, like: ModelDir, count: Counter[str]) -> None:
    """Print what is found in one model, with transformers and without."""
    count["models"] += 1
    subject = subject_of(model, like)
    light, known = findings(subject), subject.class_tensors is not None
    count["compared"] += known
    found = findings(replace(subject, ask=class_tensors)) if light or not known else []
    for way, its in (("without transformers", light), ("asking transformers", found)):
        if its:
            count[f"wrong, {way}"] += 1
            first = "; ".join(f"{each.code} {each.subject} {each.message[:90]}" for each in its[:2])
            print(what, way, len(its), first, flush=True)


def main(asked: Iterable[str]) -> int:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    like, asked = open_model(FIXTURES / "causal-llama/base"), set(asked)
    count: Counter[str] = Counter()
    done: set[str] = set()
    for task in TASKS:
        for model_type in (name for name in buildable(task) if not asked or name in asked):
            print(task, model_type, dict(count), file=sys.stderr, flush=True)
            try:
                swept(model_type, task, like, count, whole=model_type not in done)
                done.add(model_type)
            except Exception as error:  # noqa: BLE001 - a type that cannot be made tiny
                count["not built"] += 1
                print(task, model_type, "is left out:", repr(error)[:150], file=sys.stderr, flush=True)
    for model_type in (name for name in CONFIG_MAPPING_NAMES if not asked or name in asked):
        for model in other_classes(model_type, ()):
            with contextlib.suppress(AttributeError):  # what only others are made of
                judged(type(model).__name__, model, like, count)
    print(dict(count))
    return any(name.startswith("wrong") for name in count)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
