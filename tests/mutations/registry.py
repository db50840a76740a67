"""What an injury is, where injuries are kept, and the copies of good fixtures that they are done to."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_tool import plan_merge
from lora_tool.checkpoints import AdapterDir, open_checkpoint, open_model
from lora_tool.execution.engine import execute
from lora_tool.plans.algebra.plan_combine import plan_resize

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
