"""Tiny models of every architecture transformers knows, for comparing our reading of a checkpoint with its own.

A config class is shrunk field by field: an integer field with a known name gets a small size if its default is larger,
sub-configs likewise. The sizes differ from one another where a model lets them, so that a transposed or misplaced
tensor shows in its shape. What the rule cannot guess (divisibility, layer lists, required sub-configs) is in
`_OVERRIDES`. Two layers are enough: names do not depend on the index, except where layers alternate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

Task = Literal[
    "causal-lm", "seq-cls", "token-cls", "question-ans", "seq-2-seq-lm", "feature-extraction", "image-text-to-text"
]

NUM_LABELS = 7
"""Rows of a tiny score head: a size nothing else in a tiny model has."""

_VOCABULARY = 96
TINY_SIZES = {
    name: size
    for size, names in {
        1: """first_k_dense_replace moe_layer_start_index num_dense_layers num_mtp_layers num_nextn_predict_layers""",
        2: """conf_num_hidden_layers decoder_layers depth encoder_layers index_n_heads linear_num_key_heads
            mamba_n_groups moe_k moe_topk n_group n_groups n_layer n_layers n_mamba_heads num_blocks
            num_decoder_layers num_encoder_layers num_experts_per_tok num_feedforward_networks num_global_layers
            num_hash num_hidden_layers num_key_value_heads num_layers num_random_blocks num_self_attends_per_block
            o_groups swa_num_key_value_heads topk_group window_size""",
        4: """attention_heads conf_num_attention_heads decoder_attention_heads encoder_attention_heads hc_mult
            linear_num_heads linear_num_value_heads moe_num_experts n_head n_heads n_routed_experts
            num_attention_heads num_cross_attention_heads num_decoder_attention_heads num_encoder_attention_heads
            num_experts num_heads num_local_experts num_self_attention_heads swa_num_attention_heads
            zero_expert_num""",
        8: """adapter_rank attention_head_size d_head d_kv d_rel dim_head hc_lowrank head_dim index_head_dim
            intra_bottleneck_size kv_channels kv_lora_rank linear_head_dim linear_key_head_dim
            linear_value_head_dim mamba_head_dim qk_nope_head_dim qk_rope_head_dim rotary_dim swa_head_dim
            v_head_dim""",
        16: """base_channels depthwise_separable_out_channel downsample_hidden_size ext_pw_out_channel
            hidden_size_per_layer_input laurel_rank local_attn_chunk_length lsh_attn_chunk_length mamba_d_state
            nemo_conv_channels num_latents o_lora_rank prompt_mid_dim q_lora_rank router_hidden_size ssm_state_size
            state_size xpath_unit_hidden_size""",
        24: """expert_ffn_hidden_size moe_intermediate_size moe_shared_expert_intermediate_size
            shared_expert_intermediate_size shared_experts_intermediate_size shared_intermediate_size""",
        32: """adapter_out_dim backbone_hidden_size d_latents d_model dim emb_dim embedding_size entity_emb_size
            hidden_size hidden_size_global input_embedding_size mm_embed_dim n_embd out_hidden_size
            output_embedding_size output_proj_dims prediction_head_size projector_input_dim projector_output_dim
            vision_output_dim""",
        48: """d_ff d_inner decoder_ffn_dim dense_intermediate_size dff dim_ff encoder_ffn_dim feed_forward_size
            ffn_dim ffn_hidden_size hidden_dim intermediate_size intermediate_size_mlp mlp_dim""",
        64: """image_size input_size max_2d_position_embeddings max_position_embeddings max_seq_len
            max_source_positions max_target_positions mm_posemb_size n_ctx n_positions num_position_embeddings
            position_embedding_size rel_extent relative_attention_max_distance""",
        _VOCABULARY: """audio_vocab_size codebook_size encoder_hash_byte_group_vocab entity_vocab_size
            ngram_vocab_size_base num_hash_buckets pronunciation_vocab_size shape_vocab_size unpadded_vocab_size
            vocab_size vocab_size_per_layer_input""",
    }.items()
    for name in names.split()
}

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": _VOCABULARY,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LINEAR_THEN_FULL = ["linear_attention", "full_attention"]
_HYBRID = ["linear_attention", "hybrid"] * 2

_OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"mamba_n_heads": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "esm": {"vocab_size": _VOCABULARY},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_ssm": 64},
    "fuyu": {"text_config": {"model_type": "persimmon", **_TEXT}},
    "gemma3": {"vision_config": _VISION},
    "gemma3n_text": {"num_kv_shared_layers": 0, "num_hidden_layers": 5},
    "got_ocr2": {"text_config": {"model_type": "qwen2", **_TEXT}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"], "num_local_experts": 4},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"head_dim": 16},
    "ministral": {"head_dim": 8},
    "modernvbert": {"text_config": {"model_type": "modernbert", **_TEXT}, "vision_config": _VISION},
    "moss_transcribe_diarize": {"text_config": {"model_type": "qwen3", "head_dim": 8, **_TEXT}},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "qwen3_5_moe_text": {"layer_types": _LINEAR_THEN_FULL},
    "qwen3_5_text": {"layer_types": _LINEAR_THEN_FULL},
    "qwen3_next": {"layer_types": _LINEAR_THEN_FULL},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    "t5gemma2": {"encoder": {"vision_config": _VISION}},
    "ultravbert": {"text_config": {"model_type": "ultrabert", **_TEXT}, "vision_config": _VISION},
    "zamba": {"num_hidden_layers": 4, "layer_types": _HYBRID},
    "zamba2": {"num_hidden_layers": 4, "layer_types": _HYBRID},
}

_CLASSES: Mapping[Task, Mapping[str, str]] = {
    "causal-lm": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq-cls": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "token-cls": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "question-ans": MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "seq-2-seq-lm": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "feature-extraction": MODEL_MAPPING_NAMES,
    "image-text-to-text": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
AUTO: Mapping[Task, Any] = {
    "causal-lm": AutoModelForCausalLM,
    "seq-cls": AutoModelForSequenceClassification,
    "token-cls": AutoModelForTokenClassification,
    "question-ans": AutoModelForQuestionAnswering,
    "seq-2-seq-lm": AutoModelForSeq2SeqLM,
    "feature-extraction": AutoModel,
    "image-text-to-text": AutoModelForImageTextToText,
}
_LABELLED = frozenset({"seq-cls", "token-cls"})

_NOT_BUILDABLE = frozenset(
    {
        "dots3_note",  # a list of 42 vision layers is written into its config
        "gemma3n",  # needs timm
        "gemma4_assistant",  # drafts for another model, shares its layers
        "gemma4_unified_assistant",  # as gemma4_assistant
        "layoutlmv2",  # needs detectron2
        "moshi",  # audio and depth decoders
        "musicgen",  # the class wants the decoder's config
        "musicgen_melody",
    }
)


def buildable(task: Task) -> list[str]:
    """Return the model types that `tiny_model` can build for `task`, sorted."""
    return sorted(set(_CLASSES[task]) - _NOT_BUILDABLE)


def tiny_config(model_type: str, task: Task, **overrides: Any) -> PretrainedConfig:
    """Return a small valid config; `overrides` have the last word, and reach into sub-configs as nested dicts."""
    config_class = CONFIG_MAPPING[model_type]
    fields = {field.name: field.default for field in dataclasses.fields(config_class)}
    arguments = _updated(_shrunk(config_class), _OVERRIDES.get(model_type, {}))
    if fields.get("pad_token_id", 0) is None:
        arguments.setdefault("pad_token_id", 0)
    if task in _LABELLED:
        arguments["num_labels"] = NUM_LABELS
    elif (
        task == "causal-lm" and "is_decoder" in fields and not {"encoder_layers", "num_encoder_layers"} & fields.keys()
    ):
        arguments["is_decoder"] = True
    return config_class(**_updated(arguments, overrides))


def tiny_model(model_type: str, task: Task, *, device: str = "cpu", seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Return the model that the auto class of `task` makes from the tiny config, freshly initialised.

    The same `seed` gives the same weights and leaves the caller's random state alone. `device="meta"` makes names and
    shapes only, in milliseconds.
    """
    config = tiny_config(model_type, task, **overrides)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        return AUTO[task].from_config(config).eval()


def _shrunk(config_class: type[PretrainedConfig]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        default = field.default
        if not isinstance(default, int) or isinstance(default, bool):
            continue
        if default > TINY_SIZES.get(field.name, default):
            arguments[field.name] = TINY_SIZES[field.name]
        elif field.name.endswith(("_token_id", "_token_index", "_pad_id")) and default >= _VOCABULARY:
            arguments[field.name] = default % _VOCABULARY
    for name, sub_class in _sub_configs(config_class):
        arguments[name] = _updated(_shrunk(sub_class), _OVERRIDES.get(sub_class.model_type, {}))
    return arguments


def _sub_configs(config_class: type[PretrainedConfig]) -> Iterator[tuple[str, type[PretrainedConfig]]]:
    """Yield the sub-configs whose class is fixed; an `AutoConfig` counts where there is a default."""
    for name, spec in (config_class.sub_configs or {}).items():
        sub_class: Any = getattr(spec, "config_class", spec)
        if sub_class.__name__ == "AutoConfig" and getattr(spec, "model_type", None):
            sub_class = CONFIG_MAPPING[spec.model_type]
        elif sub_class.__name__ == "AutoConfig":
            sub_class = _default_class(config_class, name) or sub_class
        if hasattr(sub_class, "model_type"):
            yield name, sub_class


def _default_class(config_class: type[PretrainedConfig], name: str) -> type[PretrainedConfig] | None:
    try:
        found = getattr(config_class(), name, None)
    except (TypeError, ValueError, AttributeError, KeyError):  # one that must be given
        return None
    return type(found) if isinstance(found, PretrainedConfig) else None


def _updated(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in changes.items():
        old = merged.get(name)
        merged[name] = _updated(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return merged
