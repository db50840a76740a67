"""The passes of a merge one by one: what each adds to the draft, and that one that does not apply leaves it alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from lora_tool.core.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.core.tensors import DType
from lora_tool.plans.core.ops import Precision
from lora_tool.plans.merge.draft import Draft, MergeInputs, require_exact
from lora_tool.plans.merge.options import PlanOptions
from lora_tool.plans.merge.passes.base_as import rounded_base
from lora_tool.plans.merge.passes.deltas import on_layers, require_same_everywhere, with_deltas
from lora_tool.plans.merge.passes.side_files import in_files, with_side_files
from lora_tool.plans.merge.passes.steps import accounted_for, on_disk, with_steps
from lora_tool.plans.merge.passes.store import dequantised_base, stored_again
from lora_tool.plans.merge.passes.text_only import text_model
from lora_tool.plans.merge.passes.untied import require_own_ends, with_untied
from lora_tool.plans.merge.plan_merge import ON_INPUTS, PASSES
from tests.tiny_plans import HIDDEN, OUTPUT, VOCABULARY, Q, drafted, llama, lora, numbers
from tests.tiny_plans import save_adapter as adapter
from tests.tiny_plans import save_base as base

UNTIED = llama(**{OUTPUT: numbers(VOCABULARY, HIDDEN, seed=5)})
PLAIN = PlanOptions()


@pytest.fixture
def draft(tmp_path: Path) -> Draft:
    """Return the draft of a plain merge before its steps."""
    return drafted(base(tmp_path / "base", UNTIED), adapter(tmp_path / "adapter", lora(Q)))


@pytest.mark.parametrize(
    "each", [on_layers, require_own_ends, with_untied, on_disk, stored_again, require_same_everywhere]
)
def test_a_pass_that_does_not_apply_returns_the_draft(each: Callable[..., object], draft: Draft) -> None:
    assert each(draft, PLAIN) is draft


@pytest.mark.parametrize("each", [require_exact, dequantised_base, text_model])
def test_a_pass_on_inputs_that_does_not_apply_returns_them(each: Callable[..., object], draft: Draft) -> None:
    assert each(draft.inputs, PLAIN) is draft.inputs


def test_every_pass_is_in_the_table_of_contents_once() -> None:
    assert len({*ON_INPUTS, *PASSES}) == len(ON_INPUTS) + len(PASSES)


def test_the_weight_of_an_adapter_scales_its_terms(draft: Draft) -> None:
    halved = replace(draft, inputs=replace(draft.inputs, weights=(0.5,)))
    (whole,), (half,) = (with_deltas(each, PLAIN).modules.lora[Q] for each in (draft, halved))
    assert half.scaling == whole.scaling / 2


def test_without_deltas_the_factors_are_left_out_by_name(draft: Draft) -> None:
    bare = with_deltas(draft, PlanOptions(head_alone=True))
    assert bare.modules.lora == {}
    assert len(bare.adapted[0].modules.dropped) == 2


def test_the_precision_is_that_of_the_options(draft: Draft) -> None:
    assert with_deltas(draft, PlanOptions(precision="float64")).precision is Precision.FLOAT64


def test_all_weights_have_the_type_of_the_options(draft: Draft) -> None:
    made = with_steps(draft, PlanOptions(dtype="bf16"))
    assert {step.out.dtype for step in made.steps} == {DType.BF16}
    assert [step.out.name for step in made.steps] == list(UNTIED)


def test_files_are_no_larger_than_the_options_say_and_have_an_index(draft: Draft) -> None:
    made = in_files(with_steps(draft, PLAIN), PlanOptions(max_shard_size=100))
    assert all(shard.data_bytes <= 100 or len(shard.steps) == 1 for shard in made.shards)
    assert [file.filename for file in made.side_files] == ["model.safetensors.index.json"]


def test_side_files_stand_before_the_index(draft: Draft) -> None:
    made = with_side_files(in_files(with_steps(draft, PLAIN), PlanOptions(max_shard_size=100)), PLAIN)
    assert [file.filename for file in made.side_files] == ["config.json", "model.safetensors.index.json"]


def test_every_tensor_of_the_adapter_is_accounted_for(draft: Draft) -> None:
    made = accounted_for(with_steps(draft, PLAIN), PLAIN)
    assert len(made.leftovers) == len(draft.adapted[0].adapter.tensors)
    with pytest.raises(IncompatibleBase, match=Q):
        accounted_for(replace(made, steps=()), PLAIN)


def rounded(inputs: MergeInputs) -> MergeInputs:
    return rounded_base(inputs, PlanOptions(base_as="nf4"))


def test_a_base_is_rounded_once_and_a_quantised_one_never(draft: Draft) -> None:
    once = rounded(draft.inputs)
    assert once.stored is draft.inputs.stored
    assert once.notes == ("1 linear layer of the base rounded to nf4 and back, as bitsandbytes loads it for training",)
    with pytest.raises(UnsupportedAdapter, match="already quantised"):
        rounded(once)
