"""LT322 and LT323: whether the quantised weights of a model, its config and one another belong together."""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.checkpoints.quantised import quantisation_table, quantised_weights, sign_of
from lora_tool.core.report import Severity
from lora_tool.formats.quantised.encodings import encoding_of
from lora_tool.formats.quantised.names import READ_METHODS, is_compressed
from lora_tool.formats.quantised.parts import LayoutError
from lora_tool.models.ends import MATRIX
from lora_tool.models.layers import fused_sets
from lora_tool.rules.engine.registry import Fault, Need, Unchecked, rule
from lora_tool.rules.engine.subjects import ModelSubject

_ELSEWHERE = "hf_quant_config.json"
"""Where modelopt says what others say in config.json."""
_EVERY_LINEAR = frozenset({"awq", "bitsandbytes", "fbgemm_fp8", "fp8", "gptq", "mxfp4", "mxfp8"})
"""Methods whose config means that weights are quantised, whatever else it says."""
_REFUSED_IN_PART = frozenset({"compressed-tensors", "fbgemm_fp8", "fp8", "modelopt", "mxfp8"})
"""Methods of which vLLM loads layers that it fuses only where all of them are quantised, or none."""


@rule("LT322", Severity.ERROR, on=ModelSubject, needs=frozenset({Need.CONFIG, Need.WEIGHTS}))
def quantised_otherwise(subject: ModelSubject) -> Iterator[Fault | Unchecked]:
    """Quantised weights that loaders misread.

    What it does: Checks that every quantised weight has its scales, in the shapes that format and config give, and that
    the config declares weights quantised exactly if they are.
    Why it matters: transformers ignores scales that the config does not announce and computes with the raw codes. It
    initialises weights at random if they have the names of another format. A grid of another tile size scales the wrong
    values. None of these raises an error.
    Example: `save_pretrained` after PEFT's merge into an FP8 base leaves `weight_scale_inv` and drops
    `quantization_config`; after one into GPT-OSS it stores bfloat16 under the names `…_blocks`.
    What to do: Copy or merge the model again: `lora-tool merge ADAPTER --base QUANTISED` writes unquantised weights and
    a matching config.
    """
    model = subject.checkpoint
    config = model.config
    if config is None or (config.custom_code and not config.quantization):
        return
    if config.quantization not in READ_METHODS or config.custom_code:
        yield Unchecked(reason=f"lora-tool does not read weights quantised by {config.quantization}")
        return
    sign = sign_of(model)
    if sign is not None and not quantisation_table(config) and _ELSEWHERE not in model.folder.files:
        message = (
            f"is stored as a quantised weight ({sign.dtype}), but config.json does not say so: loaders would "
            "not decode it"
        )
        yield Fault(subject=sign.name, message=message, path=sign.path)
        return
    try:
        found = quantised_weights(model)
    except LayoutError as error:
        of_file = Fault(subject=error.tensor, message=error.why, path=error.path)
        yield of_file if error.is_fault else Unchecked(reason=f"`{error.tensor}`: {error.why}")
        return
    if not found.weights and (config.quantization in _EVERY_LINEAR or is_compressed(quantisation_table(config))):
        message = f"says that the weights are quantised ({config.quantization}), but none is"
        yield Fault(subject="quantization_config", message=message, path=config.path)


@rule("LT323", Severity.WARNING, on=ModelSubject, needs=frozenset({Need.CONFIG, Need.WEIGHTS}))
def fused_layers_of_two_kinds(subject: ModelSubject) -> Iterator[Fault]:
    """Layers that servers fuse, some quantised and some not.

    What it does: Looks at the weights that a server puts into one: q, k and v of an attention, gate and up of an MLP,
    the experts of a layer. In FP8, compressed-tensors and modelopt's formats all of them are quantised, or none is.
    Why it matters: transformers loads such a model. vLLM refuses it: "Detected some but not all shards of qkv_proj are
    quantized".
    Example: A merge wrote `q_proj` in bfloat16, because the adapter changes it, and left `k_proj` and `v_proj` in FP8.
    What to do: Merge again: `lora-tool merge ADAPTER --base QUANTISED --store touched-16bit` writes whole sets.
    """
    method = subject.checkpoint.config.quantization if subject.checkpoint.config else None
    if method not in _REFUSED_IN_PART:
        return
    kinds: dict[str, dict[bool, str]] = {}
    for name, tensor in subject.matrices.items():
        if name.endswith(".weight") and len(tensor.shape) == MATRIX:
            for key in fused_sets(name):
                kinds.setdefault(key, {}).setdefault(encoding_of(tensor) is not None, name)
    for found in kinds.values():
        if len(found) > 1:
            message = f"is not quantised, and `{found[True]}` is: servers fuse the two, and vLLM refuses the model"
            yield Fault(subject=found[False], message=message, path=subject.matrices[found[False]].path)
