"""`lora-tool train`: TRL's own script under the guard, its config checked before and its result after."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click
from msgspec.structs import replace

from lora_tool.cli.options import Sectioned, UserPath, json_option, quiet_option
from lora_tool.cli.terminal import tell
from lora_tool.core.errors import WrongValue, require_packages
from lora_tool_train.methods import GUARDED, METHODS

PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "datasets")


class _Train(Sectioned):
    """Its help has the options of the method, where one is given and TRL is here: those of cpo and orpo `trl` lacks."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[__name__] = next((word for word in args if word in METHODS), None)
        other = next((word for word in args if word in GUARDED), None)
        if other is not None and ctx.meta[__name__] is None:
            raise WrongValue(
                f"train has no {other}: expected one of {', '.join(METHODS)}",
                hint=f"run what trains by it under the same guard: {GUARDED[other]}",
            )
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        name = ctx.meta.get(__name__)
        if name is None or not all(map(find_spec, PACKAGES)):
            return
        from lora_tool_train.config import described_options

        for title, options in described_options(METHODS[name]).items():
            with formatter.section(title):
                formatter.write_dl(options)


@click.command(
    "train",
    cls=_Train,
    among="Training runs",
    no_args_is_help=True,
    short_help="Train with TRL; stop runs that are bound to fail.",
    epilog="Example: lora-tool train reward --config run.yaml --learning_rate 1e-4 --dry-run",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("method", type=click.Choice(list(METHODS)), metavar="METHOD")
@click.argument("options", nargs=-1, type=click.UNPROCESSED, metavar="[TRL OPTION]...")
@click.option("--config", type=UserPath(), help="TRL's YAML; its block `lora_tool:` is read by lora-tool.")
@click.option("--dry-run", is_flag=True, help="Build and check everything, but take no training step.")
@click.option("--resume", metavar="auto|PATH", help="Resume from the last complete checkpoint, or from this one.")
@json_option
@quiet_option("No summary.")
def command(
    method: str,
    options: tuple[str, ...],
    *,
    config: Path | None,
    dry_run: bool,
    resume: str | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Train with TRL; stop runs that are bound to fail.

    METHOD is reward, sft, dpo, kto, grpo, rloo, cpo or orpo; TRL's others, as distillation, run under `lora-tool
    guard`. Every option of TRL's config classes and of
    `accelerate launch` may be given, in the YAML or as --name value; `train METHOD --help` lists TRL's. Needs
    lora-tool[train].
    """
    from lora_tool_train.checks import require_inputs, static_findings, with_task_type
    from lora_tool_train.config import read_run_config
    from lora_tool_train.running import refusal, resumed, summarise, train
    from lora_tool_train.traps import as_typed

    require_packages(PACKAGES, extra="train")
    typed = read_run_config(METHODS[method], config, options)
    require_inputs(typed)
    run = with_task_type(typed)
    if run is not typed:
        click.echo("set lora_task_type: SEQ_CLS (with TRL's default CAUSAL_LM the score head is not saved)", err=True)
    choice = resumed(run, resume)
    checked = static_findings(run) if run.guard.mode != "off" else ()
    said = (item for item in (*choice.skipped, *checked) if item.code not in run.guard.ignore)
    found = [replace(item, hint=as_typed(item.hint, run.typed)) for item in said]
    for item in (item for item in found if item is not refusal(run, found)):  # which is printed last
        place = f"{item.path}: " * bool(item.path) + f"{item.subject} " * bool(item.subject)
        tell(str(item.severity), f"{item.code}: {place}{item.message}")
        tell("  hint", str(item.hint))
    ended = train(run, choice, found, dry_run=dry_run)
    code = ended.show(as_json=as_json, method=method)
    if not (code or as_json or quiet):
        summarise(run, ended, dry_run=dry_run)
    return code
