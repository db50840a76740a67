"""What an injury is, where injuries are kept, and the copies of good fixtures that they are done to."""

from __future__ import annotations

import fnmatch
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from lora_tool import plan_merge
from lora_tool.checkpoints import AdapterDir, open_checkpoint, open_model
from lora_tool.execution.engine import execute
from lora_tool.plans.algebra.plan_combine import plan_resize
from tests.checkpoint_edits import CONFIG, PREFIX, WEIGHTS, Raw, Tensors, fields, renamed, tensors
from tests.mutations import places
from tests.mutations.merged_models import weights

FIXTURES = Path(__file__).parents[2] / "fixtures"
CAUSAL = "causal-llama/adapter"
CAUSAL_MERGED = "causal-llama/merged"
REWARD = "reward-qwen2/adapter"
MERGED = "reward-qwen2/merged"
RUN = "reward-run/checkpoint-2"
WHOLE_RUN = "reward-run"
SHARDED = "causal-llama/base"
MODEL = "reward-qwen2/base"


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """An injury to the folder `of` the fixtures, and with which options it is judged."""

    code: str
    of: str
    injure: Callable[[Path], None]
    options: Mapping[str, Any] = field(default_factory=dict)
    with_base: bool = False
    quiet: bool = False
    """The code is expected as information only."""
    verified: bool = False
    """It is a merged model, which `verify` judges."""


MUTATIONS: dict[str, Mutation] = {}


def breaks(
    name: str, of: str, *, with_base: bool = False, quiet: bool = False, verified: bool = False, **options: object
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Return a decorator that enters an injury under `name`, whose first word is the code that it must give."""

    def register(injure: Callable[[Path], None]) -> Callable[[Path], None]:
        code = name.partition(" ")[0]
        MUTATIONS[name] = Mutation(
            code=code, of=of, injure=injure, options=options, with_base=with_base, quiet=quiet, verified=verified
        )
        return injure

    return register


@dataclass(frozen=True)
class Edit:
    """An injury that gives fields and tensors of the folder `of` the fixtures other values.

    A tensor's name has `{Q_PROJ}`, `{DOWN_PROJ}` and `{SCORE}` for those of `places`, and `{PREFIX}`.
    """

    of: str
    _: KW_ONLY
    by: Callable[[Path], object] = field(default=lambda _: None)
    """What is done first."""
    written: Mapping[str, str] = field(default_factory=dict)
    """Files, and what stands in them."""
    gone: Sequence[str] = ()
    """Files that are lost."""
    renamed: Callable[[str], str] | None = None
    """What its tensors are called instead."""
    file: str = CONFIG
    """The JSON file of which `config` and `without` say the fields."""
    config: Mapping[str, Any] = field(default_factory=dict)
    without: Sequence[str] = ()
    """Fields that the config loses."""
    target: str | None = None
    """One more of its target modules."""
    tensors: Mapping[str, Raw] = field(default_factory=dict)
    changed: Mapping[str, Callable[[Raw], Raw]] = field(default_factory=dict)
    """What is done to the tensors whose names match."""
    removed: Sequence[str] = ()
    copied: Mapping[str, str] = field(default_factory=dict)
    """New names, and those of the tensors that they have besides."""
    base: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the config.json of the base beside it."""
    options: Mapping[str, Any] = field(default_factory=dict)
    with_base: bool = False
    quiet: bool = False
    verified: bool = False

    def injure(self, folder: Path) -> None:
        self.by(folder)
        for name, text in self.written.items():
            (folder / name).write_text(text)
        for name in self.gone:
            (folder / name).unlink()
        if self.base:
            with fields(folder.parent / "base", "config.json") as config:
                config.update(self.base)
        if self.config or self.without or self.target:
            with fields(folder, self.file) as config:
                self._edit_fields(config)
        if self.renamed:
            renamed(folder, self.renamed)
        if self.changed or self.copied or self.removed or self.tensors:
            with tensors(folder) if (folder / WEIGHTS).exists() else weights(folder) as table:
                self._edit_tensors(table)

    def _edit_fields(self, config: dict[str, Any]) -> None:
        config.update(self.config)
        for name in self.without:
            del config[name]
        if self.target:
            config["target_modules"].append(self.target)

    def _edit_tensors(self, table: Tensors) -> None:
        for pattern, change in self.changed.items():
            for name in fnmatch.filter(table, _named(pattern)):
                table[name] = change(table[name])
        table.update({_named(name): table[_named(old)] for name, old in self.copied.items()})
        for name in self.removed:
            del table[_named(name)]
        table.update({_named(name): tensor for name, tensor in self.tensors.items()})


def _named(name: str) -> str:
    return name.format(PREFIX=PREFIX, Q_PROJ=places.Q_PROJ, DOWN_PROJ=places.DOWN_PROJ, SCORE=places.SCORE)


def enter(module: str, edits: Mapping[str, Edit]) -> None:
    """Enter the injuries of a module by their names, whose first words are the codes that they must give."""
    for name, edit in edits.items():

        def injure(folder: Path, edit: Edit = edit) -> None:
            edit.injure(folder)

        injure.__module__ = module
        breaks(name, edit.of, with_base=edit.with_base, quiet=edit.quiet, verified=edit.verified, **edit.options)(
            injure
        )


def copy_of(fixture: str, where: Path) -> Path:
    """Copy the fixture that `fixture` (``causal-llama/adapter``) lies in, and return the copy of it.

    ``reward-qwen2/merged`` is made on the spot, from the copies of its base and adapter, ``resized`` from the adapter.
    """
    root, _, folder = fixture.partition("/")
    shutil.copytree(FIXTURES / root, where / root)
    if folder == "resized":
        return execute(plan_resize(where / root / "adapter", rank=3), where / root / folder)
    return merged_in(where / root) if folder == "merged" else where / root / folder


def merged_in(root: Path) -> Path:
    """Merge the adapter in `root` into the base beside it, and return the merged folder."""
    adapter = open_checkpoint(root / "adapter")
    assert isinstance(adapter, AdapterDir)
    return execute(plan_merge(open_model(root / "base"), adapter), root / "merged", overwrite=True)


def break_(folder: Path, name: str) -> None:
    """Injure a copy of the fixture that `MUTATIONS[name].of` names."""
    MUTATIONS[name].injure(folder)
