"""A run's configuration: TRL's own flat YAML, options typed over it, and one block of ours.

What is TRL's is read by TRL's own parser; what is accelerate's goes to `accelerate launch`, flags as flags; the block
``lora_tool:`` is taken out, so that the file without it is one for `trl` too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_tool.errors import BadRunConfig, CorruptFile
from lora_tool.formats.fields import Fields, shown
from lora_tool.formats.files import read_text
from lora_tool.train.codes import CODES
from lora_tool.train.methods import Method
from lora_tool.train.options import launch_flags, launch_words, read_options, require_known

BLOCK = "lora_tool"
MODES = ("stop", "warn", "off")
_MAX_BYTES = 1 << 20


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
    """Whether an adapter that was saved without values is put together from the rank files."""
    merge: Mapping[str, Any] | None = None
    push: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """A whole run, before anything of it is built."""

    method: Method
    path: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Every option of TRL with its value, as TRL's parser reads it."""
    given: frozenset[str] = frozenset()
    """Names of the options that file or command line give."""
    file: Mapping[str, Any] = field(default_factory=dict)
    """TRL's part of the config file, as it stands there."""
    words: tuple[str, ...] = ()
    """What was typed."""
    launch: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    guard: GuardSettings = GuardSettings()
    after: AfterSettings = AfterSettings()
    resuming: bool = False

    def text(self, name: str) -> str | None:
        """Return the option as text, None where it is not given or null."""
        value = self.options.get(name) if name in self.given else None
        return None if value is None or str(value).lower() in ("none", "null") else str(value)

    @property
    def output(self) -> Path:
        """The run's folder; without `output_dir` it is the one that transformers names."""
        return Path(self.text("output_dir") or "trainer_output")

    def line(self, name: str, value: object) -> str:
        """Return what to write, and where, to give an option another value."""
        return f"{name}: {value}" + (f" in {self.path}" if self.path else f" (or --{name} {value})")


def read_run_config(method: Method, path: Path | None, words: Sequence[str]) -> RunConfig:
    """Return the run of `method` that the file `path` and the typed `words` describe; what is typed wins.

    Raises `BadRunConfig` for a file that is not a mapping, for a value that TRL's parser refuses, and for every name
    that neither TRL nor accelerate nor we have, with the closest one.
    """
    table = {} if path is None else dict(_mapping(path))
    where = str(path)
    block = _mapping_in(table, BLOCK, "", ("guard", "after", "launch"))
    env = _mapping_in(table, "env", "", None)
    ours = {name: value for name, value in table.items() if name not in (BLOCK, "env")}
    options, given, file, launch = read_options(method, ours, words, where)
    launch = {**_mapping_in(block, "launch", f"{BLOCK}.", launch_flags()), **launch}
    launch_words(launch)  # a value that accelerate would trip over is named now
    return RunConfig(
        method=method,
        path=path,
        options=options,
        given=given,
        file=file,
        words=tuple(words),
        launch=launch,
        env={str(name): str(value) for name, value in env.items()},
        guard=_guard(_mapping_in(block, "guard", f"{BLOCK}.", ("mode", "window", "ignore"))),
        after=_after(_mapping_in(block, "after", f"{BLOCK}.", ("validate", "consolidate", "merge", "push"))),
    )


def _mapping(path: Path) -> Mapping[str, Any]:
    import yaml  # noqa: PLC0415 - comes with the extra

    try:
        raw = yaml.safe_load(read_text(path, limit=_MAX_BYTES))
    except CorruptFile as error:
        raise BadRunConfig(str(error)) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also a date or number that is none
        raise BadRunConfig(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    if raw is None:
        return {}
    if not isinstance(raw, Mapping) or not all(isinstance(name, str) for name in raw):
        raise BadRunConfig(f"{path}: expected a mapping of option names to values, found {type(raw).__name__}")
    return raw


def _mapping_in(table: Mapping[str, Any], name: str, context: str, known: Collection[str] | None) -> Mapping[str, Any]:
    """Return the mapping that `table` has under `name`, {} where it has none; its keys must be `known`."""
    value = table.get(name) or {}
    if not isinstance(value, Mapping):
        raise BadRunConfig(f"{context}{name}: expected a mapping, found {shown(value)}")
    for key in value if known is not None else ():
        require_known(str(key), known or (), f"{context}{name}")
    return value


def _guard(block: Mapping[str, Any]) -> GuardSettings:
    mode = "off" if block.get("mode") is False else block.get("mode", "stop")  # YAML reads a bare off as false
    fields = Fields({**block, "mode": mode}, Path(), f"{BLOCK}.guard.")
    mode, window = fields.text("mode"), fields.integer("window", 10, least=1)
    ignored = fields.names_or_pattern("ignore") or ()
    _raise_first(fields)
    if mode not in MODES:
        raise BadRunConfig(f"{BLOCK}.guard.mode: expected {', '.join(MODES)}, found {mode!r}")
    ignore = (ignored,) if isinstance(ignored, str) else ignored
    for code in ignore:
        require_known(code, CODES, f"{BLOCK}.guard.ignore")
    return GuardSettings(mode=mode, window=window, ignore=ignore)


def _after(block: Mapping[str, Any]) -> AfterSettings:
    """Return the settings; the keys within merge and push are options of the command that is run, which judges them."""
    merge, push = block.get("merge"), block.get("push")
    merge = {} if merge is True else merge if merge is not False else None
    push = {"repo": push} if isinstance(push, str) else push or None
    fields = Fields({**block, "consolidate": block.get("consolidate") in (True, "auto")}, Path(), f"{BLOCK}.after.")
    validate, consolidate = fields.boolean("validate"), fields.boolean("consolidate")
    _raise_first(fields)
    if push is not None and not _mapping_in({"push": push}, "push", f"{BLOCK}.after.", None).get("repo"):
        raise BadRunConfig(f"{BLOCK}.after.push: needs `repo`", hint="push: {repo: owner/name}")
    if merge is not None:
        merge = _mapping_in({"merge": merge}, "merge", f"{BLOCK}.after.", None)
    return AfterSettings(validate=validate, consolidate=consolidate, merge=merge, push=push)


def _raise_first(fields: Fields) -> None:
    for problem in fields.problems:
        raise BadRunConfig(f"{problem.subject}: {problem.message}")
