"""A base whose names on disk are not those in memory: the mapping that transformers would give is written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from msgspec.structs import replace

from lora_tool.checkpoints import ModelDir
from lora_tool.core.errors import FindingsFound, IncompatibleBase, OnlyInMemory, UnsupportedAdapter
from lora_tool.models import ARCHITECTURES
from lora_tool.models.mapping.model import LABELS, ModelFacts, RowMapping, RowSlice
from lora_tool.plans.adapter.combine import AdapterModules
from lora_tool.plans.base.task import Task
from lora_tool.plans.core.ops import Copy, LoraDelta, Precision
from lora_tool.plans.merge.draft import Model, ParameterConversion
from lora_tool.plans.merge.fused.parts import parts_of_fused, steps_on_disk
from lora_tool.plans.merge.model.converted import complete, converted
from lora_tool.plans.merge.passes.steps import added_steps, base_steps
from lora_tool.rules.judging import MergeJudge
from tests.tiny_plans import HIDDEN, VOCABULARY, Array, drafted, facts, lora, numbers
from tests.tiny_plans import save_adapter as adapter
from tests.tiny_plans import save_base as base

if TYPE_CHECKING:
    from lora_tool.models.mapping.weight_mapping import WeightMapping

EMBED, MLP, STACK = "model.embed.weight", "model.mlp.gate_up", "model.experts.up"
GATE, UP = "old.mlp.gate.weight", "old.mlp.up.weight"
FUSED: Mapping[str, tuple[tuple[str, int], ...]] = {
    f"{MLP}.weight": ((GATE, 3), (UP, 5)),
    EMBED: (("old.wte", VOCABULARY),),
}
"""Parameter in memory → the tensors on disk that it is made of, with their rows."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """What `WeightMapping` answers, for parameters that are whole tensors one below the other."""

    facts: ModelFacts
    made: Mapping[str, tuple[tuple[str, int], ...]]
    transposed: frozenset[str] = frozenset()
    unexpected: tuple[str, ...] = ()
    tied_by_config: Mapping[str, str] = field(default_factory=dict)
    as_in_memory: bool = True
    outside: frozenset[str] = frozenset()

    @property
    def parameters(self) -> dict[str, RowMapping]:
        def pieces(name: str) -> tuple[RowSlice, ...] | None:
            slices = tuple(RowSlice(name=source, start=0, rows=rows) for source, rows in self.made[name])
            return None if name in self.transposed else slices

        return {
            name: RowMapping(
                shape=self.facts.shapes[name],
                pieces=pieces(name),
                sources=tuple(source for source, _ in made),
                transposed=name in self.transposed,
            )
            for name, made in self.made.items()
        }

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(name for name in self.facts.shapes if name not in self.made)

    def place(self, disk_name: str) -> str:
        return next((name for name, made in self.made.items() if disk_name in dict(made)), disk_name)

    def piece_names(self, parameter: str) -> frozenset[str]:
        return frozenset(source for source, _ in self.made[parameter])

    def is_written_as_in_memory(self, parameter: str) -> bool:
        return self.as_in_memory or parameter not in self.transposed

    def written(self, memory: Mapping[str, tuple[int, ...]]) -> dict[str, RowMapping]:
        found: dict[str, RowMapping] = {}
        for name, shape in memory.items():
            start = 0
            for source, rows in self.made.get(name, ((name, shape[0]),)):
                part = (RowSlice(name=name, start=start, rows=rows),)
                found[source] = RowMapping(shape=(rows, *shape[1:][-1:]), pieces=part, sources=(name,))
                start += rows
        return found


def model(folder: Path, **more: Array) -> ModelDir:
    disk = {"old.wte": numbers(VOCABULARY, HIDDEN), GATE: numbers(3, HIDDEN), UP: numbers(5, HIDDEN), **more}
    return base(folder / "base", disk, model_type="tiny", architectures=["TinyForCausalLM"], tie_word_embeddings=False)


SHAPES = {EMBED: (VOCABULARY, HIDDEN), f"{MLP}.weight": (8, HIDDEN)}


def conversion_of(found: Model) -> ParameterConversion:
    assert found.conversion is not None
    return found.conversion


def view(
    on_disk: ModelDir, factors: dict[str, Array], mapping: Written | None = None, **config: Any
) -> tuple[Model, AdapterModules]:
    """Return the converted base, and what its adapter does to parameters in memory."""
    mapping = mapping or Written(facts=facts(SHAPES, output=None), made=FUSED)
    saved = adapter(on_disk.root.parent / "adapter", factors, **config)
    told = cast("WeightMapping", mapping)
    found = converted(on_disk, [saved], told, ARCHITECTURES["llama"], Task.CAUSAL_LM)
    merge = drafted(found)
    return found, parts_of_fused(found, conversion_of(found), merge.modules, Precision.FLOAT32)[0]


def test_a_fused_parameter_is_the_bytes_of_its_parts(tmp_path: Path) -> None:
    found, _ = view(model(tmp_path), lora(MLP, rows=8))
    assert found.base.tensors.keys() == SHAPES.keys()
    fused = found.base.tensors[f"{MLP}.weight"]
    assert fused.shape == (8, HIDDEN)
    assert (
        sum(span.nbytes for span in fused.spans)
        == conversion_of(found).disk[GATE].nbytes + conversion_of(found).disk[UP].nbytes
    )


def test_a_delta_on_it_is_a_delta_on_the_rows_of_each(tmp_path: Path) -> None:
    found, _ = view(model(tmp_path), lora(MLP, rows=8))
    merge = drafted(found)
    steps = {
        step.out.name: step
        for step in steps_on_disk(found, conversion_of(found), (*base_steps(merge), *added_steps(merge)), {})
    }
    assert list(steps) == ["old.wte", GATE, UP]  # in the base's order, under its names
    assert isinstance(steps["old.wte"].op, Copy)
    for name, first in ((GATE, 0), (UP, 3)):
        op = steps[name].op
        assert isinstance(op, LoraDelta)
        assert (op.source, op.terms[0].first) == (conversion_of(found).disk[name], first)


def test_what_the_class_has_no_place_for_is_left_out_and_told_of(tmp_path: Path) -> None:
    mapping = Written(facts=facts(SHAPES, output=None), made=FUSED, unexpected=("v_head.weight",))
    found, _ = view(model(tmp_path, **{"v_head.weight": numbers(1, HIDDEN)}), lora(MLP, rows=8), mapping)
    assert [(item.name, item.reason) for item in found.leftovers] == [
        ("v_head.weight", "TinyForCausalLM has no place for it, and transformers leaves it out too")
    ]


def test_what_the_class_computes_is_not_written(tmp_path: Path) -> None:
    made = {**FUSED, "model.positions.weight": (("old.pos", 2),)}
    shapes = {**SHAPES, "model.positions.weight": (2, HIDDEN)}
    mapping = Written(facts=facts(shapes, output=None, unsaved=frozenset({"model.positions.weight"})), made=made)
    found, _ = view(model(tmp_path, **{"old.pos": numbers(2, HIDDEN)}), lora(MLP, rows=8), mapping)
    assert "model.positions.weight" not in found.base.tensors
    assert "computes model.positions.weight, and does not save it" in found.leftovers[0].reason


@pytest.mark.parametrize(("name", "size"), [("model.norm.weight", HIDDEN), ("score.weight", LABELS)])
def test_a_parameter_that_nobody_has_is_a_finding(name: str, size: int, tmp_path: Path) -> None:
    shapes = {**SHAPES, name: (size, HIDDEN)[: 2 if size == LABELS else 1]}
    found, _ = view(model(tmp_path), lora(MLP, rows=8), Written(facts=facts(shapes, output=None), made=FUSED))
    with pytest.raises(FindingsFound, match=f"LT515 .*has no `{name}`, which a TinyForCausalLM needs") as caught:
        MergeJudge().in_memory(found.adapters, complete(found, conversion_of(found)))
    assert ("modules_to_save" in (caught.value.hint or "")) == (size == LABELS)


def test_parts_of_different_types_make_no_parameter(tmp_path: Path) -> None:
    half = numbers(5, HIDDEN).astype("float16")
    with pytest.raises(IncompatibleBase, match="made of tensors with different dtypes, F16, F32"):
        view(model(tmp_path, **{UP: half}), lora(MLP, rows=8))


@pytest.mark.parametrize("as_in_memory", [True, False])
def test_a_transposed_weight_is_read_turned_or_only_in_memory(as_in_memory: bool, tmp_path: Path) -> None:
    made = {**FUSED, "model.proj.weight": (("old.proj", HIDDEN),)}
    mapping = Written(
        facts=facts({**SHAPES, "model.proj.weight": (5, HIDDEN)}, output=None),
        made=made,
        transposed=frozenset({"model.proj.weight"}),
        as_in_memory=as_in_memory,
    )
    on_disk = model(tmp_path, **{"old.proj": numbers(HIDDEN, 5)})
    if not as_in_memory:
        with pytest.raises(OnlyInMemory, match="transformers writes it back transposed"):
            view(on_disk, lora("model.proj", rows=5), mapping)
        return
    found, _ = view(on_disk, lora("model.proj", rows=5), mapping)
    tensor = found.base.tensors["model.proj.weight"]
    assert (tensor.shape, tensor.is_transposed) == ((5, HIDDEN), True)


def test_lora_on_one_layer_in_several_places_is_refused(tmp_path: Path) -> None:
    mapping = Written(facts=facts(SHAPES, output=None, tied={"model.other.weight": f"{MLP}.weight"}), made=FUSED)
    with pytest.raises(UnsupportedAdapter, match="is one layer in several places of TinyForCausalLM"):
        view(model(tmp_path), lora(MLP, rows=8), mapping)


EXPERTS = [f"old.experts.{number}.up" for number in range(2)]


def experts(folder: Path, factors: dict[str, Array], **config: Any) -> tuple[Model, AdapterModules]:
    """Return the view of a base with two experts, which are one stack in memory."""
    shapes = {**SHAPES, STACK: (2, 3, HIDDEN)}
    stack = tuple((f"{expert}.weight", 3) for expert in EXPERTS)
    weights = {f"{expert}.weight": numbers(3, HIDDEN, seed=at) for at, expert in enumerate(EXPERTS)}
    mapping = Written(facts=facts(shapes, output=None), made={**FUSED, STACK: stack})
    return view(model(folder, **weights), factors, mapping, **config)


def test_lora_on_single_experts_is_a_delta_on_the_tensors_on_disk_alone(tmp_path: Path) -> None:
    found, modules = experts(tmp_path, {**lora(EXPERTS[0], rows=3), **lora(EXPERTS[1], rows=3)})
    assert modules.lora == {}
    merge = drafted(found)
    _, per_expert = parts_of_fused(found, conversion_of(found), merge.modules, Precision.FLOAT32)
    steps = {
        step.out.name: step for step in steps_on_disk(found, conversion_of(found), tuple(base_steps(merge)), per_expert)
    }
    for expert in EXPERTS:
        op = steps[f"{expert}.weight"].op
        assert isinstance(op, LoraDelta)
        assert (op.source, op.rounded) == (conversion_of(found).disk[f"{expert}.weight"], True)


def test_experts_without_lora_are_named_and_keep_their_bytes(tmp_path: Path) -> None:
    found, _ = experts(tmp_path, lora(EXPERTS[0], rows=3), target_modules=["up"])
    with pytest.raises(FindingsFound, match=rf"LT505 .*`{EXPERTS[1]}`: `target_modules` names it"):
        MergeJudge().in_memory(found.adapters, complete(found, conversion_of(found)))
    merge = drafted(found)
    _, per_expert = parts_of_fused(found, conversion_of(found), merge.modules, Precision.FLOAT32)
    steps = {
        step.out.name: step.op
        for step in steps_on_disk(found, conversion_of(found), tuple(base_steps(merge)), per_expert)
    }
    assert isinstance(steps[f"{EXPERTS[0]}.weight"], LoraDelta)
    assert isinstance(steps[f"{EXPERTS[1]}.weight"], Copy)
    with pytest.raises(UnsupportedAdapter, match="1 of the 2 tensors that make .* have no LoRA"):
        parts_of_fused(found, replace(conversion_of(found), same_names=True), merge.modules, Precision.PEFT)
