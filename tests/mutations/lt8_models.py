"""LT817 to LT819: names of tensors, models and versions that servers do not know."""

from __future__ import annotations

from tests.mutations.registry import CAUSAL, Edit, enter
from tests.mutations.served import for_servers, plain

EDITS = {
    **for_servers(
        "LT817",
        Edit(CAUSAL, by=plain, renamed=lambda name: name.replace(".weight", ".default.weight")),
        "vllm",
        "llama.cpp",
    ),
    "LT818": Edit(
        CAUSAL,
        by=plain,
        base={"architectures": ["GPTJForCausalLM"]},
        with_base=True,
        options={"servers": ["vllm"], "select": ("LT818",)},
    ),
    "LT819": Edit(CAUSAL, by=plain, quiet=True, options={"servers": ["vllm@0.32.7"]}),
}
enter(__name__, EDITS)
