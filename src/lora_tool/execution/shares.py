"""Writing one share of a plan's files: every share writes into the same unfinished folder, and one run finishes it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core.errors import OutputExists
from lora_tool.core.progress import Progress
from lora_tool.core.report.refusing import refuse_errors
from lora_tool.core.share import Share
from lora_tool.execution.at_work import at_work
from lora_tool.execution.attempts import AttemptEngine, require_divisible
from lora_tool.execution.folder import check_output, check_space, errors_of_the_system, real_place, shared_folder
from lora_tool.execution.journal import Journal, digest_of
from lora_tool.execution.looks import recorded_looks
from lora_tool.execution.reading import Sources
from lora_tool.execution.work import Work
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import Shard


class ShareWritten(Struct, frozen=True, kw_only=True):
    """The state of an unfinished folder after one share was written."""

    out: Path
    share: Share
    files: tuple[str, ...]
    """The files of the share."""
    nbytes: int
    """How many bytes their tensors have."""
    missing: tuple[str, ...]
    """Files of other shares that are not finished yet."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {
            "schema_version": 1,
            "output": str(self.out),
            "part": str(self.share),
            "files": list(self.files),
            "bytes": self.nbytes,
            "missing": list(self.missing),
        }


def shards_of(plan: Plan, share: Share) -> tuple[Shard, ...]:
    """Return the files of the plan that are this share: of all sizes, so that shares are of about the same."""
    return share.among(sorted(plan.shards, key=lambda shard: (-shard.data_bytes, shard.filename)))


def bytes_of(plan: Plan, share: Share) -> int:
    """Return how many bytes the share reports to its progress."""
    looks = share.among(plan.values.parts) if plan.values else ()
    return sum(shard.data_bytes for shard in shards_of(plan, share)) + sum(look.nbytes for look in looks)


def execute_share(
    plan: Plan,
    out: str | os.PathLike[str],
    share: Share,
    *,
    jobs: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ShareWritten:
    """Write the files of one `share` of the `plan` into the unfinished folder of `out`; return its state.

    Shares may be written one after the other or at the same time, on one machine or on several that share the storage,
    and again: what is finished is not written twice. `execute` with `resume` finishes the folder. `jobs`, `overwrite`
    and `progress`, which is called with `bytes_of` the share, are those of `execute`. Raises as `execute` and
    `require_divisible` do, and `OutputExists` where the unfinished folder is of another plan.
    """
    require_divisible(plan)
    check_output(Path(out), overwrite=overwrite, inputs=tuple({stamp.path.parent for stamp in plan.inputs}))
    target, shards = real_place(Path(out)), shards_of(plan, share)
    with errors_of_the_system(None, target), Sources(plan.inputs) as sources, shared_folder(target) as folder:
        journal = Journal(folder, digest_of(plan))
        if journal.plan_begun not in (None, journal.digest):
            raise OutputExists(
                f"{folder} was begun from another plan: with other inputs, options or versions",
                hint=f"give every part the same inputs and options, or remove the unfinished output: rm -r {shlex.quote(str(folder))}",
            )
        journal.begin()
        with at_work(journal, f"part {share}", alone=False):
            advance = progress or (lambda _: None)
            finished = journal.finished(shards)
            missing = tuple(shard for shard in shards if shard.filename not in finished)
            check_space(target, sum(shard.data_bytes for shard in missing))
            advance(sum(shard.data_bytes for shard in shards if shard.filename in finished))
            looks = share.among(recorded_looks(plan, journal))
            unhashed = replace(plan, hashed=())  # the manifest is written by the run that finishes the folder
            work = Work(plan=unhashed, folder=folder, digest=journal.digest, shards=missing, checks=looks)
            done = AttemptEngine(jobs=jobs).run(work, finished=lambda *_: None, progress=advance)
            refuse_errors(done.findings, plan.values.ignored if plan.values else ())
            sources.check_unchanged()
            left = tuple(shard.filename for shard in plan.shards if not journal.has_record(shard))
    return ShareWritten(
        out=Path(out),
        share=share,
        files=tuple(shard.filename for shard in shards),
        nbytes=sum(shard.data_bytes for shard in shards),
        missing=left,
    )
