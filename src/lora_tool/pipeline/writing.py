"""Carrying a plan out: written, read back, and published under its name, with one summary for people and programs."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import replace

from lora_tool.actions import TensorAction
from lora_tool.cluster.spread import HERE, Spread
from lora_tool.display import counted, printable, size
from lora_tool.formats import adapter_config, model_config
from lora_tool.formats.manifest import FILE_NAME, read_manifest
from lora_tool.machine import available_cores
from lora_tool.plan.core import delta_retention
from lora_tool.plan.core.manifest import is_written
from lora_tool.plan.core.plan import Plan
from lora_tool.progress import StageWatch, unwatched
from lora_tool.report.findings import Finding
from lora_tool.report.json import finding_json
from lora_tool.rules.serving.left_out import TOWERS, is_outside

if TYPE_CHECKING:
    from lora_tool.plan.core.steps import Shard, Step
    from lora_tool.rules.merged.evidence import TensorEvidence
    from lora_tool.tensors import TensorTable

_SERVED = {
    "vllm": "vllm serve BASE --enable-lora{towers} --max-lora-rank {rank} --lora-modules name={path}",
    "sglang": "python -m sglang.launch_server --model-path BASE --enable-lora --lora-paths name={path}",
    "llama.cpp": "python convert_lora_to_gguf.py --base BASE {path}",
    "mlx": "mlx_lm.generate --model BASE --adapter-path {path}",
}
"""What is typed next with an adapter that was prepared for a server."""
_AUTO_CLASSES = ("ForSequenceClassification", "ForCausalLM", "ForTokenClassification")
"""Ends of class names that transformers loads by its AutoModel of that name."""

_LARGE_FILE = 64 << 20
"""Bytes of a file that is read back while others are written: there is a thread to start, and libraries to look through."""


class Written(Struct, frozen=True, kw_only=True):
    """A written folder, and the result of reading it back. `str()` of it gives what the command prints."""

    path: Path
    plan: Plan
    fidelity: Mapping[str, Any] | None
    """How much of the merged ΔW remains after rounding to the output's dtype; None if nothing was merged."""
    warnings: tuple[str, ...] = ()
    verification: Mapping[str, Any] | None = None
    """The summary of reading the folder back; None without `verify`."""
    finished_before: bool = False
    """Whether an earlier run wrote the same, so that `resume` left it as it is."""

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Written({str(self.path)!r}{f': {self.verdict}' if self.verdict else ''})"

    def __str__(self) -> str:
        return "\n".join((*intent(self.plan), *self.result()))

    def result(self) -> Iterator[str]:
        """Yield the lines of the summary that are known only after the writing."""
        plan = self.plan
        if self.fidelity is not None:
            yield printable(delta_retention.line(self.fidelity))
        wrote = "finished before, and left as it is:" if self.finished_before else "wrote"
        files = counted(len(plan.shards), "weight file")
        yield f"{wrote} {printable(str(self.path))}: {size(plan.data_bytes)} in {files}"
        if self.verdict:
            yield self.verdict
        if next_step := self._next_step():
            yield f"next: {next_step}"

    @property
    def verdict(self) -> str:
        """The result of reading the folder back, in one line; empty without `verify`."""
        if self.verification is None:
            return ""
        found = self.verification
        unknown = f", {len(found['not_recomputed'])} not recomputed" if found["not_recomputed"] else ""
        right = f"{found['right']} of {found['tensors']} tensors match"
        return f"verified in sampled values: {right}{farthest(found)}{unknown}"

    def _next_step(self) -> str | None:
        """Return what is typed to go on with the folder, None where nothing is known to take it."""
        if (server := self.plan.manifest.get("for")) in _SERVED:
            rank = self.plan.manifest["served_rank"]
            towers = f" {TOWERS}" if any(is_outside(step.out.name) for step in self.plan.steps) else ""
            return _SERVED[server].format(path=shlex.quote(str(self.path)), rank=rank, towers=towers)
        by_file = {file.filename: file for file in self.plan.side_files}
        if adapter_config.FILE_NAME in by_file:
            return f"lora-tool merge {shlex.quote(str(self.path))}"
        config = by_file.get(model_config.FILE_NAME)
        classes = json.loads(config.content).get("architectures") if config and config.content else None
        if not classes:
            return None
        ending = next((each for each in _AUTO_CLASSES if str(classes[0]).endswith(each)), None)
        loader = f"AutoModel{ending}" if ending else printable(str(classes[0]))
        return f"{loader}.from_pretrained({json.dumps(str(self.path), ensure_ascii=False)})"

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        plan = self.plan
        return {
            "schema_version": 1,
            "output": str(self.path),
            "total_size": plan.data_bytes,
            "counts": plan.counts(),
            "files": [*(shard.filename for shard in plan.shards), *(file.filename for file in plan.side_files)],
            "verification": self.verification,
            "finished_before": self.finished_before,
            "notes": list(plan.notes),
            **plan.figures,
            "fidelity": self.fidelity,
            "findings": [finding_json(finding) for finding in plan.findings],
            "warnings": list(self.warnings),
        }


def intent(plan: Plan) -> Iterator[str]:
    """Yield what the plan does, a line each: what goes into what, what is left out, the files, how many tensors."""
    yield from map(printable, plan.notes)
    for file in plan.side_files:
        yield f"  {printable(file.filename)}: {printable(file.reason)}"
    counts = plan.counts()
    used = counts.pop(TensorAction.CONSUMED.value, 0)
    actions = ", ".join(f"{count:,} {action}" for action, count in counts.items())
    whose = f"; all {used:,} tensors of the adapter used" if used else ""
    yield f"tensors: {actions}{whose} (precision {plan.precision})"


def farthest(summary: Mapping[str, Any]) -> str:
    """Return how far the values are from those computed again, as a verification's `summary` says; "" without any."""
    ulps = summary["largest_ulps"]
    return "" if ulps is None else f", max error {ulps:.2f} ulp"


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
    from lora_tool.execution.engine import engine_of, unfinished  # what computes: no dry run uses it
    from lora_tool.execution.local_engine import workers_for

    workers = workers_for(plan, jobs)
    read_back = ReadBack(plan=plan, out=Path(out), jobs=workers, found=found, while_flushed=spread.cluster is None)
    if resume and is_written(plan, Path(out)):
        return replace(read_back.written(), finished_before=True)
    with watch(*work_of(plan)) as progress:
        folder = unfinished(
            plan,
            out,
            overwrite=overwrite,
            resume=resume,
            progress=progress,
            check=read_back.check if verify else None,
            check_file=read_back.check_file if verify else None,
        )
        with folder as weights:
            look = partial(read_back.look, weights.work.folder) if verify else None
            weights.write(engine_of(spread, jobs=jobs, written=look))
    return read_back.written()


def work_of(plan: Plan) -> tuple[str, int]:
    """Return what the writing of the plan is called, and how many bytes it reports to its progress."""
    looked_at = plan.values.nbytes if plan.values else 0
    return "checking and writing" if looked_at else "writing", plan.data_bytes + looked_at


class ReadBack(Struct, kw_only=True, dict=True):
    """A folder that is written as `plan` says, and what reading samples of it back shows, told to `found`."""

    plan: Plan
    out: Path
    jobs: int | None = None
    found: Callable[[tuple[Finding, ...]], None] = lambda _: None
    while_flushed: bool = False
    """Whether the engine calls `look` with each file while it is flushed."""
    summary: Mapping[str, Any] | None = None
    _seen: dict[str, TensorEvidence] = field(default_factory=dict)
    _tables: dict[str, TensorTable] = field(default_factory=dict)

    @cached_property
    def _at_the_end(self) -> bool:
        """Whether no file is read back while others are written."""
        # one thread for BLAS in here would be one for an init's decomposition, too, which has other bits then
        return self.plan.recomputes_inits

    def look(self, folder: Path, shard: Shard, steps: Sequence[Step]) -> None:
        """Read samples of these tensors of a large file back while others are written; `check` reads those of small ones."""
        if not self._at_the_end and shard.data_bytes >= _LARGE_FILE:
            from lora_tool.verification.written import check_file  # only where checked

            workers = self.jobs or available_cores()
            is_end = steps[-1] is self.plan.shards[-1].steps[-1]
            jobs = workers if is_end else max(1, workers // 2)
            self._seen.update(check_file(self.plan, folder, shard, steps, tables=self._tables, jobs=jobs))

    def check_file(self, folder: Path, shard: Shard) -> None:
        """Do what `look` does where the engine did not: once the file is on the disk, while there are others to write."""
        if not self.while_flushed and shard is not self.plan.shards[-1]:
            self.look(folder, shard, shard.steps)

    def check(self, folder: Path) -> Mapping[str, Any]:
        """Return the summary of the folder, which has another name yet. Raises `FindingsFound`, `VerificationFailed`."""
        from lora_tool.verification.verified import summary_json  # only where checked
        from lora_tool.verification.written import check_written  # only where checked

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
