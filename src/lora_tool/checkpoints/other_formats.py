"""Weights in the formats of other programs: lora-tool names each format and says how to convert it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from msgspec import Struct

from lora_tool.checkpoints.folders import Folder
from lora_tool.core.display import some
from lora_tool.core.errors import BrokenFile, UnsupportedCheckpoint
from lora_tool.core.keys import PREFIX, Part, parse
from lora_tool.formats.files import read_object
from lora_tool.formats.weights import Weights, read_single


class OtherFormat(Struct, frozen=True, kw_only=True):
    """A description of the weights, and how to get them in the form that PEFT or transformers writes."""

    text: str
    way_out: str


_MLX = OtherFormat(
    text="an adapter of MLX-LM, with transposed factors and its own names",
    way_out="convert it to PEFT's format and use the result: lora-tool convert FOLDER --to peft -o OUT",
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
_TUNIX = OtherFormat(
    text="an adapter of Tunix, with JAX's names and transposed factors",
    way_out="merge it with Tunix, or export it from Tunix in PEFT's format",
)
_ADAPTER_HUB = OtherFormat(
    text="the config of an adapter of AdapterHub's `adapters`, not PEFT's",
    way_out="merge it with that library: model.load_adapter(folder), model.merge_adapter(NAME)",
)
_LEROBOT = OtherFormat(
    text="the config of a LeRobot policy, not of a transformers model", way_out="load it with LeRobot itself"
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
    text="a checkpoint of Megatron-LM",
    way_out="for its LoRA: lora-tool consolidate FOLDER/iter_NNNNNNN; "
    "convert a whole model with the program that made it",
)
_VERL_RANK = OtherFormat(
    text="the LoRA of one rank of verl's engine for Megatron, which does not record how it was cut",
    way_out="resume the run with a verl that saves it as `model/dist_ckpt`, or have that verl export it: `hf_model` in its "
    "`checkpoint.save_contents`",
)
_SKYRL_RANK = OtherFormat(
    text="the LoRA of one rank of SkyRL's engine for Megatron, which does not record how it was cut",
    way_out="export it with the SkyRL that made it, or train with its FSDP engine, whose saves are read",
)
_VARIANT = OtherFormat(
    text="a variant, which transformers loads only when you name it",
    way_out="save it once without the variant: from_pretrained(FOLDER, variant=…), save_pretrained(NEW)",
)
_ORIGINAL = OtherFormat(
    text="in its publisher's original format, not in transformers'",
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
    (r"mp_rank_\d{2}(_\d{3}){0,2}_adapter\.pt\Z", _VERL_RANK),
    (r"adapter_tp\d+_pp\d+\w*\.pt\Z", _SKYRL_RANK),
)
_MODELS = (
    (r"(model|pytorch_model)\.(?!safetensors\b|bin\b)[\w]+(-\d{5}-of-\d{5})?\.(safetensors|bin)\Z", _VARIANT),
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
    (r"(unet|text_encoder(_\d)?|transformer\.(single_)?transformer_blocks)\b.*\.lora(_[AB]|\.up|\.down)\b", _DIFFUSERS),
    (r".*(kernel|\bw)_lora_[ab]\Z", _TUNIX),
    (r"[^A-Z]*\.lora_[ab]\Z", _MLX),
    (r"[^A-Z]*\.lora_[ab]\.weight\Z", _TORCHTUNE),
)

_BY_FIELDS = ((frozenset({"model_class", "config"}), _ADAPTER_HUB), (frozenset({"type", "input_features"}), _LEROBOT))
"""Fields that are in another program's config together, and in no config of PEFT's or transformers'."""


def refuse_files(folder: Folder, *, adapter: bool | None = None) -> None:
    """Raise `UnsupportedCheckpoint` where the folder has a file of another program.

    `adapter` is whether the folder's config is an adapter's or a model's; None without a config: then the names of the
    tensors also count.
    """
    _refuse(folder, (*(_ADAPTERS if adapter is not False else ()), *(_MODELS if adapter is not True else ()), *_ANY))
    single = next((name for name in folder.files if name.endswith(".safetensors")), None)
    if adapter is None and single is not None:
        refuse_tensors(read_single(folder.root / single))


def refuse_tensors(weights: Weights) -> None:
    """Raise `UnsupportedCheckpoint` where all tensors have one other program's names."""
    other = _of_tensors(weights.tensors.keys())
    if other is not None:
        raise _unsupported(weights.files[0].path, other)


def refuse_config(path: Path, names: Collection[str] | None = None) -> None:
    """Raise `UnsupportedCheckpoint` where the config `path`, which has no `peft_type` or `model_type`, is another program's.

    `names` are those of an adapter's tensors. If the config has no `peft_type` and no name is PEFT's, the format is
    homemade, and a finding for each of its fields and tensors would not help.
    """
    try:
        raw = read_object(path)
    except BrokenFile:
        return  # a finding of its own
    for fields, other in _BY_FIELDS:
        if fields <= raw.keys():
            raise _unsupported(path, other)
    if names and not any(parse(name).part is not Part.PLAIN for name in names):
        raise UnsupportedCheckpoint(
            f"{path} is not PEFT's: it has no `peft_type`, and no tensor beside it has a name of PEFT's: {some(names, 2)}",
            hint="save the adapter with PEFT: model.save_pretrained(folder)",
        )


def is_known(name: str) -> bool:
    """Return whether a file of this name is known to belong to another program."""
    return any(re.match(pattern, name) for pattern, _ in (*_ADAPTERS, *_MODELS, *_ANY))


def _refuse(folder: Folder, known: Iterable[tuple[str, OtherFormat]]) -> None:
    for name in folder.files:
        for pattern, other in known:
            if re.match(pattern, name):
                raise _unsupported(folder.root / name, other)


def _unsupported(path: Path, other: OtherFormat) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(f"{path} is {other.text}", hint=other.way_out)


def _of_tensors(names: Collection[str]) -> OtherFormat | None:
    """Return the format of another program that all of these names belong to, None if there is none."""
    if any(name.startswith(PREFIX) for name in names):
        return None
    for pattern, other in _BY_TENSORS:
        if names and all(re.match(pattern, name) for name in names):
            return other
    return None
