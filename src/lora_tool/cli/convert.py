"""`lora-tool convert`: an adapter in the form that another program reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lora_tool.cli.options import FolderOrId, UserPath, base_option, ignore_option
from lora_tool.cli.timed import Timed
from lora_tool.cli.writing import ChoiceOf, carry_out, run_options, writing_options
from lora_tool.execution.folder import check_output
from lora_tool.pipeline.converting import default_output, planned
from lora_tool.plan.convert.convertible import convertible
from lora_tool.plan.convert.forms import AdapterForm


@click.command(
    "convert", cls=Timed, epilog="Example: lora-tool convert run/broadcasts/step_100 --to peft -o my-adapter/"
)
@click.argument("folder", type=FolderOrId(), metavar="[ADAPTER]", default=".")
@click.option(
    "--to",
    type=ChoiceOf(AdapterForm),
    required=True,
    help="peft: the names that PEFT loads; mlx: MLX-LM's format; peft-experts, peft-fused: LoRA on experts one by one, "
    "or fused as transformers 5 has them.",
)
@click.option(
    "-o", "--output", type=UserPath(), help="Folder to write.  [default: ADAPTER-peft for --to peft, and so on]"
)
@base_option("Base model; its modules complete names that lost their prefix.  [default: the config's]")
@click.option(
    "--rm", "reward", is_flag=True, help="Turn the value head beside the adapter into a reward model's score head."
)
@ignore_option("Continue despite these findings: LT207.")
@writing_options(verify=False)
@run_options
def command(
    folder: str,
    to: AdapterForm,
    output: Path | None,
    *,
    base: str | None,
    reward: bool,
    ignore: tuple[str, ...],
    overwrite: bool,
    resume: bool,
    **how: Any,  # the arguments of `carry_out`
) -> None:
    """Write ADAPTER (by default this folder) in the format that another program reads; every value stays bit-identical.

    --to peft repairs tensor names that prime-rl, torch.compile, FSDP1 or DistributedDataParallel wrote, that contain an
    adapter's name, or that lost their prefix. An ambiguous name is refused. With --rm, the value head that
    LLaMA-Factory saved beside the adapter of a causal LM becomes the score head of a sequence classifier.
    --to peft also turns an adapter of MLX-LM into a PEFT adapter; --to mlx writes MLX-LM's format, for adapters with one
    rank and one scaling.

    --to peft-fused writes LoRA on single experts (transformers 4, vLLM) as PEFT's `target_parameters` of transformers 5,
    and --to peft-experts converts back, with the names of the experts in the base.
    """
    if reward and to is not AdapterForm.PEFT:
        raise click.UsageError("--rm needs --to peft: it writes a reward adapter in PEFT's format")
    found = convertible(folder, base)
    out = output or default_output(found.adapter, to)
    check_output(out, overwrite=overwrite or resume, inputs=(found.adapter.root,))
    carry_out(
        planned(found, to=to, base=base, reward=reward, ignore=ignore), out, overwrite=overwrite, resume=resume, **how
    )
