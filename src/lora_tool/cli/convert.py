"""`lora-tool convert`: an adapter in the form that another program reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lora_tool.cli.options import FolderOrId, UserPath, base_option, ignore_option, jobs_option
from lora_tool.cli.timed import Timed
from lora_tool.cli.writing import ChoiceOf, carry_out, run_options
from lora_tool.execution.folder import check_output
from lora_tool.pipeline.converting import convertible, default_output, planned
from lora_tool.plan.convert.forms import AdapterForm


@click.command(
    "convert", cls=Timed, epilog="Example: lora-tool convert run/broadcasts/step_100 --to peft -o my-adapter/"
)
@click.argument("folder", type=FolderOrId(), metavar="ADAPTER", default=".")
@click.option(
    "--to", type=ChoiceOf(AdapterForm), required=True, help="peft: the names that PEFT loads; mlx: what MLX-LM reads."
)
@click.option("-o", "--output", type=UserPath(), help="Folder to write.  [default: ADAPTER-FORM]")
@base_option("Base model, whose modules tell what is meant by a name without a prefix.  [default: the config's]")
@click.option(
    "--rm", "reward", is_flag=True, help="The value head beside the adapter becomes a reward model's score head."
)
@ignore_option("Continue despite these findings: LT207.")
@jobs_option
@click.option("--verify/--no-verify", help="Read samples back and check them before publishing.", show_default=True)
@click.option("--overwrite", is_flag=True, help="Replace an output that lora-tool wrote, after success.")
@click.option("--resume", is_flag=True, help="Take over the finished files of a run that was killed.")
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
    **how: Any,  # noqa: ANN401 - the arguments of `carry_out`
) -> None:
    """Write ADAPTER in the form that another program reads; its values keep their bits.

    --to peft repairs names: those of prime-rl, torch.compile, FSDP1 and DistributedDataParallel, with an adapter's name
    in them, or with a lost prefix. A name that fits two readings is refused. With --rm the value head that LLaMA-Factory
    saved beside the adapter of a causal LM becomes the score head of a sequence classifier. An adapter of MLX-LM becomes
    one of PEFT's, its experts one by one, and --to mlx is the way back: one rank, one scaling, every value as it is.
    """
    if reward and to is not AdapterForm.PEFT:
        raise click.UsageError("--rm is for --to peft: it makes a reward adapter of PEFT's")
    found = convertible(folder, base)
    out = output or default_output(found.adapter, to)
    check_output(out, overwrite=overwrite, inputs=(found.adapter.root,))
    carry_out(planned(found, to=to, base=base, reward=reward, ignore=ignore), out, overwrite=overwrite, **how)
