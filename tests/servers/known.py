"""Where the servers and `validate` or `prepare` do not agree today; a row that is mended fails its test, and goes."""

from __future__ import annotations

from collections.abc import Mapping

from lora_tool import Server

KNOWN: Mapping[tuple[Server, str, str], str] = {
    # the converter stacks all three matrices of an expert, and says loudly that some are missing; `prepare` adds zeros
    **{
        (Server.LLAMA_CPP, base, "experts-down-only-one-by-one"): "refused, and no error"
        for base in ("qwen3-moe", "mixtral")
    },
    # the config's blocks are of a module that Phi-3 does not have
    (Server.LLAMA_CPP, "phi3", "block-diagonal"): "right, but LT810; right, but prepare refuses",
}
