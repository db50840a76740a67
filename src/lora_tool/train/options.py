"""The options of a run as TRL's and accelerate's own parsers read them.

Importing this is cheap; the first call imports TRL, and with it torch: seconds, as `trl` itself takes.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NoReturn

from lora_tool.choices import closest
from lora_tool.errors import BadRunConfig, MissingDependency
from lora_tool.train.methods import Method

PACKAGES = ("torch", "transformers", "peft", "trl", "accelerate", "datasets")
"""What the extra `train` installs."""

TRUE = frozenset(("true", "1", "yes", "on", "y", "t"))
_FALSE = frozenset(("false", "0", "no", "off", "n", "f"))
_PRESET = "accelerate_config"
"""TRL's own word beside accelerate's: the name of one of its presets, or the path of an accelerate config."""
_NOT_LAUNCH = ("help", "module", "no_python", "env")
_ABSENT = object()


def require_training(packages: Iterable[str] | None = None) -> None:
    """Return if the packages, by default all of the extra, are installed. Raises `MissingDependency` naming one that is not."""
    for package in PACKAGES if packages is None else packages:
        if find_spec(package) is None:
            raise MissingDependency(package, extra="train")


def unknown_option(name: str, known: Collection[str], where: str) -> BadRunConfig:
    """Return the error for an option `name` in the file or block `where` that is none of `known`: it names the closest."""
    close = closest(name, known)
    hint = f"did you mean `{close}`?" if close else "neither TRL nor accelerate has such an option"
    return BadRunConfig(f"{where}: unknown option `{name}`", hint=hint)


def trl_parser(method: Method) -> Any:
    """Return TRL's parser of the method's options, which raises `BadRunConfig` where it would end the process."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    if method.has_script:
        parser = importlib.import_module(f"trl.scripts.{method.name}").make_parser(prog=f"trl {method.name}")
    else:
        trl, scripts = importlib.import_module("trl"), importlib.import_module("trl.scripts.utils")
        config = getattr(importlib.import_module(method.home), method.config)
        classes = (scripts.ScriptArguments, config, trl.ModelConfig, scripts.DatasetMixtureConfig)
        parser = trl.TrlParser(classes, prog=f"lora-tool train {method.name}")
    parser.allow_abbrev = False
    parser.error = _refuse
    return parser


def _refuse(message: str) -> NoReturn:
    raise BadRunConfig(f"TRL does not accept the options: {message}")


@functools.cache
def launch_flags() -> Mapping[str, bool]:
    """Return each option of `accelerate launch` with whether it is a flag, which takes no value."""
    parser = importlib.import_module("accelerate.commands.launch").launch_command_parser()
    flags = {
        option[2:].replace("-", "_"): action.nargs == 0
        for action in parser._actions  # noqa: SLF001 - argparse has no other list
        for option in action.option_strings
        if option.startswith("--")
    }
    return {name: flag for name, flag in flags.items() if name not in _NOT_LAUNCH} | {_PRESET: False}


def read_options(
    method: Method, table: Mapping[str, Any], words: Sequence[str], where: str
) -> tuple[dict[str, Any], frozenset[str], dict[str, Any], dict[str, Any]]:
    """Return TRL's options with their values, the names of those that were given, what of `table` is TRL's, and accelerate's.

    `table` is the config file `where`, `words` are what was typed, which wins. Raises `BadRunConfig` for what neither
    TRL nor accelerate accepts.
    """
    parser = trl_parser(method)
    names = {action.dest for action in parser._actions} - {"help"}  # noqa: SLF001
    table = {name.replace("-", "_"): value for name, value in table.items()}
    known = {*names, *launch_flags(), "lora_tool", "env"}
    for name in table.keys() - known:
        raise unknown_option(name, known, where)
    file = {name: value for name, value in table.items() if name in names}
    blank = argparse.Namespace(**dict.fromkeys((*names, "help"), _ABSENT))
    typed, rest = parser.parse_known_args(list(words), blank)
    launch = {name: value for name, value in table.items() if name not in names} | dict(_launch_words(rest, known))
    parser.set_defaults_with_config(**file)
    values = vars(parser.parse_known_args(list(words))[0])
    given = {name for name, value in vars(typed).items() if value is not _ABSENT}
    return values, frozenset(given | file.keys()), file, launch


def _launch_words(words: Sequence[str], known: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each typed option that TRL's parser left over: ``--name value``, ``--name=value``, ``--flag``."""
    left = list(words)
    while left:
        word = left.pop(0)
        if not word.startswith("--") or word == "--":
            raise BadRunConfig(f"unexpected argument `{word}`", hint="options are written --name value")
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if name not in launch_flags():
            raise unknown_option(name, known, "command line")
        if equals:
            yield name, value
        elif launch_flags()[name]:
            yield name, True
        elif left and not left[0].startswith("--"):
            yield name, left.pop(0)
        else:
            raise BadRunConfig(f"--{name} needs a value", hint=f"--{name} VALUE")


def launch_words(options: Mapping[str, Any]) -> list[str]:
    """Return accelerate's command line. A flag is given or left out: accelerate would run a file called `True`."""
    words: list[str] = []
    for name, value in options.items():
        if launch_flags()[name]:
            if str(value).lower() not in TRUE | _FALSE:
                raise BadRunConfig(f"{name}: expected true or false, found {value!r}")
            words += [f"--{name}"] if str(value).lower() in TRUE else []
        elif name == _PRESET:
            words += _preset(str(value))
        elif value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            words += [f"--{name}", text.lower() if isinstance(value, bool) else text]
    return words


def _preset(name: str) -> list[str]:
    resolve = importlib.import_module("trl.cli.accelerate_config").resolve_accelerate_config_argument
    try:
        return [str(word) for word in resolve([f"--{_PRESET}", name])]
    except ValueError as error:
        raise BadRunConfig(f"{_PRESET}: {error}", hint=f"{_PRESET}: zero3, or an accelerate.yaml") from error


def parse(method: Method, table: Mapping[str, Any], words: Sequence[str]) -> list[Any]:
    """Return TRL's dataclasses (script, training, model and mixture arguments). Raises `BadRunConfig`."""
    parser = trl_parser(method)
    try:
        parser.set_defaults_with_config(**table)
        # what is left over is accelerate's, and was judged before
        return list(parser.parse_args_into_dataclasses(args=list(words), return_remaining_strings=True)[:4])
    except (ValueError, TypeError) as error:
        hint = f"trl {method.name} --help" if method.has_script else None
        raise BadRunConfig(f"TRL does not accept the options: {error}", hint=hint) from error
