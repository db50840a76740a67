"""The options of a merge: those of its passes, and those of the work.

Each field of `MergeOptions` is an argument of the library's `merge`, an option of the commands `merge` and `ci`, and a
key of the block ``after: merge:`` in a run's YAML. `MergeArguments` adds what `ci` does not have.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_tool.checkpoints.sources import Reference
from lora_tool.core.choices import flag
from lora_tool.core.hub_names import ANYWHERE
from lora_tool.core.options import Options, Section, option
from lora_tool.plans.core.options import OUTPUT, ResumableOptions, SpreadOptions, WorkOptions
from lora_tool.plans.merge.passes.base_as import BaseAs
from lora_tool.plans.merge.passes.deltas import Deltas
from lora_tool.plans.merge.passes.ends import Untie
from lora_tool.plans.merge.passes.head import ForTask
from lora_tool.plans.merge.passes.side_files import Shards
from lora_tool.plans.merge.passes.steps import OutputType
from lora_tool.plans.merge.passes.store import Store
from lora_tool.plans.merge.passes.text_only import TextOnly
from lora_tool.rules.options import RuleOptions

SAME_RESULT: Mapping[str, Any] = {"jobs": None, "engine": "local", "address": None, "workers": None}
"""Options of the work, with their defaults: whatever they are, the same bytes are written."""


# the fields of the last base come first in a dataclass, and so in `--help`
@dataclass(frozen=True, kw_only=True)
class PlanOptions(RuleOptions, Shards, BaseAs, Store, TextOnly, Untie, Deltas, OutputType, ForTask):
    """The options of `plan_merge`: what the merged model is. Raises `WrongValue` for a bad value."""


@dataclass(frozen=True, kw_only=True)
class _Places(Options):
    """Where a merge reads and writes."""

    out: str | os.PathLike[str] | None = option(None, "Folder to write.  [default: a `-merged` sibling]", **OUTPUT)
    base: Reference | None = option(
        None, f"Base model: {ANYWHERE}.  [default: what adapter_config.json names]", metavar="MODEL"
    )


@dataclass(frozen=True, kw_only=True)
class MergeOptions(SpreadOptions, WorkOptions, PlanOptions, _Places):
    """The options of a merge, for the library, the commands and run.yaml. Raises `WrongValue` for a bad value."""

    section = Section.ARITHMETIC

    hash_base: bool = option(
        default=False,
        text="Record the sha256 of the base's files, which are read once more for it.",
        parse=flag,
    )
    allow_in_memory: bool = option(
        default=False, text="Let PEFT merge what only PEFT can, with the whole model in memory.", parse=flag
    )


@dataclass(frozen=True, kw_only=True)
class MergeArguments(MergeOptions, ResumableOptions):
    """The options that only `merge` has, in the library and as a command."""
