"""What the commands that write a folder share: their options, and carrying out a plan."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from lora_tool.cli.options import base_option, jobs_option, overwrite_option, quiet_option
from lora_tool.cli.progress import progress_bar
from lora_tool.cli.read_back import ReadBack
from lora_tool.cli.terminal import show_findings, warn
from lora_tool.display import counted, json_text, printable, size
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.plan.base.task import Task
from lora_tool.plan.core.ops import Precision
from lora_tool.plan.core.plan import Plan
from lora_tool.sharded.value_check import ValueCheck
from lora_tool.tensors import DType

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

DTYPES = {
    "bfloat16": DType.BF16,
    "bf16": DType.BF16,
    "float16": DType.F16,
    "fp16": DType.F16,
    "float32": DType.F32,
    "fp32": DType.F32,
}
_PLAN_LEVELS = 4
"""The plan, its shards, a shard, its steps: a step is a line."""
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]i?B?|B)?\Z", re.IGNORECASE)


def number_of_bytes(value: str) -> int:
    """Return a size such as ``5GB``, ``500MiB`` or ``1000000`` in bytes: the type of an option."""
    match = _SIZE.match(value.strip())
    unit = (match["unit"] or "B").upper() if match else ""
    step = 1024 if "I" in unit else 1000
    nbytes = int(float(match["number"]) * step ** "BKMGT".index(unit[0])) if match else 0
    if nbytes < 1:
        raise click.BadParameter(f"{value!r} is no size such as 5GB or 500MiB")
    return nbytes


def asked_task(task: str, *, reward: bool, num_labels: int | None) -> Task:
    """Return what ``--task`` and ``--rm`` mean together. Raises `click.UsageError` where they contradict each other."""
    asked = Task(task)
    if not reward:
        return asked
    if asked not in (Task.AUTO, Task.REWARD, Task.SEQ_CLS):
        raise click.UsageError(f"--rm contradicts --task {task}")
    if num_labels not in (None, 1):
        raise click.UsageError(f"--rm means one label, --num-labels {num_labels} was given")
    return Task.REWARD


def dtype_option(default: str) -> Callable[[Decorated], Decorated]:
    """Add ``--dtype``; `default` says in words what happens without it."""
    return click.option("--dtype", type=click.Choice(list(DTYPES)), help=f"Type of all weights.  [default: {default}]")


def model_options(command: Decorated) -> Decorated:
    """Add the options of every command that merges: what into what, and how exactly."""
    options = (
        base_option("Base model: path or Hub id.  [default: what adapter_config.json names]"),
        click.option("--rm", "reward", is_flag=True, help="Reward model: the same as --task reward."),
        click.option(
            "--task",
            type=click.Choice([task.value for task in Task]),
            default=Task.AUTO.value,
            show_default=True,
            help="What the merged model is; reward is seq-cls with one label, as-trained the class that adapter or base name.",
        ),
        click.option("--num-labels", type=click.IntRange(min=1), help="Labels that the head must have."),
        dtype_option("each as in the base"),
        click.option(
            "--precision",
            type=click.Choice([precision.value for precision in Precision]),
            default=Precision.FLOAT32.value,
            show_default=True,
            help="Arithmetic: float32 accumulation, PEFT's own bits, or the same bytes on every machine.",
        ),
        click.option("--untie", is_flag=True, help="Write tied embeddings as two matrices, each as it was trained."),
        click.option(
            "--moe-b-layout",
            type=click.Choice([layout.value for layout in ExpertLayout]),
            help="How a fused lora_B of experts is packed.  "
            "[default: as adapter_config.json says, else PEFT's rank_major]",
        ),
    )
    return _with(command, options)


def writing_options(shard_default: str, *, verify: bool) -> Callable[[Decorated], Decorated]:
    """Add the options of every command that writes weights, in one order; `verify` is the default of ``--verify``."""
    options = (
        click.option(
            "--max-shard-size",
            type=number_of_bytes,
            metavar="SIZE",
            help=f"Largest weights file.  [default: {shard_default}]",
        ),
        jobs_option,
        click.option(
            "--verify/--no-verify",
            default=verify,
            show_default=True,
            help="Read samples back and check them before publishing.",
        ),
        overwrite_option,
        click.option("--resume", is_flag=True, help="Take over the finished files of a run that was killed."),
        click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
        click.option("--json", "as_json", is_flag=True, help="Print the result, or the plan, as JSON."),
        quiet_option("No progress bar and no summary."),
    )

    return lambda command: _with(command, options)


def _with(command: Decorated, options: Sequence[Callable[[Decorated], Decorated]]) -> Decorated:
    """Return the command with the options, in this order in its help."""
    for option in reversed(options):
        command = option(command)
    return command


def carry_out(
    plan: Plan,
    out: Path,
    *,
    inputs: Sequence[Path],
    warnings: Sequence[str] = (),
    jobs: int | None,
    overwrite: bool,
    resume: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    verify: bool = True,
    values: ValueCheck | None = None,
) -> None:
    """Print the plan (`dry_run`), or write the folder `out` and print what was done. Raises as `execute` does.

    With `verify` samples of what was written are read back and compared before the folder gets its name; `values` is
    the check of what is read, for `execute`.
    """
    from lora_tool.execution.folder import check_output  # noqa: PLC0415 - after the usage is known to be right

    check_output(out, overwrite=overwrite, inputs=tuple(inputs))
    show_findings(plan.findings)
    for warning in (*plan.warnings, *warnings):
        warn(warning)
    if dry_run:
        _print_plan(plan, out, as_json=as_json)
        return
    from lora_tool.execution.engine import execute  # noqa: PLC0415 - numpy, only now

    check = ReadBack(plan, out, jobs=jobs) if verify else None
    what, total = ("checking and writing", plan.data_bytes + values.nbytes) if values else ("writing", plan.data_bytes)
    with progress_bar(what, total, quiet=quiet or as_json) as advance:
        execute(plan, out, jobs=jobs, overwrite=overwrite, resume=resume, progress=advance, check=check, values=values)
    _print_result(plan, out, check, as_json=as_json, quiet=quiet)


def _print_plan(plan: Plan, out: Path, *, as_json: bool) -> None:
    if as_json:
        click.echo(json_text({"output": str(out), **plan.to_json()}, spread=_PLAN_LEVELS))
    else:
        click.echo(f"would write {printable(str(out))}\n{plan}")


def _print_result(plan: Plan, out: Path, checked: ReadBack | None, *, as_json: bool, quiet: bool) -> None:
    from lora_tool.formats.manifest import FILE_NAME  # noqa: PLC0415
    from lora_tool.plan.core import delta_retention  # noqa: PLC0415
    from lora_tool.report.json import finding_json  # noqa: PLC0415

    manifest = json.loads((out / FILE_NAME).read_bytes())
    kept = manifest["fidelity"]
    for late in manifest["warnings"][len(plan.warnings) :]:
        warn(late)
    if as_json:
        result = {
            "schema_version": 1,
            "output": str(out),
            "total_size": plan.data_bytes,
            "counts": plan.counts(),
            "files": [*(shard.filename for shard in plan.shards), *(file.filename for file in plan.side_files)],
            "verification": checked.summary if checked else None,
            "notes": list(plan.notes),
            "fidelity": kept,
            "findings": [finding_json(finding) for finding in plan.findings],
            "warnings": manifest["warnings"],
        }
        click.echo(json.dumps(result, indent=2))
    elif not quiet:
        for note in plan.notes:
            click.echo(printable(note))
        for file in plan.side_files:
            click.echo(f"  {printable(file.filename)}: {printable(file.reason)}")
        counts = ", ".join(f"{count} {fate}" for fate, count in plan.counts().items())
        click.echo(f"{counts} (precision {plan.precision})")
        if kept is not None:
            click.echo(printable(delta_retention.line(kept)))
        if checked is not None:
            click.echo(checked.line)
        click.echo(
            f"wrote {printable(str(out))}: {size(plan.data_bytes)} in {counted(len(plan.shards), 'weight file')}"
        )
