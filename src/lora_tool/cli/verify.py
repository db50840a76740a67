"""`lora-tool verify`: whether a merged folder is what its base and adapter give."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lora_tool.cli.exit_codes import DONE, FAILED_CHECK
from lora_tool.cli.options import (
    UserPath,
    base_option,
    fail_on_option,
    format_option,
    ignore_option,
    jobs_option,
    json_option,
    quiet_option,
    report_option,
    select_option,
)
from lora_tool.cli.progress import progress_bar
from lora_tool.cli.reporting import report_file, require_different
from lora_tool.cli.terminal import wants_colour
from lora_tool.report.findings import Severity
from lora_tool.report.forms import Form

if TYPE_CHECKING:
    from lora_tool.verification.verifying import Verification


@click.command("verify", epilog="Example: lora-tool verify my-reward-model/")
@click.argument("merged", type=UserPath(), metavar="MERGED")
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="ADAPTER",
    help="Adapter that was merged: path or Hub id.  [default: what lora_tool.json names]",
)
@base_option("Base model: path or Hub id.  [default: what lora_tool.json, the adapter or config.json names]")
@click.option("--sample", is_flag=True, help="Compare samples from everywhere instead of every value.")
@click.option("--logits", is_flag=True, help="Run both models, too, and compare their answers.")
@click.option(
    "--prompts",
    type=UserPath(exists=True, dir_okay=False),
    metavar="FILE",
    help="What --logits asks: one prompt per line, or .jsonl.  [default: eight short ones]",
)
@click.option("--tensors", is_flag=True, help="A line for each tensor.")
@select_option
@ignore_option()
@fail_on_option
@click.option("--strict", is_flag=True, help="Warnings fail, and so does what could not be checked.")
@jobs_option
@format_option
@report_option
@json_option
@quiet_option("Print nothing unless there are findings.")
def command(
    merged: Path,
    adapters: tuple[str, ...],
    base: str | None,
    sample: bool,  # noqa: FBT001 - click passes flags by name
    logits: bool,  # noqa: FBT001
    prompts: Path | None,
    tensors: bool,  # noqa: FBT001
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    fail_on: str,
    strict: bool,  # noqa: FBT001
    jobs: int | None,
    form: str,
    reports: tuple[str, ...],
    as_json: bool,  # noqa: FBT001
    quiet: bool,  # noqa: FBT001
) -> int:
    """Compare the model folder MERGED with its base and adapter, whoever merged it.

    Every tensor is accounted for: those the adapter leaves alone have the base's bytes, the others are W + ΔW,
    computed again. Exits with 5 where that does not hold.
    """
    from lora_tool.plan.merge.provenance import find_inputs  # noqa: PLC0415
    from lora_tool.verification.checking import Level  # noqa: PLC0415 - after the usage is known to be right
    from lora_tool.verification.verifying import verify_inputs  # noqa: PLC0415

    printed = Form.JSON if as_json else Form(form)
    files = [report_file(value) for value in reports]
    require_different(files)
    asked = None
    if prompts is not None:
        if not logits:
            raise click.UsageError("--prompts are for --logits")
        from lora_tool.verification.prompts import read_prompts  # noqa: PLC0415 - torch, only where asked for

        asked = read_prompts(prompts)
    inputs = find_inputs(merged, base=base, adapters=adapters)
    with progress_bar("comparing", inputs.merged.weights.nbytes, quiet=quiet or sample or printed is Form.JSON) as bar:
        verification = verify_inputs(
            inputs,
            level=Level.SAMPLE if sample else Level.FULL,
            select=select,
            ignore=ignore,
            logits=logits,
            prompts=asked,
            jobs=jobs,
            progress=bar,
        )
    failing = Severity.WARNING if strict else Severity(fail_on)
    if not (quiet and not verification.report.findings):
        click.echo(_text(verification, printed, failing, tensors=tensors, color=wants_colour()))
    for file in files:
        file.write(_text(verification, file.form, failing, tensors=tensors))
    failed = verification.report.at_least(failing) or (strict and verification.report.skipped)
    return FAILED_CHECK if failed else DONE


def _text(
    verification: Verification, form: Form, failing: Severity, *, tensors: bool = False, color: bool = False
) -> str:
    from lora_tool.report.forms import rendered  # noqa: PLC0415
    from lora_tool.rules.engine.registry import RULES  # noqa: PLC0415
    from lora_tool.verification.text import verification_json, verification_lines  # noqa: PLC0415

    if form is Form.JSON:
        return json.dumps(verification_json(verification), indent=2, allow_nan=False)
    color = color and form is Form.TEXT
    text = rendered(verification.report, form, pages=RULES, fail_on=failing, color=color)
    return "\n".join((*verification_lines(verification, tensors=tensors), text)) if form is Form.TEXT else text
