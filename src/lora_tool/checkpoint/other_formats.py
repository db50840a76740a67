"""Weights in the formats of other programs: not read, but called by their names, with the way to ours."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lora_tool.keys import PREFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherFormat:
    """What weights are in words, and what to do to have them as PEFT or transformers write them."""

    text: str
    way_out: str


_MLX = OtherFormat(
    text="an adapter of MLX-LM, with transposed factors and names of its own",
    way_out="merge it with the program that made it: mlx_lm.fuse --model MODEL --adapter-path FOLDER",
)
_DIFFUSERS = OtherFormat(
    text="a LoRA of diffusers, for a pipeline of several models",
    way_out="merge it with diffusers: pipeline.load_lora_weights(folder), pipeline.fuse_lora()",
)
_KOHYA = OtherFormat(
    text="a LoRA in the format of kohya's sd-scripts, for an image model",
    way_out="merge it with diffusers: pipeline.load_lora_weights(folder), pipeline.fuse_lora()",
)
_TORCHTUNE = OtherFormat(
    text="an adapter in torchtune's own format",
    way_out="give the adapter_model.safetensors that torchtune's FullModelHFCheckpointer writes in PEFT's format",
)
_LITGPT = OtherFormat(
    text="a LoRA of LitGPT", way_out="merge it with the program that made it: litgpt merge_lora FOLDER"
)
_LIGHTNING = OtherFormat(
    text="a checkpoint of Lightning",
    way_out="load it with Lightning, then save the model inside: model.save_pretrained(folder)",
)
_GGUF = OtherFormat(
    text="in llama.cpp's format GGUF",
    way_out="give the adapter or model that it was converted from, as PEFT or transformers wrote it",
)
_NEMO = OtherFormat(text="a checkpoint of NeMo", way_out="export it to transformers' format with NeMo itself")
_MEGATRON = OtherFormat(
    text="a checkpoint of Megatron-LM", way_out="convert it to transformers' format with the program that made it"
)
_VARIANT = OtherFormat(
    text="a variant, which transformers loads only where its name is given",
    way_out="save it plainly, once: from_pretrained(FOLDER, variant=…), save_pretrained(NEW)",
)
_ORIGINAL = OtherFormat(
    text="in the original format of its makers, not in transformers'",
    way_out="give the same model in transformers' format: a folder with config.json and model.safetensors",
)
_OTHER_FRAMEWORK = OtherFormat(
    text="of TensorFlow or Flax",
    way_out="convert it with transformers 4, once: from_pretrained(FOLDER, from_tf=True), save_pretrained(NEW)",
)

# patterns as text: hardly a folder needs them, and compiling takes longer than opening it
_ADAPTERS = (
    (r"(\d+_)?adapters\.(safetensors|npz)\Z", _MLX),
    (r"pytorch_lora_weights\.(safetensors|bin)\Z", _DIFFUSERS),
    (r"adapter_(model|\d+)\.pt\Z", _TORCHTUNE),
    (r"lit_model\.pth(\.lora)?\Z", _LITGPT),
)
_MODELS = (
    (
        r"(model|pytorch_model)\.(?!safetensors\b|bin\b)[\w]+(-\d{5}-of-\d{5})?\.(safetensors|bin)\Z",
        _VARIANT,
    ),
    (r"consolidated(\.\d+)?\.(pth|safetensors)\Z", _ORIGINAL),
    (r"(tf_model(-\d{5}-of-\d{5})?\.h5|flax_model(-\d{5}-of-\d{5})?\.msgpack)\Z", _OTHER_FRAMEWORK),
)
_ANY = (
    (r".+\.ckpt\Z", _LIGHTNING),
    (r".+\.gguf\Z", _GGUF),
    (r".+\.nemo\Z", _NEMO),
    (r"latest_checkpointed_iteration\.txt\Z", _MEGATRON),
)
_BY_TENSORS = (
    (r"lora_(unet|te\d?|transformer|prior)_[^.]+\.", _KOHYA),
    (
        r"(unet|text_encoder(_\d)?|transformer\.(single_)?transformer_blocks)\b.*\.lora(_[AB]|\.up|\.down)\b",
        _DIFFUSERS,
    ),
    (r"[^A-Z]*\.lora_[ab]\Z", _MLX),
    (r"[^A-Z]*\.lora_[ab]\.weight\Z", _TORCHTUNE),
)


def of_files(names: Iterable[str], *, adapter: bool | None = None) -> tuple[str, OtherFormat] | None:
    """Return the first file whose name another program's weights have, and what it is.

    `adapter` says what the folder's config makes of it: an adapter, a model; None where there is no config.
    """
    known = (*(_ADAPTERS if adapter is not False else ()), *(_MODELS if adapter is not True else ()), *_ANY)
    for name in names:
        for pattern, other in known:
            if re.match(pattern, name):
                return name, other
    return None


def of_tensors(names: Collection[str]) -> OtherFormat | None:
    """Return whose names these are, where all of them are one other program's."""
    if any(name.startswith(PREFIX) for name in names):
        return None
    for pattern, other in _BY_TENSORS:
        if names and all(re.match(pattern, name) for name in names):
            return other
    return None
