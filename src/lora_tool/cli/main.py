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
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import NoReturn

import click
from click.core import ParameterSource

from lora_tool.cli.exit_codes import CANNOT, INTERRUPTED, MEANINGS, NOBODY_READS, exit_code
from lora_tool.cli.terminal import leave_stdout, retyped, show_error, warn
from lora_tool.cli.typed_name import COMPLETION, OURS, speak_as, typed_name
from lora_tool.core import doors
from lora_tool.core.display import printable
from lora_tool.core.errors import LoraToolError, WrongValue, of_system
from lora_tool.core.progress import listener, reasons
from lora_tool.core.version import __version__

_LISTED = {
    "Start here": {
        "validate": "Check an adapter, model, checkpoint or run folder for errors.",
        "merge": "Merge an adapter into its base model.",
        "verify": "Prove that a merged folder is its base plus its adapter.",
        "ci": "Validate, merge and verify what training left, as one CI step.",
        "push": "Publish an adapter or model on the Hub, in one commit.",
    },
    "Training runs": {
        "ls": "List checkpoints: step, metric, sizes, verdict.",
        "prune": "Remove checkpoints that are neither the last nor the best.",
        "consolidate": "Reassemble rank files; rescue a reward head.",
    },
    "Adapters": {
        "inspect": "Show what a folder is: targets, ranks, scalings, sizes, norms.",
        "diff": "Compare two adapters, or two models, module by module.",
        "convert": "Rewrite an adapter in another form; a judge as a reward model.",
        "prepare": "Rewrite an adapter for a server, with the same ΔW.",
        "resize": "Lower an adapter's ranks with the least loss.",
        "combine": "Combine adapters into one weighted sum.",
        "extract": "Extract an adapter from a fine-tuned model.",
    },
    "Added": {},
    "Help": {
        "rules": "List the rules of `validate`, or explain one.",
        "env": "Print versions, for a bug report.",
        "completion": "Print the completion script of a shell.",
    },
}
"""Heading in `lora-tool --help` → command name → its line; the module of that name is imported when it is called."""
COMMANDS = {name: line for lines in _LISTED.values() for name, line in lines.items()}


@functools.cache
def listed_commands() -> dict[str, dict[str, str]]:
    """Return the line of every command by its heading; warn once of one of another distribution that does not load."""
    listed = {heading: dict(lines) for heading, lines in _LISTED.items()}
    for name, other in doors.load_all(doors.COMMANDS, click.Command, warn).items():
        if name not in COMMANDS:
            heading = getattr(other, "among", "Added")
            listed[heading if heading in listed else "Added"][name] = other.get_short_help_str(limit=_LINE)
    return {heading: lines for heading, lines in listed.items() if lines}


def all_commands() -> dict[str, str]:
    """Return the line of every command, in the order of `lora-tool --help`."""
    return {name: line for lines in listed_commands().values() for name, line in lines.items()}


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


class NoWords(click.UsageError):
    """A command was typed alone that needs more: its help is shown, on stderr, as a script may read what it prints."""

    def __init__(self, ctx: click.Context) -> None:
        super().__init__(ctx.get_help(), ctx)


class Context(click.Context):
    """The context of every command, which a usage error in the command's own code has, too."""

    formatter_class = Formatter

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if isinstance(error, click.UsageError) and error.ctx is None:
            error.ctx = self
        elif isinstance(error, WrongValue):
            error.args = (_with_variables(self, str(error)),)
        return super().__exit__(kind, error, trace)


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
        called, command, words = resolved
        if called is not None and command is not None and not ctx.resilient_parsing:
            if command.no_args_is_help and not words:
                raise NoWords(Context(command, parent=ctx, info_name=called))
            _warn_of_variables(called, command)
        return resolved

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            raise NoWords(ctx)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [row for param in self.get_params(ctx) if (row := param.get_help_record(ctx)) is not None]
        width = max(map(len, all_commands()))
        for heading, lines in listed_commands().items():
            with formatter.section(heading):
                rows = [(name.ljust(width), line) for name, line in lines.items()]
                formatter.write_dl([*rows, *(options if heading == "Help" else ())])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_epilog(ctx, formatter)
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
    name = _spoken_name()
    listener.set(_note)
    reasons.set(lambda _: None)  # until a command is asked to be verbose
    words = sys.argv[1:] if args is None else args
    as_json = "--json" in itertools.takewhile(lambda word: word != "--", words)  # what follows is another command's
    # a plan makes no cycles worth looking for, and looking takes a tenth of its time: that of a model with a hundred
    # thousand tensors is two million objects
    gc.set_threshold(3_000_000, 100)
    try:
        code = cli.main(args=args, prog_name=name, complete_var=COMPLETION, standalone_mode=False, obj=words)
        sys.stdout.flush()
    except (click.exceptions.Abort, KeyboardInterrupt):
        with contextlib.suppress(OSError):  # the terminal may be gone
            click.echo("interrupted", err=True)
        code = INTERRUPTED
    except click.ClickException as error:
        code = error.exit_code
        _show_usage(error, words, as_json=as_json)
    except LoraToolError as error:
        code = exit_code(error)
        error.hint = error.hint and _with_command(retyped(error.hint, words), words)
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


def _show_usage(error: click.ClickException, words: Sequence[str], *, as_json: bool) -> None:
    if isinstance(error, NoWords):
        click.echo(error.message, err=True)
        return
    ours = _of_usage(error, words)
    if os.environ.get("GITHUB_ACTIONS") == "true":  # nothing is checked whose report could say it
        click.echo(f"::error::{printable(str(ours)).replace('%', '%25')}", err=True)
    show_error(ours, error.exit_code, as_json=as_json)


def _with_command(hint: str, words: Sequence[str]) -> str:
    """Return a hint that is nothing but an argument as the command that was typed, with that argument."""
    return f"lora-tool {shlex.join(words)} {hint}" if re.fullmatch(r"`\w+=[^`]*`", hint) else hint


def _of_usage(error: click.ClickException, words: Sequence[str]) -> LoraToolError:
    context = getattr(error, "ctx", None)
    hint = getattr(error, "hint", f"{context.command_path} --help" if context is not None else None)
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return _missing(error.param, words)
    if not isinstance(error, click.NoSuchOption):
        message = error.format_message()
        return LoraToolError(message if context is None else _with_variables(context, message), hint=hint)
    from lora_tool.core.choices import closest  # only for mistakes

    # closer than click asks: what only rhymes, as --base with --verbose, was not meant
    meant = closest(error.option_name, error.possibilities or (), likeness=0.75)
    return LoraToolError(error.message, hint=f"did you mean {meant}?" if meant else hint)


def _missing(param: click.Parameter, words: Sequence[str]) -> LoraToolError:
    """Return the error for what was not typed; its hint is what was, with that."""
    first, *_, last = 2 * re.findall(r"[\w-]+", param.metavar or param.human_readable_name.upper())
    if not isinstance(param, click.Option):
        return LoraToolError(f"{first} is missing", hint=f"lora-tool {shlex.join([*words, first])}")
    value = param.type.choices[0] if isinstance(param.type, click.Choice) else last
    return LoraToolError(f"{param.opts[-1]} is missing", hint=f"lora-tool {shlex.join([*words, param.opts[0], value])}")


def _with_variables(context: click.Context, message: str) -> str:
    """Return the message with the environment variables that set what it names, an option or its value."""
    words = set(re.findall(r"--[a-z][a-z-]*", message))
    for param in context.command.params:
        from_environment = context.get_parameter_source(param.name or "") is ParameterSource.ENVIRONMENT
        if from_environment and str(param.envvar) not in message:
            value = os.environ.get(str(param.envvar), "")
            if words & {*param.opts, *param.secondary_opts} or repr(value) in message:
                message = f"{message.rstrip('.')}; {param.opts[-1]} is set by the environment variable {param.envvar}"
    return message


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


def _spoken_name() -> str:
    """Return the name that was typed, after which stdout and stderr call commands by it."""
    name = typed_name()
    if name != OURS:
        speak_as(name, (*COMMANDS, *doors.entry_points(doors.COMMANDS)))
    return name


def _note(what: str) -> None:
    ctx = click.get_current_context(silent=True)
    if ctx is None or not ctx.params.get("quiet"):
        with contextlib.suppress(OSError):  # the terminal may be gone
            click.echo(printable(what), err=True)


def _as_interrupt(_signum: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
