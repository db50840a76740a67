"""The options that several use cases share, each declared once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from lora_tool.core.choices import flag, fraction, number_of_bytes, positive
from lora_tool.core.engines import LOCAL, Spread, engine_name
from lora_tool.core.options import Options, Section, option
from lora_tool.core.progress import StageWatch
from lora_tool.core.tensors import FLOAT_NAMES, DType, float_type

OUTPUT: Mapping[str, Any] = {"name": "output", "short": ("-o",), "metavar": "PATH"}
"""The spelling of the folder that is written."""
FLOAT_DTYPE: Mapping[str, Any] = {"parse": float_type, "metavar": f"[{'|'.join(FLOAT_NAMES.values())}]"}
"""The spelling of a data type of weights."""
SHARD_SIZE: Mapping[str, Any] = {"parse": number_of_bytes, "metavar": "SIZE"}
"""The spelling of the maximum size of a weights file."""


@dataclass(frozen=True, kw_only=True)
class WatchedOptions(Options):
    """Who watches the work."""

    common: ClassVar[bool] = True

    watch: StageWatch | None = option(
        None,
        "Called with a description of the work and its number of bytes; returns a context manager of its progress. "
        "A notebook shows a bar without it.",
        library_only=True,
    )


@dataclass(frozen=True, kw_only=True)
class JobsOptions(WatchedOptions):
    """How much of this machine works."""

    common: ClassVar[bool] = True
    section = Section.WORKERS

    jobs: int | None = option(None, "Number of workers.  [default: one per core; 2 for factors]", parse=positive)


@dataclass(frozen=True, kw_only=True)
class WorkOptions(JobsOptions):
    """How a folder is written."""

    common: ClassVar[bool] = True
    section = Section.OUTPUT

    overwrite: bool = option(
        default=False, text="Replace an existing output of lora-tool once the new one is complete.", parse=flag
    )


@dataclass(frozen=True, kw_only=True)
class WritingOptions(WorkOptions):
    """How a folder is written and read back."""

    common: ClassVar[bool] = True
    section = Section.CHECKS

    verify: bool = option(
        default=True,
        text="Read samples back and check them before the output gets its name.",
        parse=flag,
        off="no-verify",
    )


@dataclass(frozen=True, kw_only=True)
class ResumableOptions(WritingOptions):
    """How a folder is written and read back, where a killed run can be resumed."""

    common: ClassVar[bool] = True
    section = Section.OUTPUT

    resume: bool = option(
        default=False, text="Reuse what a killed run finished; leave a finished output as it is.", parse=flag
    )


@dataclass(frozen=True, kw_only=True)
class SpreadOptions(Options):
    """Where the work is done. Raises `WrongValue` for an address or workers of this machine."""

    common: ClassVar[bool] = True
    section = Section.WORKERS

    engine: str = option(
        LOCAL,
        "Do the work on this machine, or on a cluster by the engine of this name.",
        parse=engine_name,
        metavar="NAME",
    )
    address: str | None = option(
        None,
        "Address of the cluster.  [default: the one that the engine finds]",
        parse=str,
        metavar="HOST:PORT",
    )
    workers: int | None = option(
        None, "Tasks that run at a time on the cluster.  [default: the engine decides]", parse=positive
    )

    @property
    def spread(self) -> Spread:
        """Where the work is done."""
        return Spread(engine=self.engine, address=self.address, workers=self.workers)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.spread  # which says what contradicts the engine


@dataclass(frozen=True, kw_only=True)
class RankOptions(Options):
    """Which ranks the modules of a new adapter get, and its data type."""

    rank: int | None = option(None, "Maximum rank of a module.", parse=positive)
    keep: float | None = option(
        None,
        "Minimum share of ‖ΔW‖² to keep in each module, such as 0.99; each gets the lowest rank that keeps it.",
        parse=fraction,
        metavar="SHARE",
    )
    dtype: DType | str | None = option(
        None, "Data type of the factors.  [default: float32; unchanged if the result is exact]", **FLOAT_DTYPE
    )
