"""The table of every class's tensors, against the classes of the transformers that is installed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace
from transformers.core_model_loading import revert_weight_conversion

from lora_tool.checkpoints import open_model
from lora_tool.core.tensors import DType, Span, StoredTensor, TensorSpec
from lora_tool.formats.model_config import read_model_config
from lora_tool.models.model_tensors import TABLE, ModelTensors, model_tensors
from lora_tool.rules.engine.registry import RULES
from lora_tool.rules.engine.subjects import ModelSubject
from lora_tool.rules.model import lt3_tensors  # noqa: F401 - which registers its rules
from tests.mutations import FIXTURES
from tests.oracle.tiny import AUTO, Task, buildable, tiny_config, tiny_model
from tests.tensor_tables.classes import apart

TASKS: tuple[Task, ...] = ("causal-lm", "seq-cls", "seq-2-seq-lm", "token-cls", "question-ans", "feature-extraction")
ROWS = {row["model_type"]: row for row in map(json.loads, TABLE.read_text().splitlines())}
CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"hidden_size": 64, "d_model": 64, "n_embd": 64, "head_dim": 16, "vocab_size": 50, "tie_word_embeddings": False},
    {"num_hidden_layers": 4, "n_layer": 4, "encoder_layers": 3, "decoder_layers": 1, "num_layers": 3},
    {"attention_bias": True, "mlp_bias": True, "bias": True, "use_bias": True, "qkv_bias": True, "use_qk_norm": True},
)


def models(model_type: str) -> Iterator[tuple[str, transformers.PreTrainedModel]]:
    """Yield the classes that the table has, the first under every change of the config, each other under one in turn."""
    names = {type_name(model_type, task): task for task in TASKS if model_type in buildable(task)}
    for at, name in enumerate(name for name in names if name in ROWS[model_type]["classes"]):
        task = names[name]
        plain = tiny_config(model_type, task)
        for change in CHANGES if at == 0 else (CHANGES[0], CHANGES[1 + at % 3]):
            known = {n: v for n, v in change.items() if n in vars(plain)}
            with contextlib.suppress(Exception):  # sizes that do not go together
                if known or not change:
                    config = tiny_config(model_type, task, **known)
                    with torch.device("meta"):
                        model = getattr(transformers, name)(config)
                    yield name, model


def type_name(model_type: str, task: Task) -> str:
    found = AUTO[task]._model_mapping._model_mapping[model_type]
    return str(found if isinstance(found, str) else found[0])


def compared(model: transformers.PreTrainedModel, folder: Path) -> tuple[ModelTensors | None, dict[str, Any]]:
    model.config.architectures = [type(model).__name__]
    model.config.to_json_file(folder / "config.json")
    saved = model.state_dict().keys() - model.all_tied_weights_keys.keys() - set(model._keys_to_ignore_on_save or ())
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if name in saved}
    return model_tensors(read_model_config(folder / "config.json"), shapes), shapes


@pytest.mark.parametrize("model_type", sorted(ROWS))
def test_a_class_has_the_tensors_that_the_table_gives_it(model_type: str, tmp_path: Path) -> None:
    wrong = []
    for name, model in models(model_type):
        found, shapes = compared(model, tmp_path)
        if found is None:
            wrong.append(f"{name}: not compared")
            continue
        others = {
            n: (shape, shapes[n])
            for n, shape in found.shapes.items()
            if len(shape) != len(shapes[n]) or any(a not in (None, b) for a, b in zip(shape, shapes[n], strict=True))
        }
        if found.missing or found.unexpected or found.of_other_classes or others:
            wrong.append(f"{name}: {found.missing} {found.unexpected} {found.of_other_classes} {others}")
    assert not wrong, "\n".join(wrong)[:3000]


def test_a_class_that_the_table_lacks_is_not_said_to_have_lost_what_others_have() -> None:
    wrong = {name: lacking for name, row in ROWS.items() if (lacking := apart(name, row["classes"]))}
    assert not wrong
    assert "BartForCausalLM" in ROWS["bart"]["apart"]


def outside_the_table() -> Iterator[transformers.PreTrainedModel]:
    for task in ("causal-lm", "seq-cls", "seq-2-seq-lm", "image-text-to-text"):
        for model_type in sorted(set(buildable(task)) - ROWS.keys()):
            with contextlib.suppress(Exception):  # a config that must be given more
                yield tiny_model(model_type, task, device="meta")


def test_nothing_is_found_in_a_good_model_outside_the_table(tmp_path: Path) -> None:
    wrong, seen = [], 0
    base = open_model(FIXTURES / "causal-llama/base")
    for model in outside_the_table():
        model.config.architectures = [type(model).__name__]
        model.config.to_json_file(tmp_path / "config.json")
        held = {n: t for n, t in model.state_dict().items() if n not in model.all_tied_weights_keys}
        tensors = {
            name: StoredTensor(
                spec=TensorSpec(name=name, dtype=DType.F32, shape=tuple(tensor.shape)),
                spans=(Span(path=tmp_path, offset=0, nbytes=4 * tensor.numel()),),
            )
            for name, tensor in revert_weight_conversion(model, held).items()
        }
        weights = replace(base.weights, tensors=tensors)
        subject = ModelSubject(
            checkpoint=replace(base, config=read_model_config(tmp_path / "config.json"), weights=weights)
        )
        assert subject.why_no_class or subject.class_tensors
        wrong += [
            f"{type(model).__name__}: {found}"
            for code in ("LT310", "LT317", "LT318")
            for found in RULES[code].run(subject)
        ]
        seen += 1
    assert not wrong, "\n".join(wrong)[:3000]
    assert seen > 50
