"""What is wrong with rank files of any kind, as findings: what DeepSpeed's and torch's checks have in common."""

from __future__ import annotations

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from lora_tool.checkpoint.folders import is_numbered, listed
from lora_tool.checkpoint.kinds import step_of
from lora_tool.checkpoint.registry import is_save, is_step
from lora_tool.display import from_here
from lora_tool.errors import Defect, Problem
from lora_tool.formats.files import way_to_open
from lora_tool.formats.torch_zip import TorchFile
from lora_tool.keys import LORA_FACTOR, PREFIX, has_lora_factor
from lora_tool.report import Finding, Severity

COPY = "copy each rank's files from the machine that wrote them: every node saves those of its own ranks"
_DEEPEST = 4
"""Folders from a rank file up to the save that it belongs to: Megatron's `iter_N/actor/model/dist_ckpt`."""

_BASE = re.compile(r"\.base_layer(?=\.)")
_NUMBER = re.compile(r"\d+")


def fault(
    code: str,
    path: Path | str,
    message: str,
    *,
    subject: str | None = None,
    hint: str | None = None,
    severity: Severity = Severity.ERROR,
) -> Finding:
    """Return the finding of the rule `code` about a file or folder, an error unless another `severity` is given."""
    return Finding(code=code, severity=severity, path=str(path), subject=subject, message=message, hint=hint)


@lru_cache(maxsize=64)  # asked once for each of a million faults of a file
def another_save(path: Path, *, earlier: bool = False) -> str:
    """Return what to do instead of using the save of a run that the file or folder `path` belongs to.

    It names the save that lies nearest before it, else the next one unless it has to be `earlier`; only what kind of
    save to look for, where none lies there.
    """
    for folder in itertools.islice((path.absolute(), *path.absolute().parents), _DEEPEST + 1):
        if not is_save(folder):
            continue
        step = step_of(folder.name)[0]
        saves = sorted((step_of(name)[0], name) for name in _alike(folder))
        before = [name for number, name in saves if number < step]
        after = [name for number, name in saves if number > step]
        name = before[-1] if before else None if earlier or not after else after[0]
        if name is not None:
            # a tag belongs to the checkpoint around it, which has the adapter's config
            is_tag = is_step(name) and not is_numbered(name)
            where = (from_here(folder.parent), "--tag", name) if is_tag else (from_here(folder.parent / name),)
            return f"use {name}: {shlex.join(['lora-tool', 'consolidate', *map(str, where)])}"
    return f"use {'an earlier' if earlier else 'another'} save of the run"


def _alike(save: Path) -> Iterator[str]:
    """Yield the names of the folders beside a save that are called as it is, but for the number."""
    stem = _NUMBER.sub("", save.name)
    for name in listed(save.parent):
        if name != save.name and _NUMBER.sub("", name) == stem and is_save(save.parent / name):
            yield name


def unreadable_files(problems: Iterable[Problem]) -> Iterator[Finding]:
    """LT402: yield each file that is truncated, empty or of another format."""
    for problem in problems:
        hint = f"copy it again, or {another_save(Path(problem.path))}"
        if problem.defect is Defect.PICKLE and not problem.path.endswith(".metadata"):
            hint = "copy it again; if it is the same then, write it anew with the torch that saved it: torch.save(torch.load(FILE), NEW)"
        way = way_to_open(problem.path, problem.message)
        yield fault("LT402", problem.path, problem.message, subject=problem.subject, hint=way or hint)


def moved_files(files: Iterable[TorchFile]) -> Iterator[Finding]:
    """LT404: yield rank files that were written under another name: swapped, or copied over another rank's.

    `torch.save` calls the archive's folder after the file; DeepSpeed's other writers call it ``archive``.
    """
    for file in files:
        if file.root not in (file.path.stem, "archive"):
            name = f"{file.root}{file.path.suffix}"
            message = f"was written as {name}: rank files were swapped, copied or renamed"
            yield fault("LT404", file.path, message, hint=f"give it its name back: {name}")


def odd_ones_out(values: Mapping[Path, Hashable]) -> Iterator[tuple[Path, Hashable, Hashable]]:
    """Yield the files whose value differs from the commonest, with both values."""
    if len(set(values.values())) > 1:
        ((usual, _),) = Counter(values.values()).most_common(1)
        yield from ((path, value, usual) for path, value in values.items() if value != usual)


def repeated_files(contents: Iterable[tuple[Path, Hashable]]) -> Iterator[Finding]:
    """LT405: yield files of different ranks with the same content, which `contents` has in a form to compare."""
    seen: dict[Hashable, Path] = {}
    for path, content in contents:
        other = seen.setdefault(content, path)
        if other != path:
            yield fault("LT405", path, f"has the same content as {other.name}, of another rank", hint=COPY)


def frozen_left_out(path: Path, lost: Sequence[str]) -> Iterator[Finding]:
    """LT410: yield a finding if there are parameters, `lost`, that the module has and the checkpoint lacks.

    HF Trainer saves PEFT models with `exclude_frozen_parameters=True`; DeepSpeed before 0.9.1 never saved them.
    """
    if lost:
        more = f" and {len(lost) - 1} more were" if len(lost) > 1 else " was"
        hint = "consolidate can still write the adapter; a new head that was frozen is lost"
        yield fault("LT410", path, f"`{lost[0]}`{more} frozen and not saved", hint=hint, severity=Severity.INFO)


def adapter_left_out(path: Path, names: Collection[str]) -> Iterator[Finding]:
    """LT416: yield a finding where nothing was saved, or names of a PEFT model without one of LoRA."""
    if not names:
        why = "holds no tensor"
    elif all(PREFIX in name for name in names) and not any(map(has_lora_factor, names)):
        held = f"none of its {len(names)} tensors is" if len(names) > 1 else "its one tensor is not"
        why = f"holds a PEFT model, but {held} LoRA: `{min(names)}`"
    else:
        return
    yield fault(
        "LT416", path, f"{why}. PEFT 0.21 saves such a file under FSDP1, whose wrappers hide the adapter from it"
    )


def base_layers_left_out(names: Collection[str]) -> tuple[str, ...]:
    """Return the names that the frozen weights under LoRA would have, without those that are among `names`."""
    adapted = {name[: match.start()] for name in names if (match := LORA_FACTOR.search(name))}
    # under `target_parameters` the base's parameter has a name of its own: experts.base_layer.gate_up_proj
    # PEFT saves a bias there that it trained, without the weight
    weights = [name for name in names if ".lora_" not in name and not name.endswith(".base_layer.bias")]
    held = {name[: match.start()] for name in weights for match in _BASE.finditer(name)}
    held |= {module for module in adapted if f"{module}.weight" in names}  # prime-rl saves the base under its own names
    return tuple(f"{module}.base_layer.weight" for module in sorted(adapted - held))
