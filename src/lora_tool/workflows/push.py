"""Publishing a folder: planned against the Hub, hashed, pushed in one commit, and compared with what the Hub has."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from lora_tool.checkpoints.sources import Reference, Wanted, located
from lora_tool.core.options import option
from lora_tool.hub.options import PushCheck, PushOptions
from lora_tool.workflows.caller import LIBRARY, Caller

if TYPE_CHECKING:
    from lora_tool.hub.model import Pushed, PushPlan


@dataclass(frozen=True, kw_only=True)
class PublishOptions(PushOptions):
    """The options of a push, and how it is checked afterwards."""

    check: PushCheck | str = option(
        PushCheck.TREE,
        "Afterwards compare the Hub's hashes, or download every file and compare it.",
        parse=PushCheck,
        name="verify",
    )


class Published(Struct, frozen=True, kw_only=True):
    """A push: its plan, and the result, None in a dry run."""

    plan: PushPlan
    done: Pushed | None = None


def push(
    folder: Reference,
    repo: str,
    options: PublishOptions,
    caller: Caller = LIBRARY,
    *,
    planned: Callable[[PushPlan], None] = lambda _: None,
    bars: bool = False,
) -> Published:
    """Publish `folder`, an adapter or a model, here or on the Hub, as the repository `repo`: validated first, in one commit.

    `planned` is called with the plan before anything is sent; `bars` shows huggingface_hub's own. Raises as `plan_push`
    and `hub.pushing.push` do.
    """
    from lora_tool.hub import pushing  # the Hub's client is slow to import
    from lora_tool.hub.hashing import with_hashes
    from lora_tool.hub.planning import plan_push

    folder = located(folder, Wanted.MODEL).path
    with caller.progress("comparing with the Hub", _bytes_of(folder)) as advance:
        plan = plan_push(folder, repo, options, unseen=caller.dry_run, progress=advance)
    planned(plan)
    if caller.dry_run:
        return Published(plan=plan)
    with caller.progress("hashing", plan.sent_bytes) as advance:
        plan = with_hashes(plan, advance)
    return Published(plan=plan, done=pushing.push(plan, check=options.check, progress=bars))


def _bytes_of(folder: Path) -> int:
    """Return about how much there is to read: a bar may end early, where the Hub has nothing to compare with."""
    with contextlib.suppress(OSError):
        return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())
    return 0
