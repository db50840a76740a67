"""The ends of a model: which matrix is shared, what an adapter holds twice, and other numbers of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_tool.core.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.models import ARCHITECTURES
from lora_tool.plans.base.task import Task
from lora_tool.plans.merge.model.reading import as_stored
from lora_tool.plans.merge.passes.ends import tied_copies, tied_under_one_name
from lora_tool.plans.merge.passes.steps import base_steps
from tests.tiny_plans import EMBED, HIDDEN, OUTPUT, VOCABULARY, Q, drafted, facts, llama, lora, numbers
from tests.tiny_plans import save_adapter as adapter
from tests.tiny_plans import save_base as base

MATRIX = numbers(VOCABULARY, HIDDEN)
OTHER = numbers(VOCABULARY, HIDDEN, seed=7)
BOTH = {"modules_to_save": ["embed_tokens", "lm_head"]}


def test_an_output_layer_with_the_embeddings_values_is_a_tied_copy_and_written_once(tmp_path: Path) -> None:
    model = base(tmp_path / "base", llama(**{OUTPUT: MATRIX}), tie_word_embeddings=True)
    merge = drafted(model, adapter(tmp_path / "adapter", lora(Q)))
    assert merge.ends.copies == {OUTPUT: EMBED}
    assert merge.ends.tied is not None
    assert OUTPUT not in [step.out.name for step in base_steps(merge)]


@pytest.mark.parametrize(("output", "says_tied"), [(OTHER, True), (MATRIX, False)], ids=["other values", "untied"])
def test_two_matrices_stay_two(output: object, says_tied: bool, tmp_path: Path) -> None:
    model = base(tmp_path / "base", llama(**{OUTPUT: output}), tie_word_embeddings=says_tied)  # type: ignore[arg-type]
    saved = adapter(tmp_path / "adapter", lora(Q))
    merge = drafted(as_stored(model, [saved], ARCHITECTURES["llama"], Task.CAUSAL_LM))
    assert (merge.ends.copies, merge.ends.tied) == ({}, None)
    assert merge.ends.untied == says_tied  # the merged config has to say what the weights are


def test_the_shared_matrix_is_the_one_with_a_row_per_token(tmp_path: Path) -> None:
    merge = drafted(base(tmp_path / "base", llama()), adapter(tmp_path / "adapter", lora(Q)))
    assert merge.ends.tied is not None
    assert (merge.ends.tied.output, merge.ends.tied.embedding.name) == (OUTPUT, EMBED)
    assert not merge.ends.untied


def test_a_shared_matrix_that_is_not_there_is_missed_when_it_is_needed(tmp_path: Path) -> None:
    merge = drafted(base(tmp_path / "base", llama(**{EMBED: None})), adapter(tmp_path / "adapter", lora(Q)))
    assert merge.ends.tied is not None
    with pytest.raises(IncompatibleBase, match="is tied to the embeddings, but the base has no embeddings"):
        _ = merge.ends.tied.embedding


def test_both_ends_with_the_same_values_are_the_shared_matrix_once(tmp_path: Path) -> None:
    resized = numbers(VOCABULARY + 2, HIDDEN)
    saved = adapter(tmp_path / "adapter", {**lora(Q), EMBED: resized, OUTPUT: resized})
    merge = drafted(base(tmp_path / "base", llama()), saved)
    assert merge.modules.saved.keys() == {EMBED}
    assert [reason for part in merge.adapted for reason in part.modules.dropped.values()] == [
        "the same as for lm_head.weight's tied end, the embedding"
    ]


def test_both_ends_with_other_values_are_no_shared_matrix(tmp_path: Path) -> None:
    ends = {EMBED: numbers(VOCABULARY + 2, HIDDEN), OUTPUT: numbers(VOCABULARY + 2, HIDDEN, seed=1)}
    with pytest.raises(UnsupportedAdapter, match="has other values than .*, but this base ties the two"):
        drafted(base(tmp_path / "base", llama()), adapter(tmp_path / "adapter", {**lora(Q), **ends}))


def test_an_end_that_was_trained_whole_unties_the_model(tmp_path: Path) -> None:
    saved = adapter(tmp_path / "adapter", {**lora(Q), EMBED: OTHER, OUTPUT: MATRIX}, **BOTH)
    merge = drafted(base(tmp_path / "base", llama()), saved)
    assert merge.ends.untied
    assert merge.modules.saved.keys() == {EMBED, OUTPUT}


@pytest.mark.parametrize("size", [VOCABULARY - 2, VOCABULARY + 2])
def test_an_adapter_brings_its_number_of_tokens(size: int, tmp_path: Path) -> None:
    ends = {EMBED: numbers(size, HIDDEN), OUTPUT: numbers(size, HIDDEN, seed=1)}
    merge = drafted(
        base(tmp_path / "base", llama(**{OUTPUT: OTHER})), adapter(tmp_path / "adapter", {**lora(Q), **ends}, **BOTH)
    )
    assert merge.ends.vocabulary is not None
    assert (merge.ends.vocabulary.size, merge.ends.vocabulary.names) == (size, frozenset({EMBED, OUTPUT}))
    assert {step.out.name: step.out.shape[0] for step in base_steps(merge)}[OUTPUT] == size


def test_fewer_tokens_cut_the_end_that_the_adapter_does_not_hold(tmp_path: Path) -> None:
    held = {EMBED: numbers(4, HIDDEN)}
    merge = drafted(base(tmp_path / "base", llama(**{OUTPUT: OTHER})), adapter(tmp_path / "a", {**lora(Q), **held}))
    assert merge.base.tensors[OUTPUT].shape == (4, HIDDEN)
    assert merge.base.tensors[OUTPUT].spans[0].nbytes == 4 * HIDDEN * 4


def test_the_class_says_what_is_tied_where_transformers_was_asked(tmp_path: Path) -> None:
    model = base(tmp_path / "base", {"shared.weight": MATRIX, "encoder.weight": MATRIX, "decoder.weight": OTHER})
    tied = facts({}, tied={"encoder.weight": "shared.weight", "decoder.weight": "shared.weight"})
    assert tied_copies(model, ARCHITECTURES["llama"], tied) == {"encoder.weight": "shared.weight"}


def test_an_output_layer_may_stand_for_the_embeddings(tmp_path: Path) -> None:
    model = base(tmp_path / "base", {OUTPUT: MATRIX})
    assert tied_under_one_name(model, facts({}, tied={OUTPUT: EMBED}))
    assert not tied_under_one_name(model, facts({}))
    assert not tied_under_one_name(model, None)
