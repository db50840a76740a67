"""A base whose names on disk are not those in memory: the mapping that transformers would give is written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
from msgspec.structs import replace

from lora_tool.checkpoints import ModelDir
from lora_tool.core.errors import FindingsFound, IncompatibleBase, UnsupportedAdapter
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
    unexpected: tuple[str, ...] = ()
    tied_by_config: Mapping[str, str] = field(default_factory=dict)
    outside: frozenset[str] = frozenset()

    @property
    def parameters(self) -> dict[str, RowMapping]:
        return {
            name: RowMapping(
                shape=self.facts.shapes[name],
                pieces=tuple(RowSlice(name=source, start=0, rows=rows) for source, rows in made),
                sources=tuple(source for source, _ in made),
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
        return parameter in self.made

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


def test_a_head_that_nobody_has_is_a_finding(tmp_path: Path) -> None:
    shapes = {**SHAPES, "score.weight": (LABELS, HIDDEN)}
    found, _ = view(model(tmp_path), lora(MLP, rows=8), Written(facts=facts(shapes, output=None), made=FUSED))
    with pytest.raises(FindingsFound, match="LT515 .*has no `score.weight`, which a TinyForCausalLM needs") as caught:
        MergeJudge().in_memory(found.adapters, complete(found, conversion_of(found)))
    assert "modules_to_save" in (caught.value.hint or "")


def test_parts_of_different_types_make_no_parameter(tmp_path: Path) -> None:
    half = numbers(5, HIDDEN).astype("float16")
    with pytest.raises(IncompatibleBase, match="made of tensors with different dtypes, F16, F32"):
        view(model(tmp_path, **{UP: half}), lora(MLP, rows=8))


EXPERTS = [f"old.experts.{number}.up" for number in range(2)]


def experts(folder: Path, factors: dict[str, Array], **config: Any) -> tuple[Model, AdapterModules]:
    """Return the view of a base with two experts, which are one stack in memory."""
    shapes = {**SHAPES, STACK: (2, 3, HIDDEN)}
    stack = tuple((f"{expert}.weight", 3) for expert in EXPERTS)
    weights = {f"{expert}.weight": numbers(3, HIDDEN, seed=at) for at, expert in enumerate(EXPERTS)}
    mapping = Written(facts=facts(shapes, output=None), made={**FUSED, STACK: stack})
    return view(model(folder, **weights), factors, mapping, **config)


def test_experts_without_lora_keep_their_bytes_or_are_refused(tmp_path: Path) -> None:
    found, modules = experts(tmp_path, lora(EXPERTS[0], rows=3), target_modules=["up"])
    assert modules.lora == {}
    merge = drafted(found)
    _, per_expert = parts_of_fused(found, conversion_of(found), merge.modules, Precision.FLOAT32)
    steps = {
        step.out.name: step.op
        for step in steps_on_disk(found, conversion_of(found), tuple(base_steps(merge)), per_expert)
    }
    changed = steps[f"{EXPERTS[0]}.weight"]
    assert isinstance(changed, LoraDelta)
    assert (changed.source, changed.rounded) == (conversion_of(found).disk[f"{EXPERTS[0]}.weight"], True)
    assert isinstance(steps[f"{EXPERTS[1]}.weight"], Copy)
    with pytest.raises(UnsupportedAdapter, match="1 of the 2 tensors that make .* have no LoRA"):
        parts_of_fused(found, replace(conversion_of(found), same_names=True), merge.modules, Precision.PEFT)
