"""The options that the commands share which make adapters of adapters."""

from __future__ import annotations

import click

from lora_tool.cli.options import UserPath, in_order
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
