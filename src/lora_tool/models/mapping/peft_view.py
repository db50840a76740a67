"""What PEFT would make of an adapter on this model: asked of PEFT itself, on a model without weights.

PEFT translates adapters of earlier transformers, and some of today's by mistake: their tensors end up under names that
no layer has, and are left out with a warning. `--precision peft` promises PEFT's bits, so such an adapter is refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from lora_tool.core.errors import MissingDependency, UnsupportedAdapter
from lora_tool.core.keys import PREFIX
from lora_tool.models.mapping.model import ShapeOnDisk

try:
    import peft
    from peft.utils.transformers_weight_conversion import convert_peft_adapter_state_dict_for_transformers
except ImportError as error:  # pragma: no cover - the test environment has it
    raise MissingDependency("peft>=0.21", extra="merge") from error


def dropped_by_peft(model: PreTrainedModel, folder: Path, tensors: Mapping[str, ShapeOnDisk]) -> tuple[str, ...]:
    """Return the LoRA tensors for which `PeftModel.from_pretrained` would have no place, as PEFT would call them.

    `tensors` are the adapter's, by their names in the file without an adapter's name. `model` gets the layers of LoRA.
    Raises `UnsupportedAdapter` where PEFT refuses the adapter.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = peft.PeftConfig.from_pretrained(str(folder))
            peft.inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
            held = {name: torch.empty(shape, device="meta") for name, shape in tensors.items() if ".lora_" in name}
            translated = convert_peft_adapter_state_dict_for_transformers(model, config, held)
    except Exception as error:  # whatever PEFT raises, it would raise in the merge that is to be equalled
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedAdapter(
            f"{folder}: PEFT {peft.__version__} cannot load it: {reason}",
            hint='`precision="float32"` merges without PEFT',
        ) from error
    places = {PREFIX + _saved(name.replace(".default", "")) for name in model.state_dict() if ".lora_" in name}
    return tuple(name for name in translated if _saved(name) not in places)


def _saved(name: str) -> str:
    """Return a tensor's name as PEFT saves it: DoRA's magnitude is a module in memory."""
    return name.removesuffix(".weight") if name.endswith(".lora_magnitude_vector.weight") else name
