"""The one view of an adapter: what each of its tensors is, from names and headers, whatever is wrong with them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lora_tool.adapters.view import AdapterView, LoraLayer, view_of
from lora_tool.checkpoints import AdapterDir, open_checkpoint, open_model
from lora_tool.core.keys import Part
from lora_tool.core.tensors import DType, TensorSpec, TensorTable
from lora_tool.formats.safetensors import build_header
from lora_tool.models.ends import HEADS, NEW_MODULES, head_of, is_last_layer
from lora_tool.plans.adapter.combine import adapter_modules

FIXTURES = Path(__file__).parents[2] / "fixtures"
P = "base_model.model."
Q = "model.layers.0.self_attn.q_proj"
EMBED = "model.embed_tokens"
Shapes = Mapping[str, tuple[int, ...]]
PAIR: Shapes = {f"{P}{Q}.lora_A.weight": (4, 16), f"{P}{Q}.lora_B.weight": (8, 4)}
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def written(path: Path, shapes: Shapes, fill: bytes = b"\0") -> None:
    specs = [TensorSpec(name=name, dtype=DType.F32, shape=shape) for name, shape in shapes.items()]
    path.write_bytes(build_header(specs, {}) + fill * sum(spec.nbytes for spec in specs))


def viewed(root: Path, shapes: Shapes, config: Mapping[str, Any] | None = None) -> AdapterView:
    written(root / "adapter_model.safetensors", shapes)
    (root / "adapter_config.json").write_text(json.dumps({**CONFIG, **(config or {})}))
    return opened(root)


def opened(root: Path) -> AdapterView:
    adapter = open_checkpoint(root)
    assert isinstance(adapter, AdapterDir)
    return view_of(adapter)


def accounted(view: AdapterView) -> list[str]:
    """Return the name of every tensor that the view gives a place, once for each place."""
    lora = [tensor for layer in view.layers for tensor in layer.parts.values()]
    whole = [*view.saved.values(), *view.frozen.values(), *(tokens.rows for tokens in view.tokens.values())]
    originals = [item.tensor for item in view.parts(Part.ORIGINAL_MODULE)]
    return sorted([*(tensor.name for tensor in (*lora, *whole, *originals)), *view.repeats])


LAYERS: Shapes = {
    f"{P}model.layers.{layer}.mlp.{name}.{part}.weight": shape
    for layer in range(12)
    for name in ("up_proj", "down_proj")
    for part, shape in (("lora_A", (4, 16)), ("lora_B", (9 if (layer, name) == (7, "up_proj") else 8, 4)))
}
"""One of the layers has another shape than those that are called like it."""


def test_layers_that_differ_in_their_numbers_alone_are_of_one_kind(tmp_path: Path) -> None:
    view = viewed(tmp_path, LAYERS, {"target_modules": ["up_proj", "down_proj"]})
    assert [layer.module.split(".", 2)[2] for layer in sorted(view.kinds, key=lambda layer: layer.kind)] == [
        "0.mlp.up_proj",
        "0.mlp.down_proj",
        "7.mlp.up_proj",
    ]
    assert {layer.kind for layer in view.layers if layer.target.endswith("down_proj")} == {1}
    asked: list[str] = []

    def look(layer: LoraLayer) -> list[str]:
        asked.append(layer.target)
        return [layer.target] if layer.pair and layer.pair[1].shape[0] == 9 else []

    assert list(view.found(look)) == ["model.layers.7.mlp.up_proj"]
    assert len(asked) == 4


@pytest.mark.parametrize(
    "config",
    [
        {"rank_pattern": {"layers.3.mlp.up_proj": 8}},
        {"target_modules": r".*\.\d\.mlp\.up_proj"},
        {"layers_to_transform": [0, 1]},
        {"exclude_modules": ["layers.2.mlp.up_proj"]},
    ],
)
def test_layers_are_looked_at_one_by_one_where_the_config_knows_their_numbers(
    config: Mapping[str, Any], tmp_path: Path
) -> None:
    view = viewed(tmp_path, LAYERS, {"target_modules": ["up_proj", "down_proj"], **config})
    assert len(view.kinds) == len(view.layers) == 24


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("causal-llama/adapter", {(4, 4.0), (4, 8.0), (2, 8 / math.sqrt(2))}),
        ("reward-qwen2/adapter", {(4, 2.0)}),
        ("reward-run/checkpoint-4", {(4, 2.0)}),
    ],
)
def test_every_tensor_of_a_real_adapter_has_one_place(name: str, expected: set[tuple[int, float]]) -> None:
    view = opened(FIXTURES / name)
    assert accounted(view) == sorted(view.adapter.tensors)
    for layer in view.layers:
        assert layer.pair is not None
        assert layer.strays == ()
        assert layer.target == layer.module
    assert {(layer.rank, layer.scaling) for layer in view.layers} == expected


EVERYTHING: Shapes = {
    **PAIR,
    f"{P}{Q}.lora_B.bias": (8,),
    f"{P}{Q}.lora_magnitude_vector": (8,),
    f"{P}{EMBED}.lora_embedding_A": (4, 50),
    f"{P}{EMBED}.lora_embedding_B": (16, 4),
    f"{P}{EMBED}.lora_magnitude_vector": (16,),
    f"{P}{EMBED}.lora_magnitude_vector.weight": (16,),
    f"{P}{EMBED}.base_layer.weight": (50, 16),
    f"{P}lm_head.token_adapter.trainable_tokens_delta": (2, 16),
    f"{P}lm_head.token_adapter.base_layer.weight": (50, 16),
    f"{P}score.weight": (1, 16),
    f"{P}score.modules_to_save.weight": (1, 16),
    f"{P}score.original_module.weight": (1, 16),
    f"{P}model.layers.0.mlp.experts.base_layer.lora_A.weight": (8, 16),
    f"{P}model.layers.0.mlp.experts.base_layer.lora_B.weight": (16, 8),
    f"{P}{Q}.base_layer.bias": (8,),
}


def test_each_part_is_told_from_the_others(tmp_path: Path) -> None:
    view = viewed(
        tmp_path, EVERYTHING, {"bias": "lora_only", "alpha_pattern": {"experts": 4}, "trainable_token_indices": [3, 7]}
    )
    assert accounted(view) == sorted(EVERYTHING)
    linear, embedding, experts = view.layers
    assert (linear.module, linear.rank, linear.scaling, linear.embedding) == (Q, 4, 2.0, False)
    assert linear.bias is not None
    assert linear.magnitude is not None
    assert linear.zero_initialised is linear.b
    assert (embedding.target, embedding.embedding, embedding.rank) == (EMBED, True, 4)
    assert embedding.zero_initialised is embedding.a
    assert (experts.module, experts.target) == ("model.layers.0.mlp.experts.base_layer", "model.layers.0.mlp.experts")
    assert experts.scaling == 1.0  # the pattern names the module as the base knows it
    assert view.saved.keys() == {"score.weight", f"{Q}.bias"}  # `bias` says that it was trained
    assert view.saved["score.weight"].name == f"{P}score.weight"
    assert view.frozen.keys() == {f"{EMBED}.weight", "lm_head.weight"}
    assert view.tokens["lm_head"].indices == (3, 7)
    assert {name: first.name for name, first in view.repeats.items()} == {
        f"{P}{EMBED}.lora_magnitude_vector.weight": f"{P}{EMBED}.lora_magnitude_vector",
        f"{P}score.modules_to_save.weight": f"{P}score.weight",
    }
    view = viewed(tmp_path, EVERYTHING, {"trainable_token_indices": [3, 7]})  # without `bias` it was not trained
    assert f"{Q}.bias" in view.frozen
    assert f"{Q}.bias" not in view.saved


BROKEN: dict[str, tuple[Shapes, tuple[Any, ...]]] = {
    "half a pair": ({f"{P}{Q}.lora_A.weight": (4, 16)}, (None, 1, ())),
    "a magnitude alone": ({f"{P}{Q}.lora_magnitude_vector": (8,)}, (None, 0, ())),
    "empty": ({f"{P}{Q}.lora_A.weight": (0,), f"{P}{Q}.lora_B.weight": (8, 4)}, (None, 2, ())),
    "ranks apart": ({f"{P}{Q}.lora_A.weight": (4, 16), f"{P}{Q}.lora_B.weight": (8, 5)}, (None, 2, ())),
    "a scalar": ({f"{P}{Q}.lora_A.weight": (), f"{P}{Q}.lora_B.weight": (8, 4)}, (None, 2, ())),
    "a stray bias": ({**PAIR, f"{P}{Q}.lora_A.bias": (4,)}, (4, 2, (f"{P}{Q}.lora_A.bias",))),
    "an embedding's B": (
        {f"{P}{Q}.lora_A.weight": (4, 16), f"{P}{Q}.lora_embedding_B": (8, 4)},
        (4, 2, (f"{P}{Q}.lora_A.weight",)),
    ),
    "grouped kernels": ({f"{P}{Q}.lora_A.weight": (8, 4, 3), f"{P}{Q}.lora_B.weight": (16, 4, 1)}, (8, 2, ())),
}


@pytest.mark.parametrize(("shapes", "expected"), BROKEN.values(), ids=BROKEN)
def test_a_broken_layer_is_described(shapes: Shapes, expected: tuple[Any, ...], tmp_path: Path) -> None:
    (layer,) = viewed(tmp_path, shapes).layers
    found = (layer.rank, len(layer.factors), tuple(tensor.name for tensor in layer.strays))
    assert found[:2] == expected[:2]
    assert len(found[2]) == len(expected[2])
    assert layer.any_tensor.name in shapes


def test_two_adapters_in_a_file_are_two_layers(tmp_path: Path) -> None:
    names = [f"{P}{Q}.lora_{part}.{name}.weight" for name in ("one", "two") for part in "AB"]
    view = viewed(tmp_path, dict.fromkeys(names, (4, 4)))
    assert [layer.adapter_name for layer in view.layers] == ["one", "two"]
    assert accounted(view) == sorted(names)


def test_without_a_config_scalings_are_not_known(tmp_path: Path) -> None:
    written(tmp_path / "adapter_model.safetensors", PAIR)
    (tmp_path / "adapter_config.json").write_text("{")
    (layer,) = opened(tmp_path).layers
    assert layer.scaling is None


def tensors_of(path: Path, shapes: Shapes, fill: bytes) -> TensorTable:
    written(path / "model.safetensors", shapes, fill)
    (path / "config.json").write_text('{"model_type": "llama"}')
    return open_model(path).tensors


def test_a_plan_drops_what_the_base_has_and_repeats(tmp_path: Path) -> None:
    carried = {f"{P}model.norm.weight": (16,), f"{P}model.extra.weight": (16,)}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    view = viewed(tmp_path / "a", {**EVERYTHING, **carried}, {"bias": "lora_only", "trainable_token_indices": [3, 7]})
    base = tensors_of(tmp_path / "b", {"model.norm.weight": (16,), "model.extra.weight": (16,)}, b"\0")
    modules = adapter_modules(view, base=base, ends=frozenset({"model.extra.weight"}))
    assert modules.dropped.keys() == {
        f"{P}model.norm.weight",  # the base's own; an end may have been resized, so it is taken
        f"{P}score.original_module.weight",
        *view.repeats,
    }
    assert modules.saved.keys() == {"score.weight", f"{Q}.bias", "model.extra.weight"}
    assert modules.embeddings == {EMBED}
    assert modules.magnitudes.keys() == {Q, EMBED}
    (term,) = modules.lora[Q]
    assert (term.rank, term.scaling) == (4, 2.0)
    other = tensors_of(tmp_path / "b", {"model.norm.weight": (16,)}, b"\1")
    assert "model.norm.weight" in adapter_modules(view, base=other).saved


@pytest.mark.parametrize(
    ("path", "head"),
    [
        ("score", "score"),
        ("classifier.out_proj", "classifier"),
        ("text_model.classifier", "classifier"),
        ("encoder.block.1.layer.1.mlp.router.classifier", None),
        ("model.layers.0.mlp.up_proj", None),
        ("model.scores", None),
    ],
)
def test_a_head_is_known_by_a_component_outside_the_layers(path: str, head: str | None) -> None:
    assert head_of(path) == head


def test_the_sets_of_heads_fit_together() -> None:
    assert is_last_layer("score")
    assert is_last_layer("classifier.out_proj")
    assert not is_last_layer("classifier.dense")
    assert HEADS < NEW_MODULES
    assert head_of("perceiver.decoder.decoder.final_layer", NEW_MODULES) == "final_layer"
