"""Which architectures are stored on disk exactly as they are in memory, and what their two heads are called.

A merge that reads headers alone may trust names for these model types: for the classes named, `save_pretrained` writes
the module names and shapes of the running model (tied duplicates left out), and `from_pretrained` reads them back with
no renaming, fusing or transposing. A checkpoint whose names differ all the same (the published `gpt2` has no
``transformer.`` in front) shows itself: its tensors have other names. A model type that is not here may still be
merged, by asking transformers where each module lives.

The table was made by building, saving and reloading a tiny model of every causal-LM and sequence-classification class
of transformers 5.23, with random weights compared bit by bit. A row needs an empty conversion mapping, sub-configs of
fixed classes, and no linear layer tied to another; where the two classes differ in more than their heads, the row names
one. `tests/contract/test_architectures.py` checks every row against the transformers that is installed.

The class is part of the promise: a checkpoint of another class (``BartForConditionalGeneration``) has no row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from types import MappingProxyType

from msgspec import Struct

from lora_tool.core.tensors import DType


class Architecture(Struct, frozen=True, kw_only=True):
    """The classes of a model type that are stored as they are in memory; None for a class that is not.

    Where both classes are named they share their trunk, name by name: the causal LM without `causal_only` is the
    sequence classifier without its `head`. `head` is the module path whose output is the labels; some encoders have a
    further dense layer beside it (``pre_classifier``, ``pooler``), which belongs to the base model. `causal_only` are
    the tensors of the language-modelling head, as named in memory: a tied one is not on disk. `wide_in` are the types
    of which transformers loads a model with some parameters in float32 all the same (T5's `wo`, GPT-OSS's norms): a
    base of such a type is not stored as it is in memory. `conv1d` are the last components of modules that store their
    weight transposed, (in, out), as `Conv1D` does.
    """

    model_type: str
    causal_lm: str | None
    sequence_classification: str | None
    head: str | None
    causal_only: tuple[str, ...]
    conv1d: frozenset[str]
    wide_in: frozenset[DType] = frozenset()


_COMPUTED = re.compile(
    r"(?:^|\.)(?:(?:rotary_emb|rotary|maybe_rotary)\.inv_freq|(?:attn|attention)\.(?:masked_)?bias|position_ids)$"
)


def is_computed(name: str) -> bool:
    """Return whether it is a buffer that transformers saved once: rotary frequencies, causal masks, position numbers.

    None of the plainly stored architectures has a parameter of such a name (`tests/contract/test_architectures.py`).
    """
    return _COMPUTED.search(name) is not None


def architecture_of(model_type: str) -> Architecture | None:
    """Return the row of a config's `model_type`, or None where names in memory and on disk may differ."""
    return ARCHITECTURES.get(model_type)


def _row(
    model_type: str,
    causal_lm: str | None,
    sequence_classification: str | None = None,
    *,
    head: str = "score",
    causal_only: tuple[str, ...] = ("lm_head.weight",),
    conv1d: Iterable[str] = (),
    wide_in: Iterable[DType] = (),
) -> Architecture:
    return Architecture(
        model_type=model_type,
        causal_lm=causal_lm,
        sequence_classification=sequence_classification,
        head=head if sequence_classification else None,
        causal_only=causal_only if causal_lm else (),
        conv1d=frozenset(conv1d),
        wide_in=frozenset(wide_in),
    )


_BERT_HEAD = (
    "cls.predictions.bias",
    "cls.predictions.decoder.bias",
    "cls.predictions.decoder.weight",
    "cls.predictions.transform.LayerNorm.bias",
    "cls.predictions.transform.LayerNorm.weight",
    "cls.predictions.transform.dense.bias",
    "cls.predictions.transform.dense.weight",
)
_BIASED_HEAD = ("lm_head.bias", "lm_head.weight")
_DECODER_HEAD = ("lm_head.bias", "lm_head.decoder.bias", "lm_head.decoder.weight")
_ELECTRA_HEAD = (
    "generator_lm_head.bias",
    "generator_lm_head.weight",
    "generator_predictions.LayerNorm.bias",
    "generator_predictions.LayerNorm.weight",
    "generator_predictions.dense.bias",
    "generator_predictions.dense.weight",
)
_MODERNBERT_HEAD = ("decoder.bias", "decoder.weight", "lm_head.dense.weight", "lm_head.norm.weight")
_ROBERTA_HEAD = (
    "lm_head.bias",
    "lm_head.decoder.bias",
    "lm_head.decoder.weight",
    "lm_head.dense.bias",
    "lm_head.dense.weight",
    "lm_head.layer_norm.bias",
    "lm_head.layer_norm.weight",
)
_classifier = partial(_row, head="classifier")
_HALF = (DType.F16,)
_SIXTEEN_BITS = (DType.F16, DType.BF16)
_GPT_CONV1D = ("c_attn", "c_fc", "c_proj")
_GPT2_CONV1D = (*_GPT_CONV1D, "q_attn")

_ROWS = (
    _classifier("albert", None, "AlbertForSequenceClassification"),
    _row("apertus", "ApertusForCausalLM"),
    _row("arcee", "ArceeForCausalLM", "ArceeForSequenceClassification"),
    _row("bamba", "BambaForCausalLM"),
    _row("bart", None, "BartForSequenceClassification", head="classification_head"),
    _classifier("bert", None, "BertForSequenceClassification"),
    _row("bert-generation", "BertGenerationDecoder", causal_only=_DECODER_HEAD),
    _classifier("big_bird", "BigBirdForCausalLM", "BigBirdForSequenceClassification", causal_only=_BERT_HEAD),
    _row("bigbird_pegasus", None, "BigBirdPegasusForSequenceClassification", head="classification_head"),
    _row("biogpt", "BioGptForCausalLM", "BioGptForSequenceClassification", causal_only=("output_projection.weight",)),
    _row("bitnet", "BitNetForCausalLM"),
    _row("blenderbot", "BlenderbotForCausalLM"),
    _row("blenderbot-small", "BlenderbotSmallForCausalLM"),
    _row("bloom", "BloomForCausalLM", "BloomForSequenceClassification"),
    _row("blt", "BltForCausalLM"),
    _classifier("camembert", "CamembertForCausalLM", "CamembertForSequenceClassification", causal_only=_ROBERTA_HEAD),
    _classifier("canine", None, "CanineForSequenceClassification"),
    _row("codegen", "CodeGenForCausalLM", causal_only=_BIASED_HEAD),
    _row("cohere", "CohereForCausalLM"),
    _row("cohere2", "Cohere2ForCausalLM"),
    _row("cohere_compass_text", "CohereCompassForCausalLM", "CohereCompassTextForSequenceClassification"),
    _classifier("convbert", None, "ConvBertForSequenceClassification"),
    _row("cpmant", "CpmAntForCausalLM"),
    _classifier("ctrl", "CTRLLMHeadModel", "CTRLForSequenceClassification", causal_only=_BIASED_HEAD),
    _row("cwm", "CwmForCausalLM"),
    _classifier(
        "data2vec-text", "Data2VecTextForCausalLM", "Data2VecTextForSequenceClassification", causal_only=_ROBERTA_HEAD
    ),
    _row("dbrx", "DbrxForCausalLM"),
    _classifier("deberta", None, "DebertaForSequenceClassification", wide_in=_SIXTEEN_BITS),
    _classifier("deberta-v2", None, "DebertaV2ForSequenceClassification"),
    _row("diffllama", "DiffLlamaForCausalLM", "DiffLlamaForSequenceClassification"),
    _classifier("distilbert", None, "DistilBertForSequenceClassification"),
    _row("doge", "DogeForCausalLM", "DogeForSequenceClassification"),
    _classifier("electra", "ElectraForCausalLM", "ElectraForSequenceClassification", causal_only=_ELECTRA_HEAD),
    _classifier("ernie", None, "ErnieForSequenceClassification"),
    _row("ernie4_5", "Ernie4_5ForCausalLM"),
    _classifier("esmc", None, "EsmcForSequenceClassification"),
    _classifier("eurobert", None, "EuroBertForSequenceClassification"),
    _row("exaone4", "Exaone4ForCausalLM", "Exaone4ForSequenceClassification"),
    _row("falcon", "FalconForCausalLM", "FalconForSequenceClassification"),
    _row("falcon_h1", "FalconH1ForCausalLM"),
    _row("falcon_mamba", "FalconMambaForCausalLM"),
    _row("flaubert", None, "FlaubertForSequenceClassification", head="sequence_summary"),
    _classifier("fnet", None, "FNetForSequenceClassification"),
    _classifier("funnel", None, "FunnelForSequenceClassification"),
    _row("gemma", "GemmaForCausalLM", "GemmaForSequenceClassification"),
    _row("gemma2", "Gemma2ForCausalLM", "Gemma2ForSequenceClassification"),
    _row("gemma3_text", "Gemma3ForCausalLM", "Gemma3TextForSequenceClassification"),
    _row("gemma4", "Gemma4ForConditionalGeneration"),
    _row("gemma4_text", "Gemma4ForCausalLM"),
    _row("gemma4_unified_text", "Gemma4UnifiedForCausalLM"),
    _row("git", "GitForCausalLM", causal_only=("output.bias", "output.weight")),
    _row("glm", "GlmForCausalLM", "GlmForSequenceClassification"),
    _row("glm4", "Glm4ForCausalLM", "Glm4ForSequenceClassification"),
    _row("gpt2", "GPT2LMHeadModel", "GPT2ForSequenceClassification", conv1d=_GPT2_CONV1D),
    _row("gpt_bigcode", "GPTBigCodeForCausalLM", "GPTBigCodeForSequenceClassification"),
    _row("gpt_neo", "GPTNeoForCausalLM", "GPTNeoForSequenceClassification"),
    _row("gpt_neox", None, "GPTNeoXForSequenceClassification"),
    _row("gpt_neox_japanese", "GPTNeoXJapaneseForCausalLM", causal_only=("embed_out.weight",)),
    _row("gpt_oss", "GptOssForCausalLM", "GptOssForSequenceClassification", wide_in=_HALF),
    _row("gptj", "GPTJForCausalLM", "GPTJForSequenceClassification", causal_only=_BIASED_HEAD),
    _row("granite", "GraniteForCausalLM"),
    _row("granite_swa", "GraniteSWAForCausalLM"),
    _row("granitemoe_swa", "GraniteMoeSWAForCausalLM"),
    _row("helium", "HeliumForCausalLM", "HeliumForSequenceClassification"),
    _row("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", "HunYuanDenseV1ForSequenceClassification"),
    _row("hyperclovax", "HyperCLOVAXForCausalLM"),
    _classifier("ibert", None, "IBertForSequenceClassification"),
    _row("inkling_text", "InklingForCausalLM", wide_in=_SIXTEEN_BITS),
    _row("internlm3", "LlamaForCausalLM"),
    _row("iquestcoder", "LlamaForCausalLM"),
    _row("jais2", "Jais2ForCausalLM"),
    _row("jetmoe", "JetMoeForCausalLM", "JetMoeForSequenceClassification"),
    _classifier("layoutlm", None, "LayoutLMForSequenceClassification"),
    _classifier("layoutlmv3", None, "LayoutLMv3ForSequenceClassification"),
    _row("lfm2", "Lfm2ForCausalLM"),
    _classifier("lilt", None, "LiltForSequenceClassification"),
    _row("llama", "LlamaForCausalLM", "LlamaForSequenceClassification"),
    _row("llama4_text", "Llama4ForCausalLM"),
    _classifier("longformer", None, "LongformerForSequenceClassification"),
    _classifier("luke", None, "LukeForSequenceClassification"),
    _row("mamba", "MambaForCausalLM"),
    _row("mamba2", "Mamba2ForCausalLM"),
    _row("marian", "MarianForCausalLM"),
    _classifier("markuplm", None, "MarkupLMForSequenceClassification"),
    _row("mbart", None, "MBartForSequenceClassification", head="classification_head"),
    _classifier("megatron-bert", None, "MegatronBertForSequenceClassification"),
    _row("minicpm3", "MiniCPM3ForCausalLM", "MiniCPM3ForSequenceClassification"),
    _row("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM"),
    _row("ministral", "MinistralForCausalLM", "MinistralForSequenceClassification"),
    _row("ministral3", "Ministral3ForCausalLM", "Ministral3ForSequenceClassification"),
    _row("mistral", "MistralForCausalLM", "MistralForSequenceClassification"),
    _row("mistral4", None, "Mistral4ForSequenceClassification"),
    _classifier("mobilebert", None, "MobileBertForSequenceClassification"),
    _classifier("modernbert", None, "ModernBertForSequenceClassification"),
    _row("modernbert-decoder", "ModernBertDecoderForCausalLM", causal_only=_MODERNBERT_HEAD),
    _classifier("mpnet", None, "MPNetForSequenceClassification"),
    _row("mpt", "MptForCausalLM", "MptForSequenceClassification"),
    _row("mt5", None, "MT5ForSequenceClassification", head="classification_head", wide_in=_HALF),
    _row("mvp", None, "MvpForSequenceClassification", head="classification_head"),
    _row("nanochat", "NanoChatForCausalLM"),
    _row("nemotron", "NemotronForCausalLM", "NemotronForSequenceClassification"),
    _classifier("nystromformer", None, "NystromformerForSequenceClassification"),
    _row("olmo", "OlmoForCausalLM", "OlmoForSequenceClassification"),
    _row("olmo2", "Olmo2ForCausalLM", "Olmo2ForSequenceClassification"),
    _row("olmo3", "Olmo3ForCausalLM", "Olmo3ForSequenceClassification"),
    _row("openai-gpt", "OpenAIGPTLMHeadModel", "OpenAIGPTForSequenceClassification", conv1d=_GPT_CONV1D),
    _row("opt", "OPTForCausalLM", "OPTForSequenceClassification"),
    _row("pegasus", "PegasusForCausalLM"),
    _row("perceiver", None, "PerceiverForSequenceClassification", head="perceiver.decoder.decoder.final_layer"),
    _row("persimmon", "PersimmonForCausalLM", "PersimmonForSequenceClassification"),
    _row("phi", "PhiForCausalLM", "PhiForSequenceClassification", causal_only=_BIASED_HEAD),
    _row("phi3", "Phi3ForCausalLM", "Phi3ForSequenceClassification"),
    _row("phi4_multimodal", "Phi4MultimodalForCausalLM"),
    _row("plbart", None, "PLBartForSequenceClassification", head="classification_head"),
    _row("prophetnet", "ProphetNetForCausalLM"),
    _row("qwen2", "Qwen2ForCausalLM", "Qwen2ForSequenceClassification"),
    _row("qwen3", "Qwen3ForCausalLM", "Qwen3ForSequenceClassification"),
    _row("recurrent_gemma", "RecurrentGemmaForCausalLM"),
    _classifier(
        "reformer",
        "ReformerModelWithLMHead",
        "ReformerForSequenceClassification",
        causal_only=("lm_head.bias", "lm_head.decoder.weight"),
        wide_in=_SIXTEEN_BITS,
    ),
    _classifier("rembert", None, "RemBertForSequenceClassification"),
    _classifier("roberta", "RobertaForCausalLM", "RobertaForSequenceClassification", causal_only=_ROBERTA_HEAD),
    _classifier(
        "roberta-prelayernorm",
        "RobertaPreLayerNormForCausalLM",
        "RobertaPreLayerNormForSequenceClassification",
        causal_only=_ROBERTA_HEAD,
    ),
    _classifier("roc_bert", None, "RoCBertForSequenceClassification"),
    _classifier("roformer", "RoFormerForCausalLM", "RoFormerForSequenceClassification", causal_only=_BERT_HEAD),
    _row("rwkv", "RwkvForCausalLM", causal_only=("head.weight",), wide_in=_HALF),
    _row("seed_oss", "SeedOssForCausalLM", "SeedOssForSequenceClassification"),
    _row("smollm3", "SmolLM3ForCausalLM", "SmolLM3ForSequenceClassification"),
    _classifier("squeezebert", None, "SqueezeBertForSequenceClassification"),
    _row("stablelm", "StableLmForCausalLM", "StableLmForSequenceClassification"),
    _row("starcoder2", "Starcoder2ForCausalLM", "Starcoder2ForSequenceClassification"),
    _row("t5", None, "T5ForSequenceClassification", head="classification_head", wide_in=_HALF),
    _row("t5gemma", None, "T5GemmaForSequenceClassification"),
    _classifier("tapas", None, "TapasForSequenceClassification"),
    _row("trocr", "TrOCRForCausalLM", causal_only=("output_projection.weight",)),
    _row("umt5", None, "UMT5ForSequenceClassification", head="classification_head", wide_in=_HALF),
    _row("vaultgemma", "VaultGemmaForCausalLM"),
    _row("whisper", "WhisperForCausalLM", causal_only=("proj_out.weight",)),
    _row("xglm", "XGLMForCausalLM"),
    _row(
        "xlm",
        "XLMWithLMHeadModel",
        "XLMForSequenceClassification",
        head="sequence_summary",
        causal_only=("pred_layer.proj.bias", "pred_layer.proj.weight"),
    ),
    _classifier(
        "xlm-roberta", "XLMRobertaForCausalLM", "XLMRobertaForSequenceClassification", causal_only=_ROBERTA_HEAD
    ),
    _classifier(
        "xlm-roberta-xl", "XLMRobertaXLForCausalLM", "XLMRobertaXLForSequenceClassification", causal_only=_ROBERTA_HEAD
    ),
    _row("xlnet", "XLNetLMHeadModel", causal_only=("lm_loss.bias", "lm_loss.weight"), wide_in=_SIXTEEN_BITS),
    _row("xlstm", "xLSTMForCausalLM"),
    _classifier("xmod", "XmodForCausalLM", "XmodForSequenceClassification", causal_only=_ROBERTA_HEAD),
    _classifier("yoso", None, "YosoForSequenceClassification"),
    _row("youtu", "YoutuForCausalLM"),
    _row("zaya", "ZayaForCausalLM", wide_in=_SIXTEEN_BITS),
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType({row.model_type: row for row in _ROWS})
"""Every row, by model type."""
