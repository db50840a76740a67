"""Carrying a plan out: written, read back, and published under its name."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import replace

from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.checkpoints.sources import Reference
from lora_tool.core.engines import HERE, Spread
from lora_tool.core.errors import WrongValue
from lora_tool.core.machine import available_cores
from lora_tool.core.progress import StageWatch, unwatched
from lora_tool.core.report.findings import Finding
from lora_tool.core.share import Share
from lora_tool.execution.folder import check_output
from lora_tool.formats.files import expanded
from lora_tool.formats.manifest import FILE_NAME, read_manifest
from lora_tool.plans.core.manifest import is_written
from lora_tool.plans.core.options import ResumableOptions, WritingOptions
from lora_tool.plans.core.plan import Plan
from lora_tool.workflows.caller import Caller, Done
from lora_tool.workflows.written import Planned, Written

if TYPE_CHECKING:
    from lora_tool.execution.attempts import ShareWritten
    from lora_tool.plans.core.steps import Shard
    from lora_tool.rules.merged.evidence import TensorEvidence

_LARGE_FILE = 64 << 20
"""Bytes of a file that is read back while others are written: there is a thread to start, and libraries to look through."""


def require_output(out: Path, options: WritingOptions, *inputs: Reference) -> None:
    """Return if `out` may be written, as far as the disk and the names of the `inputs` show: before one is opened.

    Raises as `check_output`.
    """
    places = (each.root if not isinstance(each, str | os.PathLike) else expanded(each) for each in inputs)
    require_apart(out, options, *(place for place in places if place.exists()))


def require_apart(out: Path, options: WritingOptions, *folders: Path) -> None:
    """Return if `out` may be written and is none of the `folders` that are read. Raises as `check_output`."""
    check_output(out, overwrite=options.overwrite or _resumes(options), inputs=folders)


def require_part(caller: Caller, options: WritingOptions, spread: Spread = HERE) -> None:
    """Return if the options allow the caller's part of the output, if it wants one. Raises `WrongValue`."""
    if caller.part is None:
        return
    if spread.cluster is not None:
        raise WrongValue("this machine writes a part, not the cluster", hint='leave out `part=I/N`, or `engine="NAME"`')
    if _resumes(options):
        raise WrongValue("`resume=True` finishes what the parts have begun", hint="leave out `part=I/N`")


def _resumes(options: WritingOptions) -> bool:
    return isinstance(options, ResumableOptions) and options.resume


@contextlib.contextmanager
def hashing(caller: Caller, *inputs: AdapterDir | ModelDir) -> Iterator[None]:
    """Hash the inputs' weights beside the planning and the writing of what is made from them, if it is written here."""
    if caller.dry_run or caller.part is not None:
        yield
        return
    from lora_tool.execution.local_engine import hashed_meanwhile  # no dry run uses it

    with hashed_meanwhile(file.path for each in inputs for file in each.weights.files):
        yield


def carry_out(plan: Plan, out: Path, options: WritingOptions, caller: Caller, spread: Spread = HERE) -> Done:
    """Write the folder `out` as `plan` says, or the part of it that the caller wants; in a dry run only return the plan.

    Raises as `write` does.
    """
    caller.planned(plan)
    done: Done
    if caller.dry_run:
        done = Planned(path=out, plan=plan)
    elif caller.part is not None:
        done = _written_part(plan, out, caller.part, options, caller)
    else:
        if caller.own_process:
            gc.freeze()  # the plan stays: from here on only what the long work makes is searched for cycles
            gc.set_threshold(100_000, 100)
        done = write(
            plan,
            out,
            verify=options.verify,
            jobs=options.jobs,
            overwrite=options.overwrite,
            resume=_resumes(options),
            spread=spread,
            watch=caller.progress,
            found=caller.findings,
        )
    caller.done(done)
    return done


def _written_part(plan: Plan, out: Path, part: Share, options: WritingOptions, caller: Caller) -> ShareWritten:
    from lora_tool.execution.attempts import bytes_of, execute_share  # what computes: no dry run uses it

    with caller.progress(f"part {part}", bytes_of(plan, part)) as progress:
        return execute_share(plan, out, part, jobs=options.jobs, overwrite=options.overwrite, progress=progress)


def write(
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    verify: bool = True,
    jobs: int | None = None,
    overwrite: bool = False,
    resume: bool = False,
    spread: Spread = HERE,
    watch: StageWatch = unwatched,
    found: Callable[[tuple[Finding, ...]], None] = lambda _: None,
) -> Written:
    """Write the folder `out` as `plan` says and return the result.

    `jobs`, `overwrite` and `resume` are those of `execute`, `spread` says where the work is done. With `verify`,
    samples of what was written are read back and compared before the folder gets its name, and `found` is called with
    what the rules say of it. `watch` is asked for the progress of the writing. With `resume` a folder that an earlier
    run wrote from the same stays as it is. Raises as `execute` does, and `VerificationFailed`.
    """
    from lora_tool.execution.engine import engine_of, execute  # what computes: no dry run uses it
    from lora_tool.execution.local_engine import workers_for

    workers = workers_for(plan, jobs)
    read_back = ReadBack(plan=plan, out=Path(out), jobs=workers, found=found)
    if resume and is_written(plan, Path(out)):
        return replace(read_back.written(), finished_before=True)
    with watch(*work_of(plan)) as progress:
        execute(
            plan,
            out,
            engine=engine_of(spread, jobs=jobs, written=read_back.look if verify else None),
            overwrite=overwrite,
            resume=resume,
            progress=progress,
            check=read_back.check if verify else None,
        )
    return read_back.written()


def work_of(plan: Plan) -> tuple[str, int]:
    """Return what the writing of the plan is called, and how many bytes it reports to its progress."""
    looked_at = plan.values.nbytes if plan.values else 0
    return "checking and writing" if looked_at else "writing", plan.data_bytes + looked_at


class ReadBack(Struct, kw_only=True):
    """A folder that is written as `plan` says, and what reading samples of it back shows, told to `found`."""

    plan: Plan
    out: Path
    jobs: int | None = None
    found: Callable[[tuple[Finding, ...]], None] = lambda _: None
    summary: Mapping[str, Any] | None = None
    _seen: dict[str, TensorEvidence] = field(default_factory=dict)

    def look(self, folder: Path, shard: Shard) -> None:
        """Read samples of a large file's tensors back while others are written; `check` reads those of small ones."""
        # one thread for BLAS in here would be one for an init's decomposition, too, which has other bits then
        if not self.plan.recomputes_inits and shard.data_bytes >= _LARGE_FILE:
            from lora_tool.verification.checking import check_file  # only where checked

            workers = self.jobs or available_cores()
            jobs = workers if shard is self.plan.shards[-1] else max(1, workers // 2)
            self._seen.update(check_file(self.plan, folder, shard, jobs=jobs))

    def check(self, folder: Path) -> Mapping[str, Any]:
        """Return the summary of the folder, which has another name yet. Raises `FindingsFound`, `VerificationFailed`."""
        from lora_tool.verification.checking import check_written  # only where checked
        from lora_tool.verification.verified import summary_json  # only where checked

        seen = check_written(self.plan, folder, jobs=self.jobs, seen=self._seen)
        # under the name that the user knows
        named = tuple(
            replace(each, path=each.path.replace(str(folder), str(self.out), 1)) for each in seen.report.findings
        )
        self.found(named)
        replace(seen, report=replace(seen.report, findings=named)).raise_for_errors()
        self.summary = summary_json(seen)
        return self.summary

    def written(self) -> Written:
        """Return what was written, once the folder has its name."""
        manifest = read_manifest(self.out / FILE_NAME).raw
        return Written(
            path=self.out,
            plan=self.plan,
            fidelity=manifest["fidelity"],
            warnings=tuple(manifest["warnings"]),
            verification=self.summary,
        )
