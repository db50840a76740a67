"""Whether a run goes on with the adapter and the base that its checkpoint was saved with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lora_tool.adapters.view import bare_path, view_of
from lora_tool.checkpoints import AdapterDir, open_checkpoint
from lora_tool.checkpoints.sources import resolve
from lora_tool.core.display import counted
from lora_tool.core.errors import CheckpointError
from lora_tool.core.hub_names import hub_id_of
from lora_tool.core.report import Finding, Severity
from lora_tool.verification.validating import validate
from lora_tool_train.live_checks import active_adapter, base_of
from lora_tool_train.traps import trap

_BASE = frozenset({"LT507", "LT520"})
"""The rules that find another base of the same shapes."""


def resume_findings(model: Any, checkpoint: Path) -> Iterator[Finding]:
    """Yield what the PEFT `model` and its base have otherwise than the `checkpoint` that the run resumes from."""
    try:
        opened = open_checkpoint(checkpoint)
    except CheckpointError:  # which the Trainer says, too
        return
    if not isinstance(opened, AdapterDir) or opened.config is None or not opened.config.has_known_type:
        return
    for why, hint in (*_settings(model, opened), *_base(model, opened)):
        yield trap("resume-differs", hint, where=str(checkpoint), checkpoint=checkpoint.name, why=why)


def _settings(model: Any, saved: AdapterDir) -> Iterator[tuple[str, str]]:
    """Yield each setting that differs, and the option that gives it the checkpoint's value."""
    name = active_adapter(model)
    view, config, mine = view_of(saved), model.peft_config.get(name), saved.config
    if mine is None or config is None or any(layer.adapter_name not in (None, name) for layer in view.layers):
        return
    layers = {
        # PEFT stacks the factors of fused experts along the rank
        bare_path(path): (module.r[name] * getattr(module, "num_experts", 1), module.scaling[name])
        for path, module in model.named_modules()
        if hasattr(module, "lora_A") and name in module.scaling
    }
    before = {layer.module: (layer.rank, layer.scaling) for layer in view.layers}
    lost, new = before.keys() - layers.keys(), layers.keys() - before.keys()
    if before and (lost or new):
        missing = f"{counted(len(lost), 'layer')} that it trained ({_ends(lost)}) would not be; " if lost else ""
        fresh = f"{counted(len(new), 'layer')} ({_ends(new)}) would begin untrained; " if new else ""
        targets = _ends(before)
        # TRL reads a list of one as a regular expression
        hint = f"lora_target_modules: [{targets}]" if "," in targets else f"lora_target_modules: .*{targets}"
        yield f"{missing}{fresh}".removesuffix("; "), hint
    both = [(before[path], layers[path]) for path in before.keys() & layers.keys()]
    ranks = {(old[0], now[0]) for old, now in both if old[0] not in (None, now[0])}
    if ranks:
        old, now = min(ranks)
        yield f"its rank is {old}, that of the run {now}", f"lora_r: {mine.r}, lora_alpha: {mine.lora_alpha:g}"
    scalings = {(old[1], now[1]) for old, now in both if old[1] is not None and not math.isclose(old[1], now[1])}
    if scalings and not ranks:
        hint = f"lora_alpha: {mine.lora_alpha:g}, use_rslora: {mine.use_rslora}".lower()
        yield "its scaling is {:g}, that of the run {:g}, so ΔW would jump".format(*min(scalings)), hint
    whole = set(mine.modules_to_save), set(config.modules_to_save or ())
    if whole[0] != whole[1]:
        hint = f"lora_modules_to_save: [{', '.join(mine.modules_to_save)}]"
        yield f"its modules_to_save is {sorted(whole[0])}, that of the run {sorted(whole[1])}", hint
    if mine.use_dora != config.use_dora:
        yield (
            f"its use_dora is {mine.use_dora}, that of the run {config.use_dora}",
            f"use_dora: {mine.use_dora}".lower(),
        )


def _ends(paths: Iterable[str]) -> str:
    return ", ".join(sorted({path.rpartition(".")[2] for path in paths}))


def _base(model: Any, saved: AdapterDir) -> Iterator[tuple[str, str]]:
    named, given = saved.config.base_model if saved.config else None, base_of(model).config.name_or_path
    if not named or not given or named == given:
        return
    try:
        report = validate(saved, base=given, select=_BASE, deep=False)
    except CheckpointError:  # not in the Hub's cache as a whole, or of no kind we know
        return
    if any(found.severity >= Severity.WARNING for found in report.findings):
        known = named if hub_id_of(named) else resolve(named, near=saved.root).path
        yield f"it was trained on {known}, and {given} has other weights", f"model_name_or_path: {known}"
