"""Tied embeddings that become two matrices: what is written for each end, and what is refused while they stay one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.tensors import TensorAction
from lora_tool.models import ARCHITECTURES
from lora_tool.plans.base.task import Task
from lora_tool.plans.core.ops import Copy, LoraDelta, ReplaceRows
from lora_tool.plans.core.steps import Step
from lora_tool.plans.merge.draft import Draft
from lora_tool.plans.merge.model.reading import as_stored
from lora_tool.plans.merge.passes.steps import base_steps
from lora_tool.plans.merge.untying import require_no_lora_on_tied_ends, untying_steps
from tests.tiny_plans import EMBED, HIDDEN, OUTPUT, VOCABULARY, Array, Q, drafted, embedding_lora, llama, lora, numbers
from tests.tiny_plans import save_adapter as adapter
from tests.tiny_plans import save_base as base

ON_INPUT = embedding_lora("model.embed_tokens")
ON_OUTPUT = lora("lm_head", rows=VOCABULARY)


def untied(folder: Path, tensors: dict[str, Array], *, untie: bool = True, **config: object) -> Draft:
    return drafted(base(folder / "base", llama()), adapter(folder / "adapter", tensors, **config), untie=untie)


def output_step(merge: Draft) -> Step:
    (step,) = untying_steps(merge)
    assert (step.out.name, step.out.shape) == (OUTPUT, (VOCABULARY, HIDDEN))
    return step


def input_step(merge: Draft) -> Step:
    return next(step for step in base_steps(merge) if step.out.name == EMBED)


@pytest.mark.parametrize("factors", [ON_INPUT, ON_OUTPUT], ids=["input", "output"])
def test_lora_on_one_end_of_a_shared_matrix_is_refused(factors: dict[str, Array], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedAdapter, match="which this base ties to the other end") as refused:
        require_no_lora_on_tied_ends(untied(tmp_path, factors, untie=False))
    assert "`untie=True`" in (refused.value.hint or "")


def test_lora_on_the_input_leaves_the_output_as_it_was(tmp_path: Path) -> None:
    merge = untied(tmp_path, ON_INPUT)
    require_no_lora_on_tied_ends(merge)
    assert output_step(merge).op == Copy(source=merge.base.tensors[EMBED])
    assert isinstance(input_step(merge).op, LoraDelta)


def test_lora_on_the_output_leaves_the_input_as_it_was(tmp_path: Path) -> None:
    merge = untied(tmp_path, ON_OUTPUT)
    require_no_lora_on_tied_ends(merge)
    op = output_step(merge).op
    assert isinstance(op, LoraDelta)
    assert (op.source, op.transposed) == (merge.base.tensors[EMBED], False)
    assert input_step(merge).op == Copy(source=merge.base.tensors[EMBED])


def test_an_end_saved_whole_is_written_without_being_asked(tmp_path: Path) -> None:
    whole = {**lora(Q), OUTPUT: numbers(VOCABULARY, HIDDEN, seed=3)}
    merge = untied(tmp_path, whole, untie=False, modules_to_save=["lm_head"])
    step = output_step(merge)
    assert step.op == Copy(source=merge.modules.saved[OUTPUT])
    assert (step.action, step.reason) == (TensorAction.ADDED, "saved whole in the adapter")


def test_trained_rows_of_the_input_are_rows_of_the_output_too(tmp_path: Path) -> None:
    rows = {"model.embed_tokens.token_adapter.trainable_tokens_delta": numbers(2, HIDDEN)}
    merge = untied(tmp_path, {**lora(Q), **rows}, trainable_token_indices={"embed_tokens": [1, 4]})
    for step in (output_step(merge), input_step(merge)):
        assert isinstance(step.op, ReplaceRows)
        assert step.op.indices == (1, 4)


def test_lora_at_one_end_and_trained_rows_at_both_cannot_be_told_apart(tmp_path: Path) -> None:
    rows = {"model.embed_tokens.token_adapter.trainable_tokens_delta": numbers(1, HIDDEN)}
    merge = untied(tmp_path, {**ON_OUTPUT, **rows}, trainable_token_indices={"embed_tokens": [2]})
    with pytest.raises(UnsupportedAdapter, match="changes cannot be separated"):
        require_no_lora_on_tied_ends(merge)


def test_an_init_that_changed_both_ends_is_refused(tmp_path: Path) -> None:
    merge = untied(tmp_path, ON_OUTPUT, init_lora_weights="pissa")
    with pytest.raises(UnsupportedAdapter, match="the init changed both before the training"):
        require_no_lora_on_tied_ends(merge)


def test_a_model_that_stays_tied_gets_no_second_matrix(tmp_path: Path) -> None:
    merge = untied(tmp_path, lora(Q), untie=False)
    require_no_lora_on_tied_ends(merge)
    assert list(untying_steps(merge)) == []


@pytest.mark.parametrize("untie", [True, False])
def test_a_bias_that_the_config_alone_tied_is_written_with_untie_and_told_of_without(
    untie: bool, tmp_path: Path
) -> None:
    row = ARCHITECTURES["bert-generation"]
    layer = "bert.encoder.layer.0.attention.self.query"
    embed, bias = "bert.embeddings.word_embeddings.weight", "lm_head.bias"
    tensors = {
        embed: numbers(VOCABULARY, HIDDEN),
        f"{layer}.weight": numbers(HIDDEN, HIDDEN),
        bias: numbers(VOCABULARY),
    }
    config = {"model_type": row.model_type, "architectures": [row.causal_lm], "tie_word_embeddings": True}
    saved = {**lora(layer), embed: numbers(VOCABULARY, HIDDEN, seed=2)}
    whole = adapter(tmp_path / "adapter", saved, modules_to_save=["word_embeddings"])
    view = as_stored(base(tmp_path / "base", tensors, **config), [whole], row, Task.CAUSAL_LM)
    merge = drafted(view, untie=untie)
    pair = {"lm_head.decoder.bias": bias}
    assert (merge.ends.untied_tensors, merge.ends.untied_unsaved) == ((pair, {}) if untie else ({}, pair))
    written = [step.out.name for step in untying_steps(merge)]
    assert written == [*merge.ends.untied_tensors, "lm_head.decoder.weight"]
