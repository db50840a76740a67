"""A tiny model as GGUF, written by llama.cpp's package: its converters are in none."""

from __future__ import annotations

import json
from pathlib import Path

import gguf

from tests.oracle.peft_merge import saved_tensors


def write_base(base: Path, out: Path) -> Path:
    """Write a Qwen3, whose matrices llama.cpp has as transformers does, with a vocabulary of single characters."""
    config = json.loads((base / "config.json").read_text())
    count = config["vocab_size"]
    writer = gguf.GGUFWriter(out, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([chr(33 + at) if at < 94 else f"z{at}" for at in range(count)])
    writer.add_token_types([1] * count)
    writer.add_token_merges(["z z"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(value=False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, tensor in saved_tensors(base).items():
        writer.add_tensor(str(names.get_name(name, (".weight",))), tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out
