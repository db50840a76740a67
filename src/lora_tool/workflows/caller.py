"""The caller of a use case: how much it wants done, and the callbacks that it follows the work by."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, Union

from msgspec import Struct

from lora_tool.core.machine import one_arena
from lora_tool.core.progress import StageWatch, unwatched
from lora_tool.core.report.findings import Finding
from lora_tool.core.share import Share

if TYPE_CHECKING:
    from lora_tool.execution.attempts import ShareWritten
    from lora_tool.plans.core.plan import Plan
    from lora_tool.workflows.written import Planned, Written

Done: TypeAlias = Union["Written", "Planned", "ShareWritten"]
"""The result of a use case that writes: a folder; in a dry run its plan; or one part of its files."""


class Caller(Struct, frozen=True, kw_only=True):
    """How much of a use case is to be done, and what is called meanwhile. The default has all written and is silent."""

    dry_run: bool = False
    """Whether to stop once the plan is known."""
    part: Share | None = None
    """The share of the files to write, where several machines write one folder."""
    progress: StageWatch = unwatched
    """Gives a progress bar for work of so many bytes."""
    note: Callable[[str], None] = lambda _: None
    """Called with what was decided for the user, in one line."""
    planned: Callable[[Plan], None] = lambda _: None
    """Called with each plan before it is carried out."""
    findings: Callable[[tuple[Finding, ...]], None] = lambda _: None
    """Called with the findings on what was written."""
    done: Callable[[Done], None] = lambda _: None
    """Called with each result: a use case may write two folders."""
    own_process: bool = False
    """Whether the process does nothing else, so that its allocator and its garbage collector may be set for the work."""

    def spare_memory(self) -> None:
        """Have all threads take memory from one place, where the process is ours: for work that promises to take little."""
        if self.own_process:
            one_arena()


LIBRARY = Caller()
"""A program that calls the library: everything is written, and nothing is shown."""
