"""The options of a merge, declared once.

Each field of `MergeOptions` is an argument of the library's `merge`, an option of the commands `merge` and `ci`, and a
key of the block ``after: merge:`` in a run's YAML. `MergeArguments` adds what `ci` does not have.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lora_tool.choices import codes, flag, number_of_bytes, positive, wrong_value
from lora_tool.cluster.spread import EngineName, Spread
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.formats.quantised.four_bits import TrainedAs
from lora_tool.hub_names import ANYWHERE
from lora_tool.options import Options, option
from lora_tool.plan.base.task import Task
from lora_tool.plan.core.ops import Precision
from lora_tool.plan.merge.storages import Storage
from lora_tool.report.findings import Severity
from lora_tool.sources import Reference
from lora_tool.tensors import DType, float_type

SAME_RESULT: Mapping[str, Any] = {"jobs": None, "engine": "local", "address": None, "workers": None}
"""Options of the work, with their defaults: whatever they are, the same bytes are written."""


def severity(asked: object) -> Severity:
    """Return the severity at which findings fail. Raises `WrongValue` for everything but "error" and "warning"."""
    if asked not in (Severity.ERROR, Severity.WARNING):
        raise wrong_value("severity", asked, [Severity.ERROR.value, Severity.WARNING.value])
    return Severity(asked)


@dataclass(frozen=True, kw_only=True)
class MergeOptions(Options):
    """The options of a merge, for the library, the commands and run.yaml. Raises `WrongValue` for a bad value."""

    out: str | os.PathLike[str] | None = option(
        None, "Folder to write.  [default: a `-merged` sibling]", name="output", short=("-o",), metavar="PATH"
    )
    base: Reference | None = option(
        None, f"Base model: {ANYWHERE}.  [default: what adapter_config.json names]", metavar="MODEL"
    )
    task: Task | str = option(
        Task.AUTO,
        "Task of the merged model: reward is seq-cls with one label, as-trained the class that the adapter or base names.",
        parse=Task,
    )
    num_labels: int | None = option(None, "Number of labels that the head must have.", parse=positive)
    dtype: DType | str | None = option(
        None,
        "Data type of all weights.  [default: each as in the base]",
        parse=float_type,
        metavar="[bfloat16|float16|float32]",
    )
    precision: Precision | str = option(
        Precision.FLOAT32,
        "Arithmetic: float32 accumulation, PEFT's own bits, or the same bytes on every machine.",
        parse=Precision,
    )
    untie: bool = option(
        default=False, text="Write tied embeddings as two matrices, each as it was trained.", parse=flag
    )
    text_only: bool = option(
        default=False, text="Write only the text model of a multimodal base, as PEFT does.", parse=flag
    )
    store: Storage | str | None = option(
        None,
        "Weights of a quantised base: all in 16 bits, only those that the adapter changes, or none.  "
        "[default: as-base where the adapter changes no quantised weight, else all-16bit]",
        parse=Storage,
    )
    allow_loss: bool = option(
        default=False,
        text="Write the model even if rounding to the base's format keeps less than a tenth of ΔW.",
        parse=flag,
    )
    base_as: TrainedAs | str | None = option(
        None,
        "Round the linear layers of a 16-bit base to four bits and back, as QLoRA training loaded them.",
        parse=TrainedAs,
    )
    expert_layout: ExpertLayout | str | None = option(
        None,
        "How a fused lora_B of experts is packed.  [default: as adapter_config.json says, else PEFT's rank-major]",
        parse=ExpertLayout,
        name="moe-b-layout",
    )
    allow_in_memory: bool = option(
        default=False, text="Let PEFT merge what only PEFT can, with the whole model in memory.", parse=flag
    )
    max_shard_size: int | str | None = option(
        None, "Maximum size of a weights file.  [default: files as in the base]", parse=number_of_bytes, metavar="SIZE"
    )
    select: Iterable[str] = option((), "Run only these rules: LT206, or LT2 for all LT2xx.", parse=codes)
    ignore: Iterable[str] = option((), "Rules not to run.", parse=codes)
    fail_on: Severity | str = option(
        Severity.ERROR, "Fail on findings of this severity or worse.", parse=severity, metavar="[error|warning]"
    )
    jobs: int | None = option(None, "Number of workers.  [default: one per core]", parse=positive)
    engine: EngineName | str = option(
        EngineName.LOCAL, "Do the work on this machine, or on a Ray cluster that is running.", parse=EngineName
    )
    address: str | None = option(
        None,
        "Address of the Ray cluster.  [default: RAY_ADDRESS, else the cluster that this machine is part of]",
        parse=str,
        metavar="HOST:PORT",
    )
    workers: int | None = option(
        None, "Tasks that run at a time on the Ray cluster.  [default: one per CPU of the cluster]", parse=positive
    )
    overwrite: bool = option(
        default=False, text="Replace an existing output of lora-tool once the new one is complete.", parse=flag
    )

    @property
    def max_shard_bytes(self) -> int | None:
        """`max_shard_size` as a number."""
        return None if self.max_shard_size is None else number_of_bytes(self.max_shard_size)

    @property
    def spread(self) -> Spread:
        """Where the work is done."""
        return Spread(engine=EngineName(self.engine), address=self.address, workers=self.workers)

    def planning(self) -> dict[str, Any]:
        """Return the arguments of `plan_merge`."""
        of_base = ("store", "allow_loss", "base_as")
        names = ("task", "num_labels", "dtype", "precision", "untie", "text_only", *of_base)
        asked = {name: getattr(self, name) for name in (*names, "max_shard_bytes", "expert_layout")}
        return asked | self.rules()

    def rules(self) -> dict[str, Any]:
        """Return those arguments of `plan_merge` that choose the rules."""
        return {"select": self.select, "ignore": self.ignore, "fail_on": self.fail_on}

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.spread  # which says what contradicts the engine


@dataclass(frozen=True, kw_only=True)
class MergeArguments(MergeOptions):
    """The options of the library's `merge` and the command alone."""

    verify: bool = option(
        default=True, text="Read samples back and check them before the output gets its name.", parse=flag
    )
    resume: bool = option(
        default=False, text="Reuse what a killed run finished; leave a finished output as it is.", parse=flag
    )

    def writing(self) -> dict[str, Any]:
        """Return the arguments of `write`."""
        asked = {name: getattr(self, name) for name in ("verify", "jobs", "overwrite", "resume")}
        return asked | {"spread": self.spread}
