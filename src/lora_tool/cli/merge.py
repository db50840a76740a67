"""`lora-tool merge`: base + adapter → a model folder."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click

from lora_tool.checkpoint import (
    AdapterDir,
    Checkpoint,
    ModelDir,
    RunDir,
    adapters_below,
    open_checkpoint,
    open_model,
    require_whole,
    unexpected,
)
from lora_tool.cli.configuration import configuration
from lora_tool.cli.options import UserPath, config_option, fail_on_option, ignore_option
from lora_tool.cli.rule_choice import rule_choice
from lora_tool.cli.writing import DTYPES, asked_task, carry_out, model_options, writing_options
from lora_tool.display import printable, size
from lora_tool.errors import IncompatibleBase, NotACheckpoint, OnlyInMemory
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.plan.core.plan import Plan
from lora_tool.sources import Source, Wanted, another_base, resolve


@click.command("merge", epilog="Example: lora-tool merge --rm my-adapter/ -o my-reward-model/")
@click.argument("adapters", nargs=-1, metavar="[ADAPTER]...")
@click.option("-o", "--output", type=UserPath(), help="Folder to write.  [default: ADAPTER-merged]")
@model_options
@click.option(
    "--allow-in-memory", is_flag=True, help="Let PEFT merge what only it can, with the whole model in memory."
)
@ignore_option()
@fail_on_option
@config_option
@writing_options("files as in the base", verify=True)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    adapters: tuple[str, ...],
    output: Path | None,
    base: str | None,
    reward: bool,  # noqa: FBT001 - click passes flags by name
    task: str,
    num_labels: int | None,
    dtype: str | None,
    precision: str,
    untie: bool,  # noqa: FBT001
    allow_in_memory: bool,  # noqa: FBT001
    moe_b_layout: str | None,
    ignore: tuple[str, ...],
    fail_on: str,
    config_file: Path | None,
    max_shard_size: int | None,
    jobs: int | None,
    verify: bool,  # noqa: FBT001
    overwrite: bool,  # noqa: FBT001
    resume: bool,  # noqa: FBT001
    dry_run: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
    quiet: bool,  # noqa: FBT001
) -> None:
    """Merge ADAPTER (a folder or Hub id; by default this folder) into its base model. Of several, the sum is merged.

    The result is of the class that the adapter is for: a causal LM, a classifier, whatever its config says. It appears
    under its name when it is complete, or not at all.
    """
    asked = asked_task(task, reward=reward, num_labels=num_labels)
    if len(adapters) > 1 and output is None:
        raise click.UsageError("of several adapters the output has no name of its own: give it with -o OUT")
    configured = configuration(config_file, adapters or (".",))
    rules = rule_choice(ctx, {"ignore": ignore, "fail_on": fail_on}, configured)
    adapter_sources = [resolve(name, download=True, wanted=Wanted.ADAPTER) for name in adapters or (".",)]
    adapter_dirs = [_open_adapter(source) for source in adapter_sources]
    base_source = _base_source(adapter_dirs, base)
    inputs = _Inputs(adapters=adapter_dirs, adapter_sources=adapter_sources, base_source=base_source)
    out = output or _default_output(adapter_sources[0])
    choices = {
        "task": asked,
        "num_labels": num_labels,
        "dtype": DTYPES[dtype] if dtype else None,
        **rules.arguments(),
    }
    writing = partial(
        carry_out,
        inputs=(*(source.path for source in adapter_sources), base_source.path),
        warnings=[
            warning
            for each in adapter_dirs
            for warning in another_base(each.config.base_model if each.config else None, each.root, base_source)
        ],
        jobs=jobs,
        overwrite=overwrite,
        resume=resume,
        dry_run=dry_run,
        as_json=as_json,
        quiet=quiet,
        verify=verify,
    )
    try:
        plan = _plan(
            inputs,
            **choices,
            precision=precision,
            untie=untie,
            max_shard_bytes=max_shard_size,
            expert_layout=ExpertLayout(moe_b_layout) if moe_b_layout else None,
        )
    except OnlyInMemory as why:
        if not allow_in_memory:
            raise
        _in_memory(inputs, out, why, choices, writing, max_shard_bytes=max_shard_size, dry_run=dry_run)
    else:
        writing(plan, out)


def _open_adapter(source: Source) -> AdapterDir:
    inner = adapters_below(source.path)
    if len(inner) == 1:  # PEFT saves an adapter that is not called `default` one folder down
        click.echo(f"note: the adapter is {printable(str(inner[0]))}", err=True)
    elif inner:
        listed = ", ".join(folder.name for folder in inner)
        raise NotACheckpoint(
            f"{source.path} holds {len(inner)} adapters: {listed}",
            hint=f"name one, or several to merge their sum: lora-tool merge {inner[0]}",
        )
    opened = open_checkpoint(inner[0] if inner else source.path)
    if not isinstance(opened, AdapterDir):
        raise unexpected(opened, "an adapter", hint=_merge_instead(opened))
    return opened


def _merge_instead(opened: Checkpoint) -> str | None:
    """Return the merge that may have been meant, None where another command comes first."""
    root = shlex.quote(str(opened.root))
    if isinstance(opened, RunDir):
        last = shlex.quote(str(opened.root / opened.folder.checkpoints[-1]))
        return f"name one of its checkpoints (lora-tool ls {root} marks the best): lora-tool merge {last}"
    if isinstance(opened, ModelDir) and opened.manifest is None:
        return f"lora-tool merge ADAPTER --base {root}"
    return None


def _base_source(adapters: Sequence[AdapterDir], base: str | None) -> Source:
    if base is not None:
        return resolve(base, download=True)
    found = [_named_base(adapter) for adapter in adapters]
    for adapter, source in zip(adapters[1:], found[1:], strict=True):
        if not source.path.samefile(found[0].path):
            raise IncompatibleBase(
                f"{adapters[0].root} was trained on {found[0].reference}, {adapter.root} on {source.reference}: "
                "their deltas do not belong to one model",
                hint="if the two are the same model, say which to take: --base MODEL",
            )
    return found[0]


def _named_base(adapter: AdapterDir) -> Source:
    config = adapter.config
    if config is None:
        require_whole(adapter)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What is merged, and where it came from."""

    adapters: Sequence[AdapterDir]
    adapter_sources: Sequence[Source]
    base_source: Source

    def base(self) -> ModelDir:
        """Return the base model. Raises `NotACheckpoint` where it is something else."""
        return open_model(self.base_source.path, hint="give a model: --base MODEL")

    def origins(self) -> dict[str, Any]:
        """Return Hub ids and commits, as the planner takes them."""
        from lora_tool.plan.merge.build_plan import HubOrigin  # noqa: PLC0415 - after the usage is known to be right

        base, *rest = (
            HubOrigin(hub_id=source.hub_id, revision=source.revision)
            for source in (self.base_source, *self.adapter_sources)
        )
        return {"base_origin": base, "adapter_origin": rest}


def _plan(inputs: _Inputs, **choices: Any) -> Plan:  # noqa: ANN401 - the planner's own options
    from lora_tool.plan.merge.plan_merge import plan_merge  # noqa: PLC0415 - after the usage is known to be right

    return plan_merge(inputs.base(), inputs.adapters, **inputs.origins(), **choices)


def _in_memory(
    inputs: _Inputs,
    out: Path,
    why: OnlyInMemory,
    choices: Mapping[str, Any],
    write: Callable[[Plan, Path], None],
    *,
    max_shard_bytes: int | None,
    dry_run: bool,
) -> None:
    """Say what it takes, let PEFT merge beside the output, and write the output from that."""
    from lora_tool.execution.folder import staging_folder  # noqa: PLC0415 - torch is loaded for this alone
    from lora_tool.execution.in_memory import merge_with_peft, require_memory  # noqa: PLC0415
    from lora_tool.plan.merge.in_memory import ask_in_memory, plan_in_memory  # noqa: PLC0415

    asked = ask_in_memory(inputs.base(), inputs.adapters, **choices)
    click.echo(
        f"PEFT merges it in memory, which takes about {size(asked.needed_bytes)}: {printable(str(why))}", err=True
    )
    require_memory(asked)
    if dry_run:
        click.echo(f"would write {printable(str(out))}, merged by PEFT in memory")
        return
    with staging_folder(out) as folder:
        merge_with_peft(asked, folder)
        plan = plan_in_memory(
            asked, open_model(folder), why=str(why), max_shard_bytes=max_shard_bytes, **inputs.origins()
        )
        write(plan, out)


def _default_output(adapter: Source) -> Path:
    if adapter.hub_id is not None:
        return Path(f"{adapter.hub_id.rpartition('/')[2]}-merged")
    folder = adapter.path.resolve()
    return folder.parent / f"{folder.name}-merged"
