"""`lora-tool prepare`: an adapter → the form of it that a server reads."""

from __future__ import annotations

from typing import Any

import click

from lora_tool.cli.options import FolderOrId, Parsed, Timed, options_of, typed_as
from lora_tool.cli.writing import caller, run_options
from lora_tool.rules.serving.named import SERVER_NAMES, server_named
from lora_tool.workflows.prepare import PrepareOptions, prepare


@click.command("prepare", cls=Timed, epilog="Example: lora-tool prepare my-adapter/ --for vllm -o my-adapter-vllm/")
@click.argument("adapter", type=FolderOrId(), metavar="ADAPTER")
@click.option(
    "--for",
    "server",
    type=Parsed(server_named),
    metavar=SERVER_NAMES,
    required=True,
    help="Server or program that will read the adapter; `vllm@0.32` is one version.",
)
@options_of(PrepareOptions)
@run_options
def command(adapter: str, *, server: str, **typed: Any) -> None:
    """Rewrite ADAPTER in the form that a server reads, with the same ΔW.

    One scaling of all modules stays in the config; others are multiplied into B, so the server need not know rsLoRA or
    alpha patterns. All ranks are padded to one with zeros; targets become plain names; for MLX-LM, factors are
    transposed. With --base, PiSSA and OLoRA become plain LoRA of twice the rank, and trained tokens and changed
    embedding rows become LoRA on the embedding; SGLang loads q, k, v only as a group, so missing members get zero LoRA.
    What the server cannot represent exactly (DoRA, biases, other saved modules) is refused by name;
    `lora-tool validate --for SERVER` lists it.
    """
    prepare(adapter, server, typed_as(PrepareOptions, typed), caller(typed))
