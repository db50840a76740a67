"""The `lora-tool` command: finds the subcommand, and turns every expected error into two lines and an exit code."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import importlib
import io
import itertools
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

import click

from lora_tool.cli.exit_codes import CANNOT, INTERRUPTED, MEANINGS, NOBODY_READS, exit_code
from lora_tool.cli.terminal import leave_stdout, show_error, warn
from lora_tool.core import doors
from lora_tool.core.display import printable
from lora_tool.core.errors import LoraToolError, of_system
from lora_tool.core.progress import listener, reasons
from lora_tool.core.version import __version__

COMMANDS = {
    "validate": "Check an adapter, model, checkpoint or run folder for errors.",
    "inspect": "Show what a folder is: targets, ranks, scalings, sizes, norms.",
    "consolidate": "Reassemble rank files; rescue a reward head.",
    "convert": "Rewrite an adapter in another format, bit for bit.",
    "merge": "Merge an adapter into its base model.",
    "combine": "Combine adapters into one weighted sum.",
    "extract": "Extract an adapter from a fine-tuned model.",
    "prepare": "Rewrite an adapter for a server, with the same ΔW.",
    "resize": "Lower an adapter's ranks with the least loss.",
    "verify": "Prove that a merged folder is its base plus its adapter.",
    "push": "Publish an adapter or model on the Hugging Face Hub, in one commit.",
    "ci": "Validate, consolidate, merge and verify a training output in one CI step.",
    "diff": "Compare two adapters, or two models, module by module.",
    "ls": "List checkpoints: step, metric, sizes, verdict.",
    "prune": "Remove checkpoints that are neither the last nor the best.",
    "rules": "List the rules of `validate`, or explain one.",
    "env": "Print versions, for a bug report.",
    "completion": "Print the completion script of a shell.",
}
"""Command name → its line in `lora-tool --help`; the module of the same name is imported when it is called."""


@functools.cache
def all_commands() -> dict[str, str]:
    """Return the line of every command, those of other distributions last; warn once of one that does not load."""
    others = doors.load_all(doors.COMMANDS, click.Command, warn)
    lines = {name: other.get_short_help_str(limit=_LINE) for name, other in others.items()}
    return COMMANDS | {name: line for name, line in lines.items() if name not in COMMANDS}


_STDERR = 2
_LINE = 100
"""Characters of a command's line in the list of all."""
ENVIRONMENT = "LORA_TOOL"
"""What the names of environment variables begin with: `LORA_TOOL_MERGE_DTYPE` is `--dtype` of `merge`."""


class Formatter(click.HelpFormatter):
    """Help in which a command line that is shown as an example stays one line, to be copied."""

    def write_text(self, text: str) -> None:
        """Write a paragraph, wrapped to the width unless it is an example."""
        if text.startswith("Example: "):
            self.write(f"{'':>{self.current_indent}}{text}\n")
        else:
            super().write_text(text)


class Context(click.Context):
    """The context of every command."""

    formatter_class = Formatter


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command runs, so that `--help` stays instant."""

    context_class = Context

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(all_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        command = _imported(cmd_name)
        if command is None:
            return None
        command.context_class = Context
        if command.help is None and command.callback is not None:  # python -OO
            from lora_tool.rules.engine.registry import page_in_source

            command.help = page_in_source(command.callback)
        for param in command.params:
            if isinstance(param, click.Option) and param.envvar is None:
                param.envvar = _variable(cmd_name, param)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] == "help":  # `help merge` is `merge --help`
            name, *_ = (*args[1:], None)
            if name is None:
                click.echo(ctx.get_help())
                ctx.exit()
            args = [name, "--help"]
        try:
            resolved = super().resolve_command(ctx, args)
        except click.UsageError as error:
            from lora_tool.core.choices import closest  # only for mistakes

            meant = closest(args[0], {**COMMANDS, **doors.entry_points(doors.COMMANDS)})
            if meant is None:
                raise
            raise click.UsageError(f"{error.message} Did you mean {meant!r}?", ctx) from error
        called, command, _ = resolved
        if called is not None and command is not None and not ctx.resilient_parsing:
            _warn_of_variables(called, command)
        return resolved

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(all_commands().items()))
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in MEANINGS.items()])


def _imported(name: str) -> click.Command | None:
    if name in COMMANDS:
        _require_machine()
        command: click.Command = importlib.import_module(f"lora_tool.cli.{name}").command
        return command
    point = doors.entry_points(doors.COMMANDS).get(name)
    if point is None:
        return None
    _require_machine()
    return doors.load(point, click.Command)


def _variable(command: str, option: click.Option) -> str:
    """Return the environment variable that sets the option: named as it is typed, whatever our code calls it."""
    typed = max(option.opts, key=len).lstrip("-")
    return f"{ENVIRONMENT}_{command}_{typed}".upper().replace("-", "_")


def _warn_of_variables(name: str, command: click.Command) -> None:
    """Warn of variables that begin with the command's name and set none of its options: they are misspelled."""
    known = {str(param.envvar) for param in command.params if isinstance(param, click.Option)}
    for variable in sorted(os.environ.keys() - known):
        if variable.startswith(f"{ENVIRONMENT}_{name}_".upper()):
            from lora_tool.core.choices import closest  # only for mistakes

            meant = closest(variable, known, likeness=0.75)
            ask = f", did you mean {meant}?" if meant else ""
            warn(f"the environment variable {variable} sets no option of {name}{ask}")


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Example: lora-tool validate my-adapter/",
)
@click.version_option(__version__, "-V", "--version", message="lora-tool %(version)s", help="Show the version.")
def cli() -> None:
    """Check, merge and publish LoRA checkpoints.

    Results go to stdout, progress and errors to stderr. Every option can be set in the environment:
    LORA_TOOL_MERGE_DTYPE is --dtype of merge. `lora-tool COMMAND --help` explains one command.
    """


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with the code that the README documents."""
    for ending in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(ending) is signal.SIG_DFL:  # `nohup` has the second ignored
            signal.signal(ending, _as_interrupt)
    _open_streams()
    listener.set(_note)
    reasons.set(lambda _: None)  # until a command is asked to be verbose
    words = sys.argv[1:] if args is None else args
    as_json = "--json" in itertools.takewhile(lambda word: word != "--", words)  # what follows is another command's
    # a plan makes no cycles worth looking for, and looking takes a tenth of its time: that of a model with a hundred
    # thousand tensors is two million objects
    gc.set_threshold(3_000_000, 100)
    try:
        code = cli.main(args=args, prog_name="lora-tool", standalone_mode=False)
        sys.stdout.flush()
    except (click.exceptions.Abort, KeyboardInterrupt):
        with contextlib.suppress(OSError):  # the terminal may be gone
            click.echo("interrupted", err=True)
        code = INTERRUPTED
    except click.ClickException as error:
        code = error.exit_code
        show_error(_of_usage(error), code, as_json=as_json)
    except LoraToolError as error:
        code = exit_code(error)
        show_error(error, code, as_json=as_json)
    except (MemoryError, RuntimeError) as error:
        show_error(_of_limits(error))
        code = CANNOT
    except (BrokenPipeError, SystemExit):  # the second is click's for the first, with a code that means findings
        # the reader of our output has left; nothing more can be said there
        leave_stdout()
        code = NOBODY_READS
    except OSError as error:
        # where no file is named: the working directory was removed, and files are written elsewhere, which say so
        nameless = {errno.ENOENT: "the working directory", errno.ENOSPC: "stdout"}
        show_error(of_system(error, nameless.get(error.errno or 0, "system")))
        code = CANNOT
    # Python ends without searching millions of objects for cycles once more; triton, which comes with torch for CUDA,
    # would list on stderr what of its own is left then
    if "torch" not in sys.modules:
        gc.freeze()
    sys.exit(code if isinstance(code, int) else 0)


def _of_usage(error: click.ClickException) -> LoraToolError:
    context = getattr(error, "ctx", None)
    hint = f"{context.command_path} --help" if context is not None else None
    if not isinstance(error, click.NoSuchOption):
        return LoraToolError(error.format_message(), hint=hint)
    from lora_tool.core.choices import closest  # only for mistakes

    # closer than click asks: what only rhymes, as --base with --verbose, was not meant
    meant = closest(error.option_name, error.possibilities or (), likeness=0.75)
    return LoraToolError(error.message, hint=f"did you mean {meant}?" if meant else hint)


def _of_limits(error: MemoryError | RuntimeError) -> LoraToolError:
    """Return our error where memory or threads run out, or the user has no home folder. Raises any other error as it is."""
    if isinstance(error, MemoryError):
        return LoraToolError("out of memory", hint="use --jobs 1, which needs the least memory, and see ulimit -v")
    if "start new thread" in str(error):
        return LoraToolError(
            "cannot start another thread (process limit reached)",
            hint="use --jobs 1, which needs the fewest threads, and see ulimit -u",
        )
    if "home directory" in str(error):  # pathlib's words, by way of huggingface_hub
        return LoraToolError(
            "this user has no home folder, where the Hub's cache would be", hint="export HF_HOME=FOLDER"
        )
    raise error


def _require_machine() -> None:
    """Raise `LoraToolError` on a machine where weights would be misread, or files cannot be read as we do."""
    if sys.byteorder != "little":
        raise LoraToolError(
            "lora-tool does not run on big-endian machines: weights are little-endian",
            hint="use an x86-64 or arm64 machine",
        )
    if sys.platform == "win32":
        raise LoraToolError(
            "lora-tool does not run natively on Windows", hint="run it in WSL, which this installs: wsl --install"
        )


def _open_streams() -> None:
    """Make stdout and stderr take any text: a closed one is /dev/null, what its encoding lacks is escaped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # a file that is written later must not get the number of a standard stream
            while (number := os.open(os.devnull, os.O_RDWR)) < _STDERR:
                pass
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _note(what: str) -> None:
    ctx = click.get_current_context(silent=True)
    if ctx is None or not ctx.params.get("quiet"):
        with contextlib.suppress(OSError):  # the terminal may be gone
            click.echo(printable(what), err=True)


def _as_interrupt(_signum: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
