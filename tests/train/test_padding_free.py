"""Trap 3: documents that share a row. Models without variable-length attention leak, whatever attention was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers as hf

from tests.train.running import LLAMA, QWEN2, TINY, Trainings, codes, pairs, texts, tiny_base

pytestmark = pytest.mark.filterwarnings("default")

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LEAKING = {
    "falcon": lambda: hf.FalconConfig(**TINY, **SMALL),
    "opt": lambda: hf.OPTConfig(**TINY, **SMALL, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=128),
    "mpt": lambda: hf.MptConfig(vocab_size=304, d_model=32, n_layers=2, n_heads=4, max_seq_len=128),
    "bloom": lambda: hf.BloomConfig(vocab_size=304, hidden_size=32, n_layer=2, n_head=4),
    "mamba": lambda: hf.MambaConfig(vocab_size=304, hidden_size=32, num_hidden_layers=2, state_size=8),
}
AWARE = {
    "gpt2": lambda: hf.GPT2Config(vocab_size=304, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "phi3": lambda: hf.Phi3Config(**TINY, **SMALL, intermediate_size=64, max_position_embeddings=128),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **TINY, **SMALL, intermediate_size=64, num_key_value_heads=2, head_dim=8, max_position_embeddings=128
    ),
}
PADDING_FREE = {"padding_free": True, "max_length": None}
PACKED = {"packing": True, "max_length": 64}


@pytest.mark.parametrize("model_type", LEAKING)
def test_a_leak_is_refused_before_training(train: Trainings, tmp_path: Path, model_type: str) -> None:
    base = tiny_base(tmp_path / "base", LEAKING[model_type]())
    options = {**PADDING_FREE, **({"lora_target_modules": ["in_proj"]} if model_type == "mamba" else {})}
    outcome = train("sft", dry=True, model_name_or_path=str(base), rows=texts(), **options)
    assert outcome.status.value == "refused"
    (found,) = outcome.findings
    assert found.code == "padding-free-leak"
    assert model_type in found.message
    assert found.hint is not None
    assert found.hint.startswith("padding_free: false")


@pytest.mark.parametrize("model_type", AWARE)
@pytest.mark.parametrize("how", [PADDING_FREE, PACKED], ids=["padding-free", "packed"])
def test_models_that_keep_documents_apart_pass(
    train: Trainings, tmp_path: Path, model_type: str, how: dict[str, object]
) -> None:
    base = tiny_base(tmp_path / "base", AWARE[model_type]())
    outcome = train("sft", dry=True, model_name_or_path=str(base), rows=texts(), **how)
    assert (outcome.status.value, outcome.findings) == ("checked", ())


def test_packing_a_leaking_model_is_refused_and_names_packing(train: Trainings, tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", LEAKING["falcon"]())
    outcome = train("sft", model_name_or_path=str(base), rows=texts(), **PACKED)
    assert (outcome.status.value, codes(outcome)) == ("refused", {"padding-free-leak"})
    assert outcome.findings[0].hint == "packing: false"


@pytest.mark.parametrize("how", [{}, {**PADDING_FREE, "per_device_train_batch_size": 1}], ids=["padded", "one per row"])
def test_a_leaking_model_with_one_document_per_row_trains(
    train: Trainings, tmp_path: Path, how: dict[str, object]
) -> None:
    base = tiny_base(tmp_path / "base", LEAKING["falcon"]())
    outcome = train("sft", model_name_or_path=str(base), rows=texts(), **how)
    assert (outcome.status.value, outcome.findings) == ("done", ())


@pytest.mark.parametrize("base", [QWEN2, LLAMA], ids=["qwen2", "llama"])
def test_padding_free_trains_where_it_may(train: Trainings, base: Path) -> None:
    outcome = train("sft", model_name_or_path=str(base), rows=texts(), **PADDING_FREE)
    assert (outcome.status.value, outcome.findings) == ("done", ())


def test_a_leak_can_be_taken_knowingly(train: Trainings, tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", LEAKING["falcon"]())
    block = {"guard": {"ignore": ["padding-free-leak"]}}
    outcome = train("sft", block, model_name_or_path=str(base), rows=texts(), **PADDING_FREE)
    assert (outcome.status.value, outcome.findings) == ("done", ())


def test_two_attentions_are_refused(train: Trainings) -> None:
    inner = {"attn_implementation": "eager"}
    outcome = train(
        "sft", model_name_or_path=str(QWEN2), rows=texts(), attn_implementation="sdpa", model_init_kwargs=inner
    )
    assert (outcome.status.value, codes(outcome)) == ("refused", {"attention-conflict"})
    assert "model_init_kwargs" in outcome.findings[0].message


def test_the_attention_inside_is_the_one_in_effect(train: Trainings) -> None:
    outcome = train(
        "sft", model_name_or_path=str(QWEN2), rows=texts(), model_init_kwargs={"attn_implementation": "eager"}
    )
    assert (outcome.status.value, outcome.findings) == ("done", ())
    assert train.run is not None
    assert train.run.guard.trainer.model.config._attn_implementation == "eager"


def test_dpo_says_that_it_pads(train: Trainings) -> None:
    outcome = train("dpo", model_name_or_path=str(QWEN2), rows=pairs(), padding_free=True)
    assert (outcome.status.value, codes(outcome, "warning")) == ("done", {"padding-free-off"})
