"""The commands that make of an adapter what a server takes, as findings name them."""

from __future__ import annotations

import shlex

from lora_tool.rules.engine.subjects import AdapterSubject, Server

NAMES = {
    Server.PEFT: "PEFT",
    Server.VLLM: "vLLM",
    Server.SGLANG: "SGLang",
    Server.LLAMA_CPP: "llama.cpp",
    Server.MLX: "MLX-LM",
}


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
