"""Where the servers and `validate` or `prepare` do not agree today; a row that is mended fails its test, and goes."""

from __future__ import annotations

from collections.abc import Mapping

from lora_tool import Server

_DENSE = ("llama", "qwen2", "qwen2-tied", "qwen3", "gemma3", "phi3")
_ALL = (*_DENSE, "qwen3-moe", "mixtral")

KNOWN: Mapping[tuple[Server, str, str], str] = {
    # `convert --to peft` gives the names their prefix first
    **{(Server.VLLM, base, "without-prefix"): "right, but prepare refuses" for base in _ALL},
    **{(Server.LLAMA_CPP, base, "without-prefix"): "right, but prepare refuses" for base in _ALL},
    # the converter stacks all three matrices of an expert, and says loudly that some are missing; `prepare` adds zeros
    **{
        (Server.LLAMA_CPP, base, "experts-down-only-one-by-one"): "refused, and no error"
        for base in ("qwen3-moe", "mixtral")
    },
    # the config's blocks are of a module that Phi-3 does not have
    (Server.LLAMA_CPP, "phi3", "block-diagonal"): "right, but LT810; right, but prepare refuses",
}
