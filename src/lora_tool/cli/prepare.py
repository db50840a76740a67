"""`lora-tool prepare`: an adapter → the form of it that a server reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lora_tool.cli.algebra import dtype_option, output_option
from lora_tool.cli.options import FolderOrId, UserPath, base_option, ignore_option
from lora_tool.cli.timed import Timed
from lora_tool.cli.writing import ChoiceOf, carry_out, run_options, writing_options
from lora_tool.execution.folder import check_output
from lora_tool.hub_names import ANYWHERE
from lora_tool.rules.engine.subjects import Server
from lora_tool.sources import opened_adapter
from lora_tool.tensors import DType


@click.command("prepare", cls=Timed, epilog="Example: lora-tool prepare my-adapter/ --for vllm -o my-adapter-vllm/")
@click.argument("adapter", type=FolderOrId(), metavar="ADAPTER")
@click.option(
    "--for", "server", type=ChoiceOf(Server), required=True, help="Server or program that will read the adapter."
)
@output_option
@base_option(f"Base model to compute with, and to check the adapter against: {ANYWHERE}.")
@click.option("--max-rank", type=click.IntRange(min=1), help="Maximum rank that the server accepts.")
@click.option(
    "--approximate",
    is_flag=True,
    help="Accept an approximation of DoRA, and of modules that --max-rank is too low for.",
)
@click.option(
    "--reward-base",
    type=UserPath(),
    metavar="PATH",
    help="Also write the base with the adapter's head, which vLLM needs beside a reward adapter.",
)
@dtype_option
@ignore_option()
@writing_options(verify=True)
@run_options
def command(
    adapter: str,
    *,
    server: Server,
    output: Path,
    base: str | None,
    max_rank: int | None,
    approximate: bool,
    reward_base: Path | None,
    dtype: DType | None,
    ignore: tuple[str, ...],
    overwrite: bool,
    resume: bool,
    **how: Any,  # the arguments of `carry_out`
) -> None:
    """Rewrite ADAPTER in the form that a server reads, with the same ΔW.

    One scaling of all modules stays in the config; others are multiplied into B, so the server need not know rsLoRA or
    alpha patterns. All ranks are padded to one with zeros; targets become plain names; for MLX-LM, factors are
    transposed. With --base, PiSSA and OLoRA become plain LoRA of twice the rank, trained tokens and changed rows of
    embeddings become LoRA on those, and for SGLang modules that it reads only together get LoRA of zeros where they
    have none. What the server cannot represent exactly (DoRA, biases, other saved modules) is refused by name;
    `lora-tool validate --for SERVER` lists it.
    """
    opened = opened_adapter(adapter)
    check_output(output, overwrite=overwrite or resume, inputs=(opened.root,))
    if reward_base is not None and server is not Server.VLLM:
        raise click.UsageError(
            f"--reward-base is only for vLLM: {server} does not serve an adapter's head; merge the adapter instead: "
            "lora-tool merge --rm ADAPTER"
        )
    from lora_tool.pipeline.algebra import plan_reward_base, preparation  # after the options

    asked: dict[str, Any] = {"max_rank": max_rank, "approximate": approximate, "dtype": dtype, "ignore": ignore}
    with preparation(opened, server, output, base=base, **asked) as plan:
        beside = None if reward_base is None else plan_reward_base(opened, base)
        if beside is not None and reward_base is not None:  # both are planned before either is written
            check_output(reward_base, overwrite=overwrite or resume, inputs=tuple({opened.root, *beside.folders}))
        carry_out(plan, output, overwrite=overwrite, resume=resume, **how)
    if beside is not None and reward_base is not None:
        carry_out(beside, reward_base, overwrite=overwrite, resume=resume, **how)
