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
from lora_tool.plan.convert.plan_convert import AdapterForm
from lora_tool.sources import opened_adapter


@click.command(
    "convert", cls=Timed, epilog="Example: lora-tool convert run/broadcasts/step_100 --to peft -o my-adapter/"
)
@click.argument("folder", type=FolderOrId(), metavar="ADAPTER", default=".")
@click.option("--to", type=ChoiceOf(AdapterForm), required=True, help="peft: the names that PEFT loads.")
@click.option("-o", "--output", type=UserPath(), help="Folder to write.  [default: ADAPTER-FORM]")
@base_option("Base model, whose modules tell what is meant by a name without a prefix.  [default: the config's]")
@click.option(
    "--rm", "reward", is_flag=True, help="The value head beside the adapter becomes a reward model's score head."
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
    **how: Any,  # noqa: ANN401 - the arguments of `carry_out`
) -> None:
    """Write ADAPTER in the form that another program reads; its values keep their bits.

    --to peft repairs names: those of prime-rl, torch.compile, FSDP1 and DistributedDataParallel, with an adapter's name
    in them, or with a lost prefix. A name that fits two readings is refused. With --rm the value head that LLaMA-Factory
    saved beside the adapter of a causal LM becomes the score head of a sequence classifier.
    """
    adapter = opened_adapter(folder)
    out = output or default_output(adapter, to)
    check_output(out, overwrite=overwrite, inputs=(adapter.root,))
    carry_out(planned(adapter, to=to, base=base, reward=reward, ignore=ignore), out, overwrite=overwrite, **how)
