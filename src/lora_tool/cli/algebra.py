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
    help="Type of the factors.  [default: float32; as they are where nothing is rounded]",
)
rank_options = in_order(
    output_option,
    click.option("--rank", type=click.IntRange(min=1), help="Largest rank that a module gets."),
    click.option(
        "--keep",
        type=click.FloatRange(0, 1, min_open=True),
        metavar="SHARE",
        help="Share of ‖ΔW‖² that each module keeps at least, at the lowest rank that does: 0.99.",
    ),
    dtype_option,
)
"""Where the adapter goes, and which ranks it gets."""
