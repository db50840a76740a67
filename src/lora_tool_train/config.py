"""A run's configuration: TRL's own flat YAML, options typed over it, and one block of ours.

TRL's own parser reads TRL's options, accelerate's reads accelerate's. Without the block ``lora_tool:`` the file is one
for `trl` too. Importing this is cheap; reading a run imports TRL, and with it torch: seconds, as `trl` itself takes.
"""

from __future__ import annotations

import argparse
import enum
import functools
import importlib
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from msgspec import Struct, field

from lora_tool.core.choices import closest
from lora_tool.core.display import some
from lora_tool.core.errors import CorruptFile
from lora_tool.formats.fields import Fields
from lora_tool.formats.files import read_text
from lora_tool_train.foreign import meant_by
from lora_tool_train.job import GuardSettings
from lora_tool_train.methods import Method
from lora_tool_train.traps import CODES, BadRunConfig

_BLOCK = "lora_tool"
_MAX_BYTES = 1 << 20
_PRESET = "accelerate_config"
"""TRL's own word beside accelerate's: the name of one of its presets, or the path of an accelerate config."""
_NOT_LAUNCH = ("help", "module", "no_python", "env")
_ABSENT = object()
_CHOICE = re.compile(r"invalid choice: '(.*?)' \(choose from (.*)\)")
"""How argparse refuses a value."""
_SCRIPT = "SCRIPT"
"""What stands for the script where only accelerate's options are parsed."""


class RunConfig(Struct, frozen=True, kw_only=True):
    """A whole run, before anything of it is built."""

    method: Method
    path: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Every option of TRL with its value, as TRL's parser reads it."""
    given: frozenset[str] = frozenset()
    """Names of the options that file or command line give."""
    typed: frozenset[str] = frozenset()
    """Those of the command line."""
    launch: Sequence[str] = ()
    """The command line of `accelerate launch`."""
    env: Mapping[str, str] = field(default_factory=dict)
    guard: GuardSettings = GuardSettings()

    def text(self, name: str) -> str | None:
        """Return the option as text, None where it is not given or null."""
        value = self.options.get(name) if name in self.given else None
        return None if value is None or str(value).lower() in ("none", "null") else str(value)

    def where(self, name: str) -> str:
        """Return the place that gives the option: what is typed wins over the file."""
        return "command line" if name in self.typed or self.path is None else str(self.path)

    @property
    def output(self) -> Path:
        """The run's folder; without `output_dir` it is the one that transformers names."""
        return Path(self.text("output_dir") or "trainer_output")


def read_run_config(method: Method, path: Path | None, words: Sequence[str]) -> RunConfig:
    """Return the run of `method` that the file `path` and the typed `words` describe; what is typed wins.

    Raises `BadRunConfig` for a file that is not a mapping, for a value that TRL's or accelerate's parser refuses, and
    for every name that neither they nor we have, with the closest one.
    """
    table = dict(_mapping(path)) if path else {}
    fields = Fields(table, path or "command line")
    block = fields.inner(_BLOCK)
    block.only(("guard",))
    guard, env = _guard(block.inner("guard")), fields.inner("env").table
    fields.require(BadRunConfig)

    parser = trl_parser(method)
    names = {action.dest for action in _actions(parser)} - {"help"}
    known = {*names, *_launch_flags(), _BLOCK, "env"}
    table = {name.replace("-", "_"): value for name, value in table.items() if name not in (_BLOCK, "env")}
    for name in table.keys() - known:
        raise _unknown_option(name, known, str(path))
    file = {name: value for name, value in table.items() if name in names}
    blank = argparse.Namespace(**dict.fromkeys((*names, "help"), _ABSENT))
    typed, rest = parser.parse_known_args(list(words), blank)
    parser.set_defaults_with_config(**file)
    extra = {name: value for name, value in table.items() if name not in names}
    on_line = frozenset(name for name, value in vars(typed).items() if value is not _ABSENT)
    options = vars(parser.parse_known_args(list(words))[0])
    for name in sorted(on_line | file.keys()):
        _require_allowed(name, options[name], parser, "command line" if name in on_line else str(path))
    return RunConfig(
        method=method,
        path=path,
        options=options,
        given=on_line | file.keys(),
        typed=on_line,
        launch=_launch(extra, rest, known),
        env={str(name): str(value) for name, value in env.items()},
        guard=guard,
    )


def _mapping(path: Path) -> Mapping[str, Any]:
    import yaml  # only where a run is read

    try:
        text = read_text(path, limit=_MAX_BYTES)
        _once(yaml.compose(text, Loader=yaml.SafeLoader), path)
        raw = yaml.safe_load(text)
    except CorruptFile as error:
        raise BadRunConfig(str(error)) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also a date or number that is none
        raise BadRunConfig(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if raw is None:
        return {}
    if not isinstance(raw, Mapping) or not all(isinstance(name, str) for name in raw):
        raise BadRunConfig(f"{path}: expected a mapping of option names to values, found {type(raw).__name__}")
    return raw


def _once(node: Any, path: Path) -> None:
    """Return if no option is given twice, of which YAML takes the last. Raises `BadRunConfig`."""
    names: list[Any] = []
    for key, value in node.value if getattr(node, "id", "") == "mapping" else ():
        if key.value in names:
            raise BadRunConfig(f"{path}: `{key.value}` is given twice", hint="remove one of the two lines")
        names.append(key.value)
        _once(value, path)


def _guard(fields: Fields) -> GuardSettings:
    fields.only(("mode", "window", "ignore"))
    off = fields.table.get("mode") is False  # YAML reads a bare off as false
    mode = "off" if off else fields.choice("mode", ("stop", "warn", "off")) or "stop"
    window = fields.integer("window", 10, least=1)
    return GuardSettings(mode=mode, window=window, ignore=fields.listed("ignore", tuple(CODES)))


def _unknown_option(name: str, known: Collection[str], where: str) -> BadRunConfig:
    close = closest(name, known)
    like = f"did you mean `{close}`?" if close else "neither TRL nor accelerate has such an option"
    hint = meant_by(name, known) or like
    return BadRunConfig(f"{where}: unknown option `{name}`", hint=hint)


def _require_allowed(name: str, value: object, parser: Any, where: str) -> None:
    """Return unless the option has some values and this is none of them, which TRL says only once it trains.

    Raises `BadRunConfig` with the closest of them.
    """
    held = (part for kind in parser.dataclass_types for part in get_args(_types_of(kind).get(name)))
    kinds = (part for part in held if isinstance(part, type) and issubclass(part, enum.Enum))
    allowed = [str(member.value) for kind in kinds for member in kind]
    if not isinstance(value, str) or isinstance(value, enum.Enum) or not allowed or value in allowed:
        return
    close = closest(value, allowed)
    hint = f"did you mean `{close}`?" if close else f"one of {', '.join(allowed)}"
    raise BadRunConfig(f"{where}: `{name}` is {value}, which is none of {some(allowed, 12)}", hint=hint)


@functools.cache
def _types_of(kind: type) -> Mapping[str, Any]:
    try:
        return get_type_hints(kind)
    except (NameError, TypeError):  # of an option whose type is not imported at runtime: TRL judges its values itself
        return {}


def trl_parser(method: Method) -> Any:
    """Return TRL's parser of the method's options, which raises `BadRunConfig` where it would end the process."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    if method.experimental:
        trl, scripts = importlib.import_module("trl"), importlib.import_module("trl.scripts.utils")
        config = getattr(importlib.import_module(method.home), f"{method.prefix}Config")
        classes = (scripts.ScriptArguments, config, trl.ModelConfig, scripts.DatasetMixtureConfig)
        parser = trl.TrlParser(classes, prog=f"lora-tool train {method.name}")
    else:
        parser = importlib.import_module(f"trl.scripts.{method.name}").make_parser(prog=f"trl {method.name}")
    parser.allow_abbrev = False
    parser.error = functools.partial(_refuse, "TRL")
    return parser


def _actions(parser: Any) -> Sequence[argparse.Action]:
    actions: Sequence[argparse.Action] = parser._actions  # noqa: SLF001 - argparse has no other list
    return actions


def described_options(method: Method) -> dict[str, list[tuple[str, str]]]:
    """Return the title of a group of TRL's options → each with its default, and the first sentence on it."""
    shared = importlib.import_module("transformers").TrainingArguments.__dataclass_fields__
    own: dict[str, tuple[str, str]] = {}
    others: dict[str, tuple[str, str]] = {}
    for action in _actions(trl_parser(method)):
        default = getattr(action.default, "value", action.default)
        name = f"--{action.dest}" if default in (None, argparse.SUPPRESS) else f"--{action.dest} {default}"
        said = " ".join((action.help or "").replace("%%", "%").split()).partition(". ")[0]
        (others if action.dest in shared else own).setdefault(action.dest, (name, said))
    own.pop("help")
    return {f"TRL options of {method.name}": [*own.values()], "Options of every method": [*others.values()]}


def _refuse(who: str, message: str) -> NoReturn:
    chosen = _CHOICE.search(message)
    close = closest(chosen[1], re.findall(r"[\w.-]+", chosen[2])) if chosen else None
    raise BadRunConfig(
        f"{who} does not accept the options: {message}", hint=f"did you mean `{close}`?" if close else None
    )


@functools.cache
def _launch_parser() -> Any:
    parser = importlib.import_module("accelerate.commands.launch").launch_command_parser()
    parser.error = functools.partial(_refuse, "accelerate")
    return parser


@functools.cache
def _launch_flags() -> Mapping[str, bool]:
    """Return each option of `accelerate launch` with whether it is a flag, which takes no value."""
    flags = {
        option[2:].replace("-", "_"): action.nargs == 0
        for action in _actions(_launch_parser())
        for option in action.option_strings
        if option.startswith("--")
    }
    return {name: flag for name, flag in flags.items() if name not in _NOT_LAUNCH} | {_PRESET: False}


def _launch(extra: Mapping[str, Any], typed: Sequence[str], known: Collection[str]) -> list[str]:
    """Return accelerate's command line for what the file asks for and what was `typed`."""
    words = [word for name, value in extra.items() for word in _launch_words(name, value)]
    words += [part for word in typed for part in (word.split("=", 1) if word.startswith("--") else [word])]
    resolve = importlib.import_module("trl.cli.accelerate_config").resolve_accelerate_config_argument
    try:
        words = [str(word) for word in resolve(words)]
    except ValueError as error:
        raise BadRunConfig(f"{_PRESET}: {error}", hint=f"{_PRESET}: zero3, or an accelerate.yaml") from error
    parsed, unknown = _launch_parser().parse_known_args([*words, _SCRIPT])
    if unknown:
        raise _unknown_option(unknown[0].lstrip("-").replace("-", "_"), known, "command line")
    if parsed.training_script != _SCRIPT:
        raise BadRunConfig(f"unexpected argument `{parsed.training_script}`", hint="options are written --name value")
    return words


def _launch_words(name: str, value: Any) -> list[str]:
    """Return the words of one option. A flag is given or left out: accelerate would run a file called `True`."""
    if _launch_flags()[name]:
        if not isinstance(value, bool):
            raise BadRunConfig(f"{name}: expected true or false, found {value!r}")
        return [f"--{name}"] if value else []
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return [] if value is None else [f"--{name}", text.lower() if isinstance(value, bool) else text]
