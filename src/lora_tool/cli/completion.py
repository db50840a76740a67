"""`lora-tool completion`: the script that makes a shell complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import FishComplete, add_completion_class, get_completion_class

_WHERE = {
    "bash": 'add to ~/.bashrc: eval "$(lora-tool completion bash)"',
    "zsh": 'add to ~/.zshrc: autoload -Uz compinit && compinit && eval "$(lora-tool completion zsh)"',
    "fish": "run: lora-tool completion fish > ~/.config/fish/completions/lora-tool.fish",
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
    script = completion(root.command, {}, root.info_name or "lora-tool", "_LORA_TOOL_COMPLETE").source()
    click.echo(script)
    click.echo(_WHERE[shell], err=True)
