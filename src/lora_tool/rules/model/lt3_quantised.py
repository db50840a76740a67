"""LT322: whether the quantised weights of a model, and what its config says of them, belong together."""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.checkpoint.quantised import quantisation_table, quantised_weights
from lora_tool.formats.quantised.layouts import is_sign
from lora_tool.formats.quantised.names import READ_METHODS
from lora_tool.formats.quantised.parts import LayoutError
from lora_tool.report import Severity
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import ModelSubject

_ELSEWHERE = "hf_quant_config.json"
"""Where modelopt says what others say in config.json."""
_EVERY_LINEAR = frozenset({"bitsandbytes", "fbgemm_fp8", "fp8", "mxfp4"})
"""Methods whose config means that weights are quantised, whatever else it says."""


@rule("LT322", Severity.ERROR, on=ModelSubject, needs=frozenset({Need.CONFIG, Need.WEIGHTS}))
def quantised_otherwise(subject: ModelSubject) -> Iterator[Fault]:
    """Quantised weights that no loader would read as they were written.

    What it does: Looks whether every quantised weight has its scales, in the shapes that format and config give, and
    whether the config says that weights are quantised exactly where they are.

    Why it matters: transformers ignores scales that no config announces and runs on the raw codes; it makes up weights
    that lie under names of another format; a grid of another tile size scales the wrong values. None of it fails.

    Example: `save_pretrained` after PEFT's merge into an FP8 base leaves `weight_scale_inv` and drops
    `quantization_config`; after one into GPT-OSS it stores bfloat16 under the names `…_blocks`.

    What to do: Copy or merge the model again: `lora-tool merge ADAPTER --base QUANTISED` writes plain weights and a
    plain config.
    """
    model = subject.checkpoint
    config = model.config
    if config is None or config.quantization not in READ_METHODS or config.custom_code:
        return
    sign = next(filter(is_sign, model.tensors.values()), None)
    if sign is not None and not quantisation_table(config) and _ELSEWHERE not in model.folder.files:
        message = f"is stored as a quantised weight ({sign.dtype}), and config.json does not say so: no loader would decode it"
        yield Fault(subject=sign.name, message=message, path=str(sign.path))
        return
    try:
        found = quantised_weights(model)
    except LayoutError as error:
        if error.is_fault:
            yield Fault(subject=error.tensor, message=error.why, path=str(error.path))
        return
    if not found.weights and config.quantization in _EVERY_LINEAR:
        message = f"says that the weights are quantised ({config.quantization}), and none is"
        yield Fault(subject="quantization_config", message=message, path=str(config.path))
