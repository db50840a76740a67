"""What the rules about servers share: who they are, and the commands that make of an adapter what one takes.

What is said of vLLM is from its `vllm/lora/peft_helper.py` and `lora_model.py`, of SGLang from its
`python/sglang/srt/lora/` (`lora_config.py`, `lora_manager.py`, `utils.py`), of llama.cpp from its
`convert_lora_to_gguf.py` and `src/llama-adapter.cpp`, of MLX-LM from its `mlx_lm/tuner/utils.py`, as of autumn 2026.
They change fast: where older releases behave otherwise, the message says so. What another form of the same ΔW mends,
`lora-tool prepare` writes, and the finding names it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from lora_tool.report import Severity
from lora_tool.rules.engine.registry import Fault, Need
from lora_tool.rules.engine.subjects import AdapterSubject, Server

NEEDS = frozenset({Need.CONFIG, Need.SERVER})
WHOLE = NEEDS | {Need.WEIGHTS}

SERVERS = (Server.VLLM, Server.SGLANG, Server.LLAMA_CPP, Server.MLX)
"""Those that take no code of PEFT's."""

NAMES = {
    Server.PEFT: "PEFT",
    Server.VLLM: "vLLM",
    Server.SGLANG: "SGLang",
    Server.LLAMA_CPP: "llama.cpp",
    Server.MLX: "MLX-LM",
}


def fault(
    subject: AdapterSubject,
    where: str | None,
    message: str,
    *,
    severity: Severity | None = None,
    hint: str | None = None,
) -> Fault:
    """Return a fault of the config, whose hint is to merge unless another is given."""
    hint = hint or merged(subject)
    return Fault(message=message, subject=where, path=subject.config_path, severity=severity, hint=hint)


def asked(subject: AdapterSubject, *servers: Server) -> Iterator[Server]:
    """Yield those of `servers` that were asked for, in the order of the words."""
    return (server for server in servers if server in subject.servers)


def merged(subject: AdapterSubject) -> str:
    """Return the command that makes a model of it, which every server takes."""
    root = str(subject.checkpoint.root)
    reward = "--rm " if subject.is_reward() else ""
    return f"merge it and serve the merged model: lora-tool merge {reward}{shlex.quote(root)}"


def prepared(subject: AdapterSubject, server: Server, more: str = "") -> str:
    """Return the command that writes the same ΔW in the form that the server reads."""
    root = shlex.quote(str(subject.checkpoint.root))
    return (
        f"write the same ΔW in the form {NAMES[server]} reads: lora-tool prepare {root} --for "
        f"{server.value}{more} -o OUT"
    )


def with_base(subject: AdapterSubject, server: Server) -> str:
    """Return the commands that write it with the base at hand, or make a model of it."""
    return f"{prepared(subject, server, ' --base BASE')}; or {merged(subject)}"


def one_by_one(subject: AdapterSubject, server: Server) -> str:
    """Return the commands that write LoRA on fused experts one by one, then in the form that the server reads."""
    root = shlex.quote(str(subject.checkpoint.root))
    return (
        f"write the experts one by one: lora-tool convert {root} --to peft-experts --base BASE -o EXPERTS, "
        f"then lora-tool prepare EXPERTS --for {server.value} -o OUT"
    )
