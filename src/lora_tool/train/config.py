"""A run's configuration: TRL's own flat YAML, options typed over it, and one block of ours.

What is TRL's goes to TRL unread; what is accelerate's goes to `accelerate launch`, flags as flags; the block
``lora_tool:`` is taken out, so that the file without it is one for `trl` too.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_tool.errors import BadRunConfig, CorruptFile
from lora_tool.formats.files import read_text
from lora_tool.plan.merge.options import MergeArguments, keys
from lora_tool.train.codes import CODES
from lora_tool.train.methods import Method
from lora_tool.train.options import Names, option_names, preset_path, presets

BLOCK = "lora_tool"
MODES = ("stop", "warn", "off")
_MAX_BYTES = 1 << 20
_TRUE = frozenset(("true", "1", "yes", "on", "y", "t"))
_FALSE = frozenset(("false", "0", "no", "off", "n", "f"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardSettings:
    """What the guards do: `stop` a doomed run, only `warn`, or `off`. `window` counts optimizer steps."""

    mode: str = "stop"
    window: int = 10
    ignore: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterSettings:
    """What is run when training has ended well. None: not asked for."""

    validate: bool = False
    consolidate: bool = False
    merge: Mapping[str, Any] | None = None
    push: Mapping[str, Any] | None = None

    @property
    def any(self) -> bool:
        return self.validate or self.consolidate or self.merge is not None or self.push is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A whole run, before anything of it is built. `options` are TRL's, from file and command line together."""

    method: Method
    path: Path | None
    options: Mapping[str, Any]
    typed: tuple[str, ...] = ()
    """Names of the options that come from the command line; TRL's parser reads those as text."""
    launch: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    guard: GuardSettings = GuardSettings()
    after: AfterSettings = AfterSettings()
    resuming: bool = False

    def text(self, name: str) -> str | None:
        """Return the option as text, None where it is not given or null."""
        value = self.options.get(name)
        return None if value is None or str(value).lower() in ("none", "null") else str(value)

    @property
    def output(self) -> Path:
        """The run's folder; without `output_dir` it is the one that transformers names."""
        return Path(self.text("output_dir") or "trainer_output")

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Return a yes-or-no option."""
        value = self.options.get(name)
        return default if value is None else str(value).lower() in _TRUE

    @property
    def arguments(self) -> tuple[str, ...]:
        """The typed options as TRL's parser takes them."""
        words: list[str] = []
        for name in self.typed:
            value = self.options[name]
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
        return tuple(words)

    def line(self, name: str, value: object) -> str:
        """Return what to write, and where, to give an option another value."""
        return f"{name}: {value}" + (f" in {self.path}" if self.path else f" (or --{name} {value})")


def read_run_config(method: Method, path: Path | None, arguments: Sequence[str]) -> RunConfig:
    """Return the run that the file `path` and the typed `arguments` describe; what is typed wins.

    Raises `BadRunConfig` for a file that is no mapping, and for every name that neither TRL nor accelerate nor we have,
    with the closest one.
    """
    raw = {} if path is None else dict(_mapping(path))
    names = option_names(method)
    block = _checked(raw.pop(BLOCK, None) or {}, ("guard", "after", "launch"), BLOCK)
    env = raw.pop("env", None) or {}
    if not isinstance(env, Mapping):
        raise BadRunConfig(f"{path}: env: expected a mapping of names to values, found {env!r}")
    where = str(path)
    given = {_known(name, names, where): value for name, value in raw.items()}
    launch: dict[str, Any] = {
        _known(n, names, f"{where}: {BLOCK}.launch"): v for n, v in _block(block, "launch").items()
    }
    typed = dict(_typed(arguments, names))
    given |= typed
    launch |= {name: given.pop(name) for name in list(given) if name not in names.trl}
    return RunConfig(
        method=method,
        path=path,
        options=_plain(given, names),
        typed=tuple(name for name in typed if name in names.trl),
        launch=_launch_arguments(launch, names),
        env={str(name): str(value) for name, value in env.items()},
        guard=_guard(_block(block, "guard")),
        after=_after(_block(block, "after")),
    )


def _mapping(path: Path) -> Mapping[str, Any]:
    import yaml  # noqa: PLC0415 - comes with the extra

    try:
        raw = yaml.safe_load(read_text(path, limit=_MAX_BYTES))
    except CorruptFile as error:
        raise BadRunConfig(str(error)) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f" line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise BadRunConfig(f"{path}{place}: not YAML: {getattr(error, 'problem', None) or error}") from error
    except (ValueError, RecursionError) as error:  # a date or number that is none; nested too deeply
        raise BadRunConfig(f"{path}: not YAML: {error}") from error
    if raw is None:
        return {}
    if not isinstance(raw, Mapping) or not all(isinstance(name, str) for name in raw):
        raise BadRunConfig(f"{path}: expected a mapping of option names to values, found {type(raw).__name__}")
    return raw


def _known(name: str, names: Names, where: str) -> str:
    """Return the option's name as TRL or accelerate has it. Raises `BadRunConfig` naming the closest."""
    found = name.replace("-", "_")
    if found in names.trl or found in names.launch:
        return found
    close = names.closest(found)
    raise BadRunConfig(
        f"{where}: unknown option `{name}`",
        hint=f"did you mean `{close}`?" if close else "trl and accelerate have no such option",
    )


def _typed(arguments: Sequence[str], names: Names) -> Iterable[tuple[str, Any]]:
    """Yield name and value of every typed option: ``--name value…``, ``--name=value``, ``--flag``, ``--no_flag``."""
    at = 0
    while at < len(arguments):
        word = arguments[at]
        at += 1
        if not word.startswith("--") or word == "--":
            raise BadRunConfig(f"unexpected argument `{word}`", hint="options are written --name value")
        name, equals, value = word[2:].partition("=")
        values = [value] if equals else []
        while not equals and at < len(arguments) and not arguments[at].startswith("--"):
            values.append(arguments[at])
            at += 1
        plain = name.replace("-", "_")
        if plain.startswith("no_") and plain not in names.trl and names.trl.get(plain[3:]) and not values:
            yield plain[3:], False
            continue
        known = _known(name, names, "command line")
        yes_or_no = names.trl.get(known, names.launch.get(known, False))
        if not values and not yes_or_no:
            raise BadRunConfig(f"--{name} needs a value", hint=f"--{name} VALUE")
        yield known, (values if len(values) > 1 else values[0]) if values else True


def _plain(options: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """Return the options with yes-or-no values as booleans; a word that is neither is an error."""
    plain = {}
    for name, value in options.items():
        plain[name] = value
        if names.trl.get(name) and isinstance(value, str):
            if value.lower() not in _TRUE | _FALSE | {"none", "null"}:
                raise BadRunConfig(f"{name}: expected true or false, found {value!r}")
            plain[name] = None if value.lower() in ("none", "null") else value.lower() in _TRUE
    return plain


def _launch_arguments(options: Mapping[str, Any], names: Names) -> tuple[str, ...]:
    """Return accelerate's command line. A flag is given or left out: accelerate would run a file called `True`."""
    arguments: list[str] = []
    for name, value in options.items():
        if names.launch[name]:
            if str(value).lower() in _TRUE:
                arguments.append(f"--{name}")
            elif str(value).lower() not in _FALSE:
                raise BadRunConfig(f"{name}: expected true or false, found {value!r}")
        elif name == "accelerate_config":
            path = preset_path(str(value))
            if path is None:
                raise BadRunConfig(
                    f"accelerate_config: {value} is neither a file nor one of: {', '.join(presets())}",
                    hint="accelerate config --config_file accelerate.yaml",
                )
            arguments += ["--config_file", str(path)]
        elif value is not None:
            text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
            arguments += [f"--{name}", text.lower() if isinstance(value, bool) else text]
    return tuple(arguments)


def _block(block: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return _checked(block.get(name) or {}, None, f"{BLOCK}.{name}")


def _checked(value: object, allowed: Sequence[str] | None, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadRunConfig(f"{where}: expected a mapping, found {value!r}")
    for name in value:
        if allowed is not None and name not in allowed:
            close = difflib.get_close_matches(str(name), allowed, n=1)
            raise BadRunConfig(
                f"{where}: unknown key `{name}`",
                hint=f"did you mean `{close[0]}`?" if close else f"known: {', '.join(allowed)}",
            )
    return value


def _guard(block: Mapping[str, Any]) -> GuardSettings:
    _checked(block, ("mode", "window", "ignore"), f"{BLOCK}.guard")
    mode, window, ignore = block.get("mode", "stop"), block.get("window", 10), block.get("ignore") or []
    mode = "off" if mode is False else str(mode)  # YAML reads a bare off as false
    if mode not in MODES:
        raise BadRunConfig(f"{BLOCK}.guard.mode: expected {', '.join(MODES)}, found {mode!r}")
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise BadRunConfig(f"{BLOCK}.guard.window: expected a number of steps, found {window!r}")
    ignore = [ignore] if isinstance(ignore, str) else ignore
    _checked(dict.fromkeys(ignore), tuple(CODES), f"{BLOCK}.guard.ignore")
    return GuardSettings(mode=mode, window=window, ignore=tuple(ignore))


_MERGE = keys(MergeArguments)
_PUSH = ("repo", "private", "revision", "create_pr", "tag", "message", "what")
_PUSHED = ("merged", "adapter")


def _after(block: Mapping[str, Any]) -> AfterSettings:
    _checked(block, ("validate", "consolidate", "merge", "push"), f"{BLOCK}.after")
    merge, push = block.get("merge"), block.get("push")
    merge = {} if merge is True else merge or None if merge is not None and not isinstance(merge, Mapping) else merge
    push = {"repo": push} if isinstance(push, str) else push or None
    if merge is not None:
        _checked(merge, _MERGE, f"{BLOCK}.after.merge")
    if push is not None and not _checked(push, _PUSH, f"{BLOCK}.after.push").get("repo"):
        raise BadRunConfig(f"{BLOCK}.after.push: needs `repo`", hint="push: {repo: owner/name}")
    what = (push or {}).get("what")
    if what not in (None, *_PUSHED):
        raise BadRunConfig(f"{BLOCK}.after.push.what: expected {' or '.join(_PUSHED)}, found {what!r}")
    if what == "merged" and merge is None:
        raise BadRunConfig(f"{BLOCK}.after.push.what: merged, but nothing is merged", hint="merge: true beside push")
    consolidate = str(block.get("consolidate", False)).lower() in (*_TRUE, "auto")
    return AfterSettings(validate=bool(block.get("validate", False)), consolidate=consolidate, merge=merge, push=push)
