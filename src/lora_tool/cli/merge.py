"""`lora-tool merge`: base + adapter → a model folder."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from lora_tool.checkpoint import AdapterDir, ModelDir, open_checkpoint
from lora_tool.display import printable, size
from lora_tool.errors import NotACheckpoint
from lora_tool.plan.model import Plan, Precision
from lora_tool.plan.task import Task
from lora_tool.sources import Source, resolve
from lora_tool.tensors import DType

_DTYPES = {
    "bfloat16": DType.BF16,
    "bf16": DType.BF16,
    "float16": DType.F16,
    "fp16": DType.F16,
    "float32": DType.F32,
    "fp32": DType.F32,
}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]i?B?|B)?\Z", re.IGNORECASE)


class SizeType(click.ParamType[int]):
    """A number of bytes: ``5GB``, ``500MiB``, ``1000000``."""

    name = "size"

    def convert(self, value: str | int, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _SIZE.match(value.strip())
        if match is None:
            self.fail(f"{value!r} is no size such as 5GB or 500MiB", param, ctx)
        unit = (match["unit"] or "B").upper()
        step = 1024 if "I" in unit else 1000
        nbytes = int(float(match["number"]) * step ** "BKMGT".index(unit[0]))
        if nbytes < 1:
            self.fail("must be at least one byte", param, ctx)
        return nbytes


@click.command("merge", epilog="Example: lora-tool merge --rm my-adapter/ -o my-reward-model/")
@click.argument("adapter", default=".")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder to write.  [default: ADAPTER-merged]")
@click.option("--base", help="Base model: path or Hub id.  [default: what adapter_config.json names]")
@click.option("--rm", "reward", is_flag=True, help="Reward model: the same as --task reward.")
@click.option(
    "--task",
    type=click.Choice([task.value for task in Task]),
    default=Task.AUTO.value,
    show_default=True,
    help="What the merged model is; reward is seq-cls with one label.",
)
@click.option("--num-labels", type=click.IntRange(min=1), help="Labels that the head must have.")
@click.option("--dtype", type=click.Choice(list(_DTYPES)), help="Type of all weights.  [default: each as in the base]")
@click.option(
    "--precision",
    type=click.Choice([precision.value for precision in Precision]),
    default=Precision.FLOAT32.value,
    show_default=True,
    help="Arithmetic: float32 accumulation, PEFT's own bits, or the same bytes on every machine.",
)
@click.option("--max-shard-size", type=SizeType(), help="Largest weights file.  [default: files as in the base]")
@click.option("--jobs", type=click.IntRange(min=1), help="Workers.  [default: one per core]")
@click.option("--overwrite", is_flag=True, help="Replace an output folder that lora-tool wrote, after success.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result, or the plan, as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar and no summary.")
def command(
    adapter: str,
    output: Path | None,
    base: str | None,
    reward: bool,  # noqa: FBT001 - click passes flags by name
    task: str,
    num_labels: int | None,
    dtype: str | None,
    precision: str,
    max_shard_size: int | None,
    jobs: int | None,
    overwrite: bool,  # noqa: FBT001
    dry_run: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
    quiet: bool,  # noqa: FBT001
) -> None:
    """Merge ADAPTER (a folder or Hub id; by default this folder) into its base model.

    The result loads as AutoModelForSequenceClassification or AutoModelForCausalLM. It appears under its name when it
    is complete, or not at all.
    """
    if reward:
        _require_reward(task, num_labels)
        task = Task.REWARD.value
    adapter_source = resolve(adapter, download=True)
    adapter_dir = _open_adapter(adapter_source)
    base_source = _base_source(adapter_dir, base)
    plan = _plan(
        adapter_dir,
        adapter_source,
        base_source,
        task=task,
        num_labels=num_labels,
        dtype=_DTYPES[dtype] if dtype else None,
        precision=precision,
        max_shard_bytes=max_shard_size,
    )
    out = output or _default_output(adapter_source)
    _check_output(out, overwrite=overwrite, inputs=(adapter_source.path, base_source.path))
    for warning in plan.warnings:
        click.echo(f"{click.style('warning:', fg='yellow')} {printable(warning)}", err=True)
    if dry_run:
        _print_plan(plan, out, as_json=as_json)
        return
    _execute(plan, out, jobs=jobs, overwrite=overwrite, show=not (quiet or as_json))
    _print_result(plan, out, as_json=as_json, quiet=quiet)


def _require_reward(task: str, num_labels: int | None) -> None:
    if task not in (Task.AUTO.value, Task.REWARD.value, Task.SEQ_CLS.value):
        raise click.UsageError(f"--rm contradicts --task {task}")
    if num_labels not in (None, 1):
        raise click.UsageError(f"--rm means one label, --num-labels {num_labels} was given")


def _open_adapter(source: Source) -> AdapterDir:
    opened = open_checkpoint(source.path)
    if not isinstance(opened, AdapterDir):
        raise NotACheckpoint(
            f"{source.path} is not an adapter but: {opened.kind}", hint=_not_an_adapter(opened.kind.value)
        )
    return opened


def _not_an_adapter(kind: str) -> str:
    return "name one of its checkpoint folders" if kind == "run folder" else "lora-tool merge ADAPTER --base MODEL"


def _base_source(adapter: AdapterDir, base: str | None) -> Source:
    config = adapter.config
    if base is not None:
        return resolve(base, download=True)
    if config is None or not config.base_model:
        raise NotACheckpoint(
            f"{adapter.root}: adapter_config.json names no base model",
            hint=f"lora-tool merge {adapter.root} --base MODEL",
        )
    try:
        return resolve(config.base_model, near=adapter.root, revision=config.revision, download=True)
    except NotACheckpoint as error:
        error.hint = error.hint or f"lora-tool merge {adapter.root} --base MODEL"
        raise


def _plan(adapter: AdapterDir, adapter_source: Source, base_source: Source, **choices: object) -> Plan:
    from lora_tool.plan.merge import HubOrigin, plan_merge  # noqa: PLC0415 - after the usage is known to be right

    base = open_checkpoint(base_source.path)
    if not isinstance(base, ModelDir):
        raise NotACheckpoint(f"{base_source.path} is not a model but: {base.kind}", hint="give a model: --base MODEL")
    return plan_merge(
        base,
        adapter,
        base_origin=HubOrigin(hub_id=base_source.hub_id, revision=base_source.revision),
        adapter_origin=HubOrigin(hub_id=adapter_source.hub_id, revision=adapter_source.revision),
        **choices,  # type: ignore[arg-type]
    )


def _default_output(adapter: Source) -> Path:
    if adapter.hub_id is not None:
        return Path(f"{adapter.hub_id.rpartition('/')[2]}-merged")
    folder = adapter.path.resolve()
    return folder.parent / f"{folder.name}-merged"


def _check_output(out: Path, *, overwrite: bool, inputs: tuple[Path, ...]) -> None:
    from lora_tool.execution.folder import check_output  # noqa: PLC0415

    check_output(out, overwrite=overwrite, inputs=inputs)


def _execute(plan: Plan, out: Path, *, jobs: int | None, overwrite: bool, show: bool) -> None:
    from lora_tool.execution.engine import execute  # noqa: PLC0415 - numpy, only now

    with _progress(plan.data_bytes, show=show and sys.stderr.isatty()) as advance:
        execute(plan, out, jobs=jobs, overwrite=overwrite, progress=advance)


@contextlib.contextmanager
def _progress(total: int, *, show: bool) -> Iterator[Callable[[int], None] | None]:
    if not show:
        yield None
        return
    from rich.console import Console  # noqa: PLC0415 - only where somebody watches
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        merging = bar.add_task("merging", total=total)
        yield lambda nbytes: bar.advance(merging, nbytes)


def _print_plan(plan: Plan, out: Path, *, as_json: bool) -> None:
    from lora_tool.plan.text import plan_json, plan_text  # noqa: PLC0415

    if as_json:
        click.echo(json.dumps({"output": str(out), **plan_json(plan)}, indent=2))
    else:
        click.echo(f"would write {printable(str(out))}\n{plan_text(plan)}")


def _print_result(plan: Plan, out: Path, *, as_json: bool, quiet: bool) -> None:
    if as_json:
        result = {
            "schema_version": 1,
            "output": str(out),
            "total_size": plan.data_bytes,
            "counts": plan.counts(),
            "files": [*(shard.filename for shard in plan.shards), *(file.filename for file in plan.side_files)],
            "notes": list(plan.notes),
            "warnings": list(plan.warnings),
        }
        click.echo(json.dumps(result, indent=2))
    elif not quiet:
        for note in plan.notes:
            click.echo(printable(note))
        for file in plan.side_files:
            click.echo(f"  {printable(file.filename)}: {printable(file.reason)}")
        counts = ", ".join(f"{count} {fate}" for fate, count in plan.counts().items())
        click.echo(f"{counts} (precision {plan.precision})")
        click.echo(f"wrote {printable(str(out))}: {size(plan.data_bytes)} in {len(plan.shards)} weight files")
