"""What checkpoints, and the adapters on them, call the matrices of single experts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d{1,6})\.(?P<projection>\w+)")
"""The path of an expert's matrix."""
LISTED = re.compile(r"(?P<experts>.+\.experts)\.(?P<projection>(gate_up|down)_projs)\.(?P<number>\d{1,6})")
"""The path of a matrix in Unsloth's 4-bit gpt-oss: `gate_up_projs.0` is the transposed `gate_up_proj[0]`."""
IN_EXPERT = re.compile(r"\.experts\.\d+\.")
"""Where the path of a module, or of a tensor, goes through a single expert."""
GATE_UP, DOWN = "gate_up_proj", "down_proj"
FUSED = (GATE_UP, "up_proj", DOWN)
"""What transformers 5 calls the parameters that hold the matrices of all experts, in the order of the module; those of
experts without a gate have the second."""
PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Gate, up and down: most models' names, and Mixtral's."""
_LIKE_QWEN = (
    "afmoe beam cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5_moe exaone_moe flex_olmo "
    "glm4_moe glm4_moe_lite glm4v_moe glm_moe_dsa hunyuan_v1_moe longcat_flash mellum olmoe qwen3_moe "
    "qwen3_next qwen3_omni_moe qwen3_omni_moe_text qwen3_omni_moe_thinker solar_open"
)
STACKED_BY_PEFT: Mapping[str, Sequence[str]] = MappingProxyType(
    dict.fromkeys(_LIKE_QWEN.split(), PROJECTIONS[0])
    | dict.fromkeys(("minimax", "minimax_m2", "mixtral"), PROJECTIONS[1])
)
"""Model type whose LoRA on single experts PEFT 0.21 stacks → their matrices. It takes LoRA on any other module with the
last part of such a name, of a shared expert, say, for LoRA on the stacks, and loads none of it."""


UNKNOWN_TO_PEFT = frozenset(
    """
    axk1 axk2 bailing_hybrid deepseek_ocr2 deepseek_v4 dots3_note_vision_encoder ernie4_5_vl_moe flint glm5_next
    glm5_next_text hy_v3 jamba kimi_k25 kimi_linear kolibri1 laguna lfm2_moe mimo_v2_flash minimax_m3_vl
    mistral_large4_text nemotron_h phimoe qwen2_moe qwen3_5_moe_text qwen4_exp_text
    """.split()  # noqa: SIM905 - a table
)
"""Model types whose single experts transformers 5 stacks, too, and PEFT 0.21 loads no LoRA on."""


def is_single(module: str) -> bool:
    """Return whether a module is a matrix of one expert, by its path."""
    return EXPERT.fullmatch(module) is not None or LISTED.fullmatch(module) is not None


def experts_of(module: str) -> str | None:
    """Return the path of the experts that a module is one matrix in; None for any other module."""
    found = EXPERT.fullmatch(module)
    return found["experts"] if found else None


def is_taken_for_stacks(module: str, model_type: str | None) -> bool:
    """Return whether PEFT takes LoRA on the module, which is of no expert, for LoRA on the stacks of experts.

    PEFT 0.21 compares only the last parts of names (`_convert_peft_config_moe`): shared experts and dense layers match.
    """
    stacked = STACKED_BY_PEFT.get(model_type or "", ())
    return module.rpartition(".")[2] in stacked and not EXPERT.fullmatch(module)


def parameter_of(target: str, names: Sequence[str], *, nested: int, count: int) -> str | None:
    """Return which parameter of a module LoRA changes, one of those that `target_parameters` names; None if none is known.

    PEFT wraps one parameter of a module after the other: this one is `nested` in so many others, of `count` in all.
    """
    known = FUSED if target.rpartition(".")[2] == "experts" else ("weight",)
    adapted = [each for each in known if any(f".{target}.{each}".endswith(f".{name}") for name in names)]
    return adapted[count - 1 - nested] if len(adapted) == count > nested else None
