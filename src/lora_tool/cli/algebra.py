"""The options that the commands share which make adapters of adapters."""

from __future__ import annotations

import click

from lora_tool.cli.options import UserPath, in_order, jobs_option
from lora_tool.cli.writing import Parsed
from lora_tool.tensors import float_type

output_option = click.option("-o", "--output", type=UserPath(), required=True, help="Folder to write.")
dtype_option = click.option(
    "--dtype",
    type=Parsed(float_type),
    metavar="[bfloat16|float16|float32]",
    help="Data type of the factors.  [default: float32; unchanged if the result is exact]",
)
rank_options = in_order(
    output_option,
    click.option("--rank", type=click.IntRange(min=1), help="Maximum rank of a module."),
    click.option(
        "--keep",
        type=click.FloatRange(0, 1, min_open=True),
        metavar="SHARE",
        help="Minimum share of ‖ΔW‖² to keep in each module, such as 0.99; each gets the lowest rank that keeps it.",
    ),
    dtype_option,
)
"""Where the adapter goes, and which ranks it gets."""
writing_options = in_order(
    jobs_option,
    click.option(
        "--verify/--no-verify",
        default=True,
        help="Read samples back and check them before the output gets its name.",
        show_default=True,
    ),
    click.option(
        "--overwrite", is_flag=True, help="Replace an existing output of lora-tool once the new one is complete."
    ),
    click.option("--resume", is_flag=True, help="Reuse the finished files of a run that was killed."),
)
"""How it is written."""
