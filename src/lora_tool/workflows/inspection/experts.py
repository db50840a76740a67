"""How a model's experts lie on disk, and how transformers has them in memory: which servers read them depends on it."""

from __future__ import annotations

import re

from lora_tool.adapters.experts import EXPERT
from lora_tool.core.tensors import TensorTable
from lora_tool.formats.model_config import ModelConfig

_STACK = re.compile(r".*\.experts\.(?P<matrix>\w*(?:gate|up|down)\w*|w[123])(?:\.weight)?")
_DOWN = re.compile(r"down|w2")
_ONE_PER_EXPERT = 3
_OUT_IN, _IN_OUT = "[experts, out, in]", "[experts, in, out]"
_TRANSPOSED_IN_MEMORY = frozenset({"aria", "aria_text", "gpt_oss", "llama4", "llama4_text", "openai_privacy_filter"})
"""Model types whose stacks are [experts, in, out] in transformers 5.23; those of all others are [experts, out, in]."""


def layout_of_experts(tensors: TensorTable, config: ModelConfig | None) -> str | None:
    """Return how the experts' matrices lie on disk and in memory; None for a model without experts.

    The orientation of a stack is told by the hidden size, which is the rows of a matrix or its columns.
    """
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        shown = f"{name[name.find('.experts.') + 1 :]} {list(tensor.shape)}"
        stack = _STACK.fullmatch(name)
        if stack and len(tensor.shape) == _ONE_PER_EXPERT:
            way = _orientation(tensor.shape, config, is_down=_DOWN.search(stack["matrix"]) is not None)
            found.setdefault(f"one tensor for all experts{way and f', {way}'}", shown)
        elif EXPERT.fullmatch(name.removesuffix(".weight")):
            found.setdefault("one matrix per expert", shown)
    if not found:
        return None
    on_disk = "; ".join(f"{what} ({example})" for what, example in found.items())
    transposed = config is not None and config.model_type in _TRANSPOSED_IN_MEMORY
    in_memory = f"one tensor for all experts, {_IN_OUT if transposed else _OUT_IN}"
    return f"on disk: {on_disk}\nin memory, in transformers 5: {in_memory}"


def _orientation(shape: tuple[int, ...], config: ModelConfig | None, *, is_down: bool) -> str:
    """Return which way a stack of matrices lies; nothing where its shape does not tell."""
    raw = config.raw if config is not None else {}
    inner = raw.get("text_config")
    hidden = (inner if isinstance(inner, dict) else raw).get("hidden_size")
    rows, columns = shape[1:]
    if rows == columns or hidden not in (rows, columns):
        return ""
    return _OUT_IN if (rows == hidden) is is_down else _IN_OUT
