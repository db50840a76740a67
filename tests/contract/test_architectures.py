"""Every row of the table of directly stored architectures, against the transformers that is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D

from lora_tool.checkpoints import open_model
from lora_tool.core.tensors import DType
from lora_tool.models import ARCHITECTURES, Architecture, architecture_of, is_computed
from lora_tool.models.ends import is_input, is_output, output_name
from lora_tool.models.mapping.meta import DTYPES, default_dtype, facts_of, text_class
from lora_tool.models.mapping.weight_mapping import WeightMapping
from lora_tool.models.text_classes import TEXT_CLASSES, TextClass
from lora_tool.plans.base.known_names import KNOWN_NAMES
from lora_tool.plans.merge.model.reading import SWITCH, names_digest
from lora_tool.rules.engine.base_match import BaseMatch
from lora_tool.rules.model.lt3_model_ends import MORE_ROWS, embedding_rows
from lora_tool.rules.shared.base_match import is_decoder
from tests.oracle.tiny import AUTO, NUM_LABELS, Task, buildable, tiny_config, tiny_model

TASKS: tuple[Task, ...] = ("causal-lm", "seq-cls")
KNOWN = {task: frozenset(buildable(task)) for task in TASKS}
OPTIONS: dict[str, dict[str, Any]] = {"gpt2": {"add_cross_attention": True}}
"""What turns on every module of an architecture that another setting leaves out and the table speaks of."""


def class_name(row: Architecture, task: Task) -> str | None:
    return row.causal_lm if task == "causal-lm" else row.sequence_classification


@cache
def meta_model(row: Architecture, task: Task) -> PreTrainedModel:
    if row.model_type not in KNOWN[task]:
        pytest.skip(f"this transformers has no {row.model_type}")
    return tiny_model(row.model_type, task, device="meta", **OPTIONS.get(row.model_type, {}))


ROWS = list(ARCHITECTURES.values())
CLASSES = [
    pytest.param(row, task, id=f"{row.model_type}-{task}") for row in ROWS for task in TASKS if class_name(row, task)
]


@pytest.mark.parametrize("row", TEXT_CLASSES.values(), ids=lambda row: row.architecture.model_type)
def test_a_text_class_is_the_auto_classs_and_lies_where_the_row_says(row: TextClass, tmp_path: Path) -> None:
    model = tiny_model(row.architecture.model_type, "image-text-to-text")
    model.save_pretrained(tmp_path)
    base = open_model(tmp_path)
    modules = {name.rpartition(".")[0] for name in base.tensors if ".experts." not in name}
    assert {row.in_whole(module) for module in modules} <= {name for name, _ in model.named_modules()}
    class_name = text_class(base.whole_config)
    assert class_name is not None
    assert class_name == row.architecture.causal_lm
    assert (
        text_class(base.whole_config, "AutoModelForSequenceClassification") == row.architecture.sequence_classification
    )
    shapes = {name: tensor.shape for name, tensor in base.tensors.items()}
    mapping = WeightMapping(base.whole_config, class_name, shapes, DType.F32)
    match = BaseMatch(base=base, arch=row.architecture, strip=row.strip, add=row.add)
    alone = {name: made.sources[0] for name, made in mapping.parameters.items() if len(made.sources) == 1}
    assert {name: match.name(name) for name in alone} == alone
    theirs = {source for made in mapping.parameters.values() for source in made.sources}
    assert {name for name in base.tensors if row.holds(name)} == theirs


def test_the_table_is_sorted_and_keyed_by_model_type() -> None:
    assert list(ARCHITECTURES) == sorted(row.model_type for row in ROWS)
    assert architecture_of("llama") is ARCHITECTURES["llama"]
    assert architecture_of("mixtral") is None


@pytest.mark.parametrize(("row", "task"), CLASSES)
def test_a_row_says_what_transformers_does(row: Architecture, task: Task) -> None:
    model = meta_model(row, task)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert type(model).__name__ == class_name(row, task)
    assert model.config.model_type == row.model_type
    assert get_model_conversion_mapping(model, add_legacy=False) == []
    assert not fixed_later(model), "a sub-model chosen by the config may bring a conversion of its own"
    assert not tied_linears(model), "a delta on one of them would change the other"
    assert [name for name in shapes if is_computed(name)] == []
    require_conv1d(row, model)
    require_head(row, task, shapes)
    require_wide(row, task)


def require_conv1d(row: Architecture, model: PreTrainedModel) -> None:
    """The row names exactly the transposed modules."""
    names: dict[bool, set[str]] = {True: set(), False: set()}
    for path, module in model.named_modules():
        if isinstance(module, (Conv1D, nn.Linear)):
            names[isinstance(module, Conv1D)].add(path.rpartition(".")[2])
    assert names[True] == row.conv1d
    assert not names[False] & row.conv1d


def require_head(row: Architecture, task: Task, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """The head is where the row says, and is all that the two classes differ in."""
    if task == "causal-lm":
        assert set(row.causal_only) <= shapes.keys()
        return
    labels = {name for name, shape in shapes.items() if shape and shape[0] == NUM_LABELS}
    assert labels
    assert all(name.startswith(f"{row.head}.") for name in labels)
    if row.causal_lm:
        causal = {name: tuple(tensor.shape) for name, tensor in meta_model(row, "causal-lm").state_dict().items()}
        assert causal.keys() - shapes.keys() == set(row.causal_only)
        assert all(name.startswith(f"{row.head}.") for name in shapes.keys() - causal.keys())
        assert all(shapes[name] == shape for name, shape in causal.items() if name in shapes)


def require_wide(row: Architecture, task: Task) -> None:
    """It is loaded in its own type, but where the row says."""
    for dtype in (DType.F16, DType.BF16, DType.F32):
        with default_dtype(DTYPES[dtype]):
            single = dtype is DType.F32
            model = meta_model(row, task) if single else tiny_model(row.model_type, task, device="meta")
        assert bool(facts_of(model, DTYPES[dtype]).keep_in_fp32) == (dtype in row.wide_in)


def saved_names(row: Architecture, task: Task, **switches: bool) -> str | None:
    """Return the digest of what a model with these switches of its config saves, the output layer aside.

    None where other tensors than the output layer are tied: what an adapter or `--untie` makes of them, only
    transformers knows.
    """
    model = tiny_model(row.model_type, task, device="meta", **switches)
    if not model.all_tied_weights_keys.keys() <= {output_name(row)}:
        return None
    unsaved = {*(model._keys_to_ignore_on_save or ()), *row.causal_only}
    return names_digest(type(model).__name__, model.config.to_dict(), model.state_dict().keys() - unsaved)


WITH_OUTPUT: tuple[Task, ...] = ("causal-lm", "seq-2-seq-lm", "image-text-to-text")


def test_the_ends_of_every_class_are_known_by_their_names() -> None:
    """But for CTRL's `transformer.w`, and for output layers of BERT's kin and T5Gemma's, which `absent_modules` knows.

    Classes without an output layer have the embeddings of those with one, and are taken where there is none.
    """
    unknown, more_rows = set(), set()
    seen: set[str] = set()
    for task in (*WITH_OUTPUT, *(other for other in AUTO if other not in WITH_OUTPUT)):
        for model_type in buildable(task):
            if task not in WITH_OUTPUT and model_type in seen:
                continue
            with contextlib.suppress(Exception):  # a config that must be given more, a class without ends
                if "vocab_size" not in str(tiny_config(model_type, task).to_dict()):
                    continue
                model = tiny_model(model_type, task, device="meta")
                seen.add(model_type)
                held: Any = model.state_dict()
                rows = embedding_rows(held)
                if rows and getattr(model.config.get_text_config(), "vocab_size", None) not in {None, *rows.values()}:
                    more_rows.add(model_type)
                paths = {id(module): path for path, module in model.named_modules()}
                first, last = model.get_input_embeddings(), model.get_output_embeddings()
                if isinstance(first, nn.Embedding) and not is_input(paths[id(first)]):
                    unknown.add(paths[id(first)])
                if isinstance(last, nn.Linear) and not is_output(paths[id(last)]):
                    unknown.add(paths[id(last)])
    others = {path for path in unknown if not is_decoder(path)}
    assert others == {"transformer.w", "lm_head.out_proj"}
    assert more_rows == MORE_ROWS - {"csm_depth_decoder_model", "mllama_text_model", "moshi"}


def test_the_names_that_each_class_saves_are_known() -> None:
    classes = [(row, task) for row in ROWS for task in TASKS if class_name(row, task) and row.model_type in KNOWN[task]]
    found: list[str | None] = []
    for row, task in classes:
        found.append(saved_names(row, task))
        for name, value in tiny_config(row.model_type, task).to_dict().items():
            if type(value) is bool and SWITCH.search(name):
                with contextlib.suppress(StrictDataclassError, ValueError):  # a switch that the class forbids
                    found.append(saved_names(row, task, **{name: not value}))
    digests = {digest for digest in found if digest is not None}
    assert digests <= KNOWN_NAMES, sorted(digests - KNOWN_NAMES)
    if len(classes) == sum(class_name(row, task) is not None for row in ROWS for task in TASKS):
        assert digests == KNOWN_NAMES, sorted(KNOWN_NAMES - digests)


@pytest.mark.parametrize("model_type", ["gemma2", "gpt2", "llama", "opt", "phi3", "qwen2", "qwen3", "roberta"])
def test_a_saved_model_is_its_state_dict_and_loads_as_a_classifier(model_type: str, tmp_path: Path) -> None:
    row = ARCHITECTURES[model_type]
    model = tiny_model(model_type, "causal-lm")
    model.save_pretrained(tmp_path)
    memory, disk = model.state_dict(), load_file(tmp_path / "model.safetensors")
    assert disk.keys() == memory.keys() - model.all_tied_weights_keys.keys()
    assert all(torch.equal(tensor, memory[name]) for name, tensor in disk.items())
    loaded, info = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=NUM_LABELS, output_loading_info=True
    )
    assert type(loaded).__name__ == row.sequence_classification
    assert info["missing_keys"] == {name for name in loaded.state_dict() if name.startswith(f"{row.head}.")}
    assert info["unexpected_keys"] == disk.keys() & set(row.causal_only)
    assert not info["mismatched_keys"]


def fixed_later(model: PreTrainedModel) -> list[str]:
    specs = (model.config.sub_configs or {}).items()
    return [name for name, spec in specs if getattr(spec, "config_class", spec).__name__ == "AutoConfig"]


def tied_linears(model: PreTrainedModel) -> list[str]:
    """Linear modules of the trunk whose weight is another module's; the language-modelling head may be tied."""
    output = model.get_output_embeddings()
    modules = (path.rpartition(".")[0] for path in model.all_tied_weights_keys)
    found = {path: model.get_submodule(path) for path in modules}
    return [path for path, module in found.items() if isinstance(module, (nn.Linear, Conv1D)) and module is not output]
