"""A written folder, with one summary for people and programs; and the plan of one in a dry run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from lora_tool.core.display import counted, printable, size
from lora_tool.core.records import Shown
from lora_tool.core.report.json import finding_json
from lora_tool.formats import adapter_config, model_config
from lora_tool.formats.files import is_file
from lora_tool.plans.core import delta_retention
from lora_tool.plans.core.plan import Plan
from lora_tool.rules.serving.lt8_scores import serving_rewards

_AUTO_CLASSES = ("ForSequenceClassification", "ForCausalLM", "ForTokenClassification")
"""Ends of class names that transformers loads by its AutoModel of that name."""


class Written(Shown, Struct, frozen=True, kw_only=True):
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
        config = self.path / model_config.FILE_NAME
        is_base = plan.manifest.get("operation") != "merge" or plan.manifest.get("head_alone")
        if not is_base and is_file(config):
            serving = serving_rewards(self.path, model_config.read_model_config(config))
            if serving is not None:
                yield f"next: {serving}"

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
        server = self.plan.manifest.get("for")
        if server is not None and (command := self._serving(server)):
            return command
        by_file = {file.filename: file for file in self.plan.side_files}
        if adapter_config.FILE_NAME in by_file:
            return f"lora-tool merge {shlex.quote(str(self.path))}"
        is_merge = self.plan.manifest.get("operation") == "merge"
        return loading(str(self.path), self.path) or (
            f"lora-tool verify {shlex.quote(str(self.path))}" if is_merge else None
        )

    def _serving(self, server: str) -> str | None:
        """Return what serves an adapter that was prepared for a built-in server."""
        from lora_tool.rules.serving.forms import form_of  # for such an adapter alone
        from lora_tool.rules.serving.together import is_outside

        form, path = form_of(server), shlex.quote(str(self.path))
        towers = f" {form.towers}" if any(is_outside(step.out.name) for step in self.plan.steps) else ""
        rank = form.rank_option(self.plan.manifest["served_rank"] or 0)
        return form.start.format(name=f"name={path}", path=path, rank=rank, towers=towers) or None

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
    yield f"tensors: {plan.tally()} (precision {plan.precision})"


def loading(name: str, folder: Path) -> str | None:
    """Return the Python that loads the model `name` by the class in its `folder`; None where no config names one."""
    config = folder / model_config.FILE_NAME
    classes = model_config.read_model_config(config).architectures if is_file(config) else ()
    if not classes:
        return None
    ending = next((each for each in _AUTO_CLASSES if classes[0].endswith(each)), None)
    loader = f"AutoModel{ending}" if ending else printable(classes[0])
    return f"{loader}.from_pretrained({json.dumps(name, ensure_ascii=False)})"


def farthest(summary: Mapping[str, Any]) -> str:
    """Return how far the values are from those computed again, as a verification's `summary` says; "" without any.

    More than an ulp is not what a reader expects, so it says by what such values are right.
    """
    ulps = summary["largest_ulps"]
    right = summary["right"] + len(summary["not_recomputed"]) == summary["tensors"]
    bound = ", within the bound of the arithmetic" if right and (ulps or 0) > 1 else ""
    return "" if ulps is None else f", max error {ulps:.2f} ulp{bound}"


class Planned(Struct, frozen=True, kw_only=True):
    """What a dry run would write to `path`; `plan` is None where PEFT merges in memory."""

    path: Path
    plan: Plan | None = None
