"""`lora-tool validate`: what is wrong with one or more folders."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from lora_tool.checkpoint import AdapterDir, Checkpoint, ModelDir, RunDir, open_checkpoint
from lora_tool.cli.exit_codes import CANNOT, DONE, FINDINGS, exit_code
from lora_tool.cli.options import ListType, base_option, json_option, quiet_option
from lora_tool.errors import CheckpointError, LoraToolError, NotACheckpoint
from lora_tool.hub_cache import may_hold
from lora_tool.report.model import Report, Severity, joined
from lora_tool.rules.registry import UnknownRule, chosen
from lora_tool.rules.validation import NO_BASE, validate
from lora_tool.sources import Source, resolve


@click.command("validate", epilog="Example: lora-tool validate fixtures/reward-qwen2/adapter --rm")
@click.argument("paths", nargs=-1, metavar="[PATH]...")
@base_option("Base model to compare with.  [default: what adapter_config.json names, if it is on this disk]")
@click.option("--rm", "reward", is_flag=True, help="A reward model is expected: a head with one label.")
@click.option("--num-labels", type=click.IntRange(min=1), help="Labels that the head must have.")
@click.option(
    "--deep/--headers-only", default=None, help="Read all weights, or none.  [default: those of adapters up to 512 MiB]"
)
@click.option("--select", type=ListType(), multiple=True, help="Only these rules: LT206, or LT2 for all that begin so.")
@click.option("--ignore", type=ListType(), multiple=True, help="Not these rules.")
@click.option(
    "--fail-on",
    type=click.Choice([Severity.ERROR.value, Severity.WARNING.value]),
    default=Severity.ERROR.value,
    show_default=True,
    help="Exit with 1 for findings of this severity or worse.",
)
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings and skipped rules, too.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@json_option
@quiet_option("Print nothing unless there are findings.")
def command(
    paths: tuple[str, ...],
    base: str | None,
    reward: bool,  # noqa: FBT001 - click passes flags by name
    num_labels: int | None,
    deep: bool | None,  # noqa: FBT001
    select: tuple[tuple[str, ...], ...],
    ignore: tuple[tuple[str, ...], ...],
    fail_on: str,
    strict: bool,  # noqa: FBT001
    form: str,
    as_json: bool,  # noqa: FBT001
    quiet: bool,  # noqa: FBT001
) -> None:
    """Say what is wrong with each PATH: an adapter, model, checkpoint or run folder, or an adapter's Hub id.

    PATH is this folder by default. Files are read, never changed, and no code in them is run. A Hub id is downloaded
    to huggingface_hub's cache; base models are never downloaded.
    """
    if reward and num_labels not in (None, 1):
        raise click.UsageError(f"--rm means one label, --num-labels {num_labels} was given")
    selected, ignored = _flat(select), _flat(ignore)
    try:
        chosen(selected, ignored)
    except UnknownRule as error:
        raise click.UsageError(str(error)) from error
    given_base = _open_base(resolve(base)) if base is not None else None
    reports: list[Report] = []
    errors: list[LoraToolError] = []
    for path in paths or (".",):
        try:
            checkpoint = open_checkpoint(resolve(path, download=True).path)
            found, why_not = (given_base, NO_BASE) if given_base is not None else _find_base(checkpoint)
            report = validate(
                checkpoint,
                base=found,
                num_labels=1 if reward else num_labels,
                task="reward" if reward else None,
                select=selected,
                ignore=ignored,
                deep=deep,
                why_no_base=why_not,
            )
        except LoraToolError as error:
            errors.append(error)
        except OSError as error:
            errors.append(LoraToolError(f"{error.filename or path}: {error.strerror or error}"))
        else:
            reports.append(report)
    report = joined(reports)
    if reports and not (quiet and not report.findings):
        _print(report, as_json=as_json or form == "json")
    sys.exit(_exit_code(report, errors, fail_on=Severity(fail_on), strict=strict))


def _flat(lists: tuple[tuple[str, ...], ...]) -> tuple[str, ...]:
    return tuple(code for codes in lists for code in codes)


def _open_base(source: Source) -> ModelDir:
    opened = open_checkpoint(source.path)
    if not isinstance(opened, ModelDir):
        raise NotACheckpoint(f"{source.path} is not a model but: {opened.kind}", hint="give a model: --base MODEL")
    return opened


def _find_base(checkpoint: Checkpoint) -> tuple[ModelDir | None, str]:
    """Return the base that the adapter's config names, if it is on this disk, else None and why it is not."""
    adapter = _an_adapter_of(checkpoint) if isinstance(checkpoint, RunDir) else checkpoint
    config = adapter.config if isinstance(adapter, AdapterDir) else None
    if adapter is None or config is None or not config.base_model:
        return None, NO_BASE
    near_by = any((place / config.base_model).is_dir() for place in (Path(), adapter.root))
    if not near_by and not may_hold(config.base_model):  # asking huggingface_hub takes half a second
        return None, f"no base model (--base): {config.base_model} is no folder and not in the Hub cache"
    try:
        return _open_base(resolve(config.base_model, near=adapter.root, revision=config.revision)), ""
    except CheckpointError as error:
        return None, f"no base model (--base): {error}"


def _an_adapter_of(run: RunDir) -> AdapterDir | None:
    """Return the run's last adapter: all of its checkpoints have one base."""
    for name in reversed(run.folder.checkpoints):
        try:
            opened = open_checkpoint(run.root / name)
        except CheckpointError:
            continue
        if isinstance(opened, AdapterDir):
            return opened
    return None


def _print(report: Report, *, as_json: bool) -> None:
    if as_json:
        from lora_tool.report.json import report_json  # noqa: PLC0415 - only where it is asked for

        click.echo(json.dumps(report_json(report), indent=2))
        return
    from lora_tool.report.text import report_text  # noqa: PLC0415

    click.echo(report_text(report, color=True))  # click takes colours off where the output is no terminal


def _exit_code(report: Report, errors: list[LoraToolError], *, fail_on: Severity, strict: bool) -> int:
    from lora_tool.cli.main import show_error  # noqa: PLC0415 - main imports this module

    for error in errors:
        show_error(error)
    if errors:
        return max(map(exit_code, errors), default=CANNOT)
    failed = report.at_least(Severity.WARNING if strict else fail_on) or (strict and report.skipped)
    return FINDINGS if failed else DONE
