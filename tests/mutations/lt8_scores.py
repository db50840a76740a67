"""LT825: what servers make of a reward."""

from __future__ import annotations

from tests.mutations.registry import MERGED, REWARD, Edit, enter
from tests.mutations.served import for_servers

enter(
    __name__,
    {
        **for_servers("LT825", Edit(MERGED, quiet=True), "vllm", "sglang", "peft"),
        "LT825 of an adapter": Edit(REWARD, quiet=True, options={"servers": ["peft"]}),
    },
)
