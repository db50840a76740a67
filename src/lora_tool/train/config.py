"""A run's configuration: TRL's own flat YAML, options typed over it, and one block of ours.

What is TRL's is read by TRL's own parser; what is accelerate's goes to `accelerate launch`, flags as flags; the block
``lora_tool:`` is taken out, so that the file without it is one for `trl` too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_tool.errors import BadRunConfig, CorruptFile
from lora_tool.formats.fields import Fields
from lora_tool.formats.files import read_text
from lora_tool.train.codes import CODES
from lora_tool.train.methods import Method
from lora_tool.train.options import launch_flags, launch_words, read_options

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
    """Whether an adapter that was saved without values is reassembled from the rank files."""
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
    table = dict(_mapping(path)) if path else {}
    fields = Fields(table, path or "command line")
    block = fields.inner(BLOCK)
    block.only(("guard", "after", "launch"))
    guard, after, env = _guard(block.inner("guard")), _after(block.inner("after")), fields.inner("env").table
    launch = block.inner("launch")
    launch.only(launch_flags())
    fields.require(BadRunConfig)
    theirs = {name: value for name, value in table.items() if name not in (BLOCK, "env")}
    options, given, file, launched = read_options(method, theirs, words, str(path))
    launched = {**launch.table, **launched}
    launch_words(launched)  # a value that accelerate would trip over is named now
    return RunConfig(
        method=method,
        path=path,
        options=options,
        given=given,
        file=file,
        words=tuple(words),
        launch=launched,
        env={str(name): str(value) for name, value in env.items()},
        guard=guard,
        after=after,
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


def _guard(fields: Fields) -> GuardSettings:
    fields.only(("mode", "window", "ignore"))
    off = fields.table.get("mode") is False  # YAML reads a bare off as false
    mode = "off" if off else fields.choice("mode", MODES) or "stop"
    return GuardSettings(
        mode=mode, window=fields.integer("window", 10, least=1), ignore=fields.listed("ignore", tuple(CODES))
    )


def _after(fields: Fields) -> AfterSettings:
    """Return the settings; what merge and push hold are options of the command that is run, which judges them."""
    fields.only(("validate", "consolidate", "merge", "push"))
    merge, push, consolidate = (fields.table.get(name) for name in ("merge", "push", "consolidate"))
    merged = {} if merge is True else None if merge in (None, False) else fields.inner("merge").table
    pushed = {"repo": push} if isinstance(push, str) else fields.inner("push").table or None
    if pushed is not None and not pushed.get("repo"):
        fields.note("push", "needs `repo`: push: {repo: owner/name}")
    return AfterSettings(
        validate=fields.boolean("validate"),
        consolidate=consolidate == "auto" or fields.boolean("consolidate"),
        merge=merged,
        push=pushed,
    )
