"""`lora-tool completion`: the script that makes a shell complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import FishComplete, add_completion_class, get_completion_class

from lora_tool.cli.typed_name import COMPLETION, HF, OURS
from lora_tool.core.errors import LoraToolError

_WHERE = {
    "bash": 'add to ~/.bashrc: eval "$(lora-tool completion bash)"',
    "zsh": 'add to ~/.zshrc: autoload -Uz compinit && compinit && eval "$(lora-tool completion zsh)"',
    "fish": "run: lora-tool completion fish > ~/.config/fish/completions/{name}.fish",
}


@add_completion_class
class _Fish(FishComplete):
    """Fish, with click's script made to cut what it is offered at the first comma alone: codes have commas, and help has."""

    source_template = FishComplete.source_template.replace('string split ","', 'string split -m 1 ","')


@click.command("completion", no_args_is_help=True, epilog="Example: lora-tool completion bash")
@click.argument("shell", type=click.Choice(list(_WHERE)))
@click.pass_context
def command(context: click.Context, shell: str) -> None:
    """Print the completion script for SHELL; how to install it is printed to stderr."""
    completion = get_completion_class(shell)
    if completion is None:
        raise AssertionError(f"click cannot complete commands in {shell}")
    root = context.find_root()
    name = root.info_name or OURS
    if name == HF:
        raise LoraToolError(
            "a shell completes the words after the name of a program, and hf asks no extension for them",
            hint="pipx install lora-tool, whose commands it completes",
        )
    click.echo(completion(root.command, {}, name, COMPLETION).source())
    click.echo(_WHERE[shell].replace("{name}", name), err=True)
