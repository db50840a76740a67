"""What happens to each tensor of base and adapter: one operation, one dtype, one reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from lora_tool.core.errors import IncompatibleBase, LoraToolError
from lora_tool.core.options import Options
from lora_tool.core.tensors import DType, TensorAction
from lora_tool.plans.base.task import Task
from lora_tool.plans.core.ops import BiasDelta, Cast, Copy, DoraDelta, LoraDelta, ReplaceRows
from lora_tool.plans.core.steps import Step
from lora_tool.plans.merge.draft import Draft
from lora_tool.plans.merge.passes.steps import (
    accounted_for,
    added_steps,
    base_steps,
    dropped_from_base,
)
from tests.tiny_plans import (
    EMBED,
    HIDDEN,
    NORM,
    OUTPUT,
    VOCABULARY,
    Array,
    Q,
    drafted,
    embedding_lora,
    llama,
    lora,
    numbers,
)
from tests.tiny_plans import save_adapter as adapter
from tests.tiny_plans import save_base as base

UNTIED = llama(**{OUTPUT: numbers(VOCABULARY, HIDDEN, seed=5)})


def steps(merge: Draft) -> dict[str, Step]:
    return {step.out.name: step for step in (*base_steps(merge), *added_steps(merge))}


def planned(
    folder: Path, tensors: dict[str, Array], *, dtype: DType | None = None, **config: object
) -> dict[str, Step]:
    return steps(drafted(base(folder / "base", UNTIED), adapter(folder / "adapter", tensors, **config), dtype=dtype))


def test_a_targeted_weight_gets_the_delta_and_the_others_their_bytes(tmp_path: Path) -> None:
    made = planned(tmp_path, lora(Q), lora_alpha=6)
    assert list(made) == list(UNTIED)
    op = made[f"{Q}.weight"].op
    assert isinstance(op, LoraDelta)
    assert (op.terms[0].scaling, made[f"{Q}.weight"].reason) == (3.0, "LoRA rank 2, scaling 3")
    assert {step.action for name, step in made.items() if name != f"{Q}.weight"} == {TensorAction.COPIED}


def test_deltas_of_several_adapters_are_terms_of_one_step(tmp_path: Path) -> None:
    pair = [adapter(tmp_path / f"{n}", lora(Q, seed=n), lora_alpha=n) for n in (2, 4)]
    op = steps(drafted(base(tmp_path / "base", UNTIED), *pair))[f"{Q}.weight"].op
    assert isinstance(op, LoraDelta)
    assert [term.scaling for term in op.terms] == [1.0, 2.0]


def test_another_dtype_casts_what_is_kept_and_rounds_what_is_merged(tmp_path: Path) -> None:
    made = planned(tmp_path, lora(Q), dtype=DType.BF16)
    assert {step.out.dtype for step in made.values()} == {DType.BF16}
    assert isinstance(made[NORM].op, Cast)
    assert isinstance(made[f"{Q}.weight"].op, LoraDelta)


def test_a_module_saved_whole_takes_the_place_of_the_bases(tmp_path: Path) -> None:
    made = planned(tmp_path, {**lora(Q), NORM: numbers(HIDDEN, seed=9)}, modules_to_save=["norm"])
    assert isinstance(made[NORM].op, Copy)
    assert made[NORM].op.source.path.parent == tmp_path / "adapter"
    assert made[NORM].action is TensorAction.REPLACED


def test_lora_on_an_embedding_is_transposed_and_rounded_as_peft_does(tmp_path: Path) -> None:
    op = planned(tmp_path, embedding_lora("model.embed_tokens"))[EMBED].op
    assert isinstance(op, LoraDelta)
    assert (op.transposed, op.rounded) == (True, True)


def test_trained_tokens_replace_their_rows(tmp_path: Path) -> None:
    rows = {"model.embed_tokens.token_adapter.trainable_tokens_delta": numbers(2, HIDDEN)}
    op = planned(tmp_path, {**lora(Q), **rows}, trainable_token_indices={"embed_tokens": [0, 3]})[EMBED].op
    assert isinstance(op, ReplaceRows)
    assert op.indices == (0, 3)


def test_dora_scales_by_its_magnitude(tmp_path: Path) -> None:
    magnitude = {f"{Q}.lora_magnitude_vector": np.abs(numbers(HIDDEN)) + 1}
    op = planned(tmp_path, {**lora(Q), **magnitude}, use_dora=True)[f"{Q}.weight"].op
    assert isinstance(op, DoraDelta)
    assert op.magnitude.shape == (HIDDEN,)


def test_the_bias_of_lora_b_is_added_to_the_layers(tmp_path: Path) -> None:
    tensors = UNTIED | {f"{Q}.bias": numbers(HIDDEN)}
    with_bias = adapter(tmp_path / "adapter", {**lora(Q), f"{Q}.lora_B.bias": numbers(HIDDEN)}, lora_bias=True)
    op = steps(drafted(base(tmp_path / "base", tensors), with_bias))[f"{Q}.bias"].op
    assert isinstance(op, BiasDelta)


def test_a_conv1d_weight_is_stored_transposed(tmp_path: Path) -> None:
    module = "transformer.h.0.attn.c_attn"
    tensors = {"transformer.wte.weight": numbers(VOCABULARY, HIDDEN), f"{module}.weight": numbers(HIDDEN, 12)}
    gpt2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "tie_word_embeddings": True}
    model = base(tmp_path / "base", tensors, **gpt2)
    op = steps(drafted(model, adapter(tmp_path / "adapter", lora(module, rows=12))))[f"{module}.weight"].op
    assert isinstance(op, LoraDelta)
    assert op.transposed


def test_a_reward_head_is_added_and_the_output_layer_left_out(tmp_path: Path) -> None:
    head = {"score.weight": numbers(1, HIDDEN)}
    saved = adapter(tmp_path / "adapter", {**lora(Q), **head}, task_type="SEQ_CLS", modules_to_save=["score"])
    merge = drafted(base(tmp_path / "base", UNTIED), saved, asked=Task.REWARD)
    made = steps(merge)
    assert OUTPUT not in made
    assert (made["score.weight"].action, merge.labels) == (TensorAction.ADDED, 1)
    assert [item.name for item in dropped_from_base(merge)] == [OUTPUT]


@pytest.mark.parametrize(
    ("tensors", "config", "words"),
    [
        (
            {**lora(Q), NORM: numbers(HIDDEN + 1)},
            {"modules_to_save": ["norm"]},
            "of another shape than `model.norm.weight`",
        ),
        (
            {**lora(Q), "model.norm.wight": numbers(HIDDEN)},
            {"modules_to_save": ["norm"]},
            "belongs to `model.norm.wight`, which",
        ),
    ],
    ids=["whole", "name"],
)
def test_what_does_not_fit_the_base_names_both(
    tensors: dict[str, Array], config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises((IncompatibleBase, AssertionError), match=words):
        planned(tmp_path, tensors, **config)


def test_every_adapter_tensor_is_in_a_step_or_refused(tmp_path: Path) -> None:
    on_output = {**lora(Q), **lora("lm_head", rows=VOCABULARY), "score.weight": numbers(1, HIDDEN)}
    saved = adapter(tmp_path / "adapter", on_output, task_type="SEQ_CLS", modules_to_save=["score"])
    merge = drafted(base(tmp_path / "base", UNTIED), saved)
    made = tuple(steps(merge).values())
    with pytest.raises(LoraToolError, match=r"lora_A\.weight` belongs to `lm_head\.weight`, which"):
        accounted_for(replace(merge, steps=made), Options())
