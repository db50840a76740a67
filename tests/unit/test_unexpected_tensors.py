"""Whether a base holds what its model has: told from names, without transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lora_tool.models import ARCHITECTURES
from lora_tool.plans.base.task import Task
from lora_tool.plans.merge.model.reading import as_stored, looks_plain, names_are_known
from tests.tiny_plans import EMBED, HIDDEN, NORM, OUTPUT, VOCABULARY, Array, lora, numbers
from tests.tiny_plans import save_adapter as adapter
from tests.tiny_plans import save_base as base

LLAMA = ARCHITECTURES["llama"]
LINEAR = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
NORMS = ("input_layernorm", "post_attention_layernorm")
Table = dict[str, Array]


def whole(layers: int = 2) -> Table:
    """Return every tensor that a llama with an output layer of its own has."""
    table = {EMBED: numbers(VOCABULARY, HIDDEN), NORM: numbers(HIDDEN), OUTPUT: numbers(VOCABULARY, HIDDEN, seed=1)}
    for layer in range(layers):
        table |= {f"model.layers.{layer}.{name}.weight": numbers(HIDDEN, HIDDEN, seed=layer) for name in LINEAR}
        table |= {f"model.layers.{layer}.{name}.weight": numbers(HIDDEN) for name in NORMS}
    return table


def in_every_layer(table: Table) -> None:
    table |= {f"model.layers.{layer}.self_attn.q_norm.weight": numbers(HIDDEN) for layer in range(2)}


def in_one_layer(table: Table) -> None:
    table["model.layers.1.self_attn.q_norm.weight"] = numbers(HIDDEN)


def value_head(table: Table) -> None:
    table["v_head.summary.weight"] = numbers(1, HIDDEN)


def layer_too_many(table: Table) -> None:
    table |= {name.replace(".1.", ".2."): array for name, array in table.items() if ".layers.1." in name}


def layer_left_out(table: Table) -> None:
    for name in [name for name in table if ".layers.0." in name]:
        del table[name]


def of_no_layer(table: Table) -> None:
    table |= {f"model.layers.{layer}.self_attn.seen": numbers(3) for layer in range(2)}


def without_the_last_norm(table: Table) -> None:
    del table[NORM]


def without_an_output_layer(table: Table) -> None:
    del table[OUTPUT]


@pytest.mark.parametrize("layers", [1, 2, 11])
def test_the_names_of_a_class_are_known_for_any_number_of_layers(layers: int, tmp_path: Path) -> None:
    model = base(tmp_path / "base", whole(layers), num_hidden_layers=layers)
    assert names_are_known(model, [], LLAMA, classifier=False)
    assert looks_plain(model, LLAMA, classifier=False)


@pytest.mark.parametrize(
    ("change", "plain"),
    [
        (in_every_layer, True),
        (without_the_last_norm, True),
        (without_an_output_layer, True),
        (in_one_layer, False),
        (value_head, False),
        (layer_too_many, False),
        (layer_left_out, False),
        (of_no_layer, False),
    ],
)
def test_one_name_more_or_less_is_not_known_even_where_it_looks_plain(
    change: Callable[[Table], None], plain: bool, tmp_path: Path
) -> None:
    table = whole()
    change(table)
    model = base(tmp_path / "base", table, num_hidden_layers=2, tie_word_embeddings=False)
    assert not names_are_known(model, [], LLAMA, classifier=False)
    assert looks_plain(model, LLAMA, classifier=False) == plain


@pytest.mark.parametrize(
    "config",
    [{"attention_bias": True}, {"architectures": []}, {"num_hidden_layers": 3}],
    ids=lambda each: next(iter(each)),
)
def test_names_are_those_of_the_config(config: dict[str, Any], tmp_path: Path) -> None:
    model = base(tmp_path / "base", whole(), **{"num_hidden_layers": 2, **config})
    assert not names_are_known(model, [], LLAMA, classifier=False)


def test_a_tied_output_layer_may_be_absent(tmp_path: Path) -> None:
    table = whole()
    del table[OUTPUT]
    assert names_are_known(base(tmp_path / "base", table, num_hidden_layers=2), [], LLAMA, classifier=False)


def test_the_head_of_a_classifier_is_in_the_base_or_in_an_adapter(tmp_path: Path) -> None:
    model = base(tmp_path / "base", whole(), num_hidden_layers=2)
    assert not names_are_known(model, [], LLAMA, classifier=True)
    q = lora("model.layers.0.self_attn.q_proj")
    head = adapter(tmp_path / "adapter", {**q, "score.weight": numbers(1, HIDDEN)}, modules_to_save=["score"])
    assert names_are_known(model, [head], LLAMA, classifier=True)


def test_old_buffers_are_left_out_and_told_of(tmp_path: Path) -> None:
    buffers = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": numbers(2) for layer in range(2)}
    model = base(tmp_path / "base", whole() | buffers, num_hidden_layers=2)
    assert names_are_known(model, [], LLAMA, classifier=False)
    view = as_stored(model, [], LLAMA, Task.CAUSAL_LM)
    assert view.base.tensors.keys() == whole().keys()
    assert {item.name: item.reason for item in view.leftovers} == dict.fromkeys(
        buffers, "a buffer that transformers computes and never loads"
    )
