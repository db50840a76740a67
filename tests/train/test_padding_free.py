"""Trap 3: documents that share a row. Models without variable-length attention leak, whatever attention was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers as hf
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from lora_tool_train.live_checks import leak
from tests.train.running import QWEN2, TINY, Trainings, texts, tiny_base

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


@pytest.mark.parametrize("model_type", [*LEAKING, *AWARE])
def test_a_leak_is_seen_in_what_the_model_answers(model_type: str) -> None:
    model = hf.AutoModelForCausalLM.from_config((LEAKING | AWARE)[model_type]())
    model.config.use_cache = False  # as a trainer sets it
    for packing in (False, True):
        collator = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
        found = leak(model, collator, packing=packing, sharded=False)
        assert bool(found) is (model_type in LEAKING), found


def test_a_leak_is_refused_before_training(train: Trainings, tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", LEAKING["falcon"]())
    done = train("sft", words=["--dry-run"], model_name_or_path=str(base), rows=texts(), **PADDING_FREE)
    assert (done.code, done.status, done.codes()) == (1, "stopped", {"padding-free-leak"}), done.error
    assert "falcon" in done.error
    assert done.hint.startswith("padding_free: false")


def test_a_model_that_keeps_documents_apart_passes(train: Trainings, tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", AWARE["phi3"]())
    done = train("sft", words=["--dry-run"], model_name_or_path=str(base), rows=texts(), **PACKED)
    assert (done.code, done.status, done.report["findings"]) == (0, "checked", []), done.error
    assert not train.output.exists()


def test_packing_a_leaking_model_is_refused_and_names_packing(train: Trainings, tmp_path: Path) -> None:
    base = tiny_base(tmp_path / "base", LEAKING["falcon"]())
    done = train("sft", model_name_or_path=str(base), rows=texts(), **PACKED)
    assert (done.status, done.codes(), done.hint) == ("stopped", {"padding-free-leak"}, "packing: false")


@pytest.mark.parametrize(
    ("how", "guard"),
    [
        ({}, None),
        ({**PADDING_FREE, "per_device_train_batch_size": 1}, None),
        (PADDING_FREE, {"ignore": ["padding-free-leak"]}),
    ],
    ids=["padded", "one per row", "taken knowingly"],
)
def test_a_leaking_model_with_one_document_per_row_trains(
    train: Trainings, tmp_path: Path, how: dict[str, object], guard: dict[str, object] | None
) -> None:
    base = tiny_base(tmp_path / "base", LEAKING["falcon"]())
    done = train("sft", guard, model_name_or_path=str(base), rows=texts(), **how)
    assert (done.status, done.report["findings"]) == ("done", [])


def test_padding_free_trains_where_it_may(train: Trainings) -> None:
    done = train("sft", model_name_or_path=str(QWEN2), rows=texts(), **PADDING_FREE)
    assert (done.status, done.report["findings"]) == ("done", [])
