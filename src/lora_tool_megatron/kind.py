"""Megatron's torch_dist checkpoints: a run with `iter_NNNNNNN`, in them `.metadata` and `.distcp` files of each process.

Megatron-LM, Megatron-Bridge and Megatron-SWIFT write them; NeMo-RL has them below `step_N/policy/weights`. verl's engine
for Megatron calls no folder after an iteration: `global_step_N/actor/model/dist_ckpt`, `actor/dist_ckpt` before 2026.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lora_tool.checkpoints.added import AddedKind
from lora_tool.checkpoints.folders import Folder
from lora_tool.checkpoints.fsdp import holds_pieces
from lora_tool.checkpoints.kinds import Claim, ShardedDir, ShardedKind, read_pointer, step_of
from lora_tool.core.errors import BrokenFile

if TYPE_CHECKING:
    from lora_tool.checkpoints.states.state import TrainingState

POINTER = "latest_checkpointed_iteration.txt"
_TRAIN_STATE = "latest_train_state.pt"
"""What Megatron-Bridge points with: the state of the training, with the number of the step."""
_METADATA = ".metadata"
_OWN = frozenset({"common.pt", "metadata.json", "run_config.yaml"})
"""What Megatron writes beside `.metadata`, and others who use torch's distributed checkpoints do not."""
_ITERATION = re.compile(r"(?:iter_\d{7,12}|release)\Z")
_STEP = re.compile(r"step_\d{1,12}\Z")
_NESTS = ("policy/weights", "value/weights", "weights")
"""Where NeMo-RL has the iteration of a step."""
_STEP_OF_VERL = re.compile(r"global_step_\d{1,12}\Z")
_ROLES_OF_VERL = ("actor/", "critic/", "")
_MODULES_OF_VERL = ("model/dist_ckpt", "dist_ckpt")
"""Where verl has a module's pieces; older ones have those of the optimizer among them."""


def _recognise(folder: Folder) -> Claim | None:
    return Claim.WEIGHTS if next(_tags(folder), None) else None


def _tags(folder: Folder) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield each folder with pieces, as it is called from here, and their names; the policy before the value model."""
    if holds_pieces(folder.files):
        if not _OWN.isdisjoint(folder.files):
            yield ".", _pieces(folder.files)
        return
    for place in _places_of_verl(folder):
        yield place, _pieces(folder.names_in(place))
    for place in _places(folder):
        iterations = folder.names_in(place) if place else folder.folders
        for name in sorted(filter(_ITERATION.match, iterations), key=step_of):
            names = folder.names_in(f"{place}{name}")
            if holds_pieces(names):
                yield f"{place}{name}", _pieces(names)


def _places(folder: Folder) -> Iterator[str]:
    """Yield where iterations may lie, as beginnings of their names."""
    yield ""
    yield from (f"{nest}/" for nest in _NESTS if nest.partition("/")[0] in folder.folders)
    for step in sorted(filter(_STEP.match, folder.folders), key=step_of):
        yield from (f"{step}/{nest}/" for nest in _NESTS)


def _places_of_verl(folder: Folder) -> Iterator[str]:
    """Yield the folders in which verl has the pieces of a module, seen from a run, a step, a role or the module's own."""
    steps = [f"{step}/" for step in sorted(filter(_STEP_OF_VERL.match, folder.folders), key=step_of)]
    for place in (f"{step}{role}" for step in ("", *steps) for role in _ROLES_OF_VERL):
        for module in _MODULES_OF_VERL:
            path = f"{place}{module}"
            if path.partition("/")[0] in folder.folders and holds_pieces(folder.names_in(path)):
                yield path
                break


def _pieces(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(name for name in names if name.endswith(".distcp")))


def _open(folder: Folder) -> ShardedDir:
    tags = dict(_tags(folder))
    latest = None if "." in tags else _latest(folder, tags)
    return ShardedDir(kind=MEGATRON, folder=folder, rank_files=tags, latest=latest, problems=folder.problems)


def _latest(folder: Folder, tags: Collection[str]) -> str | None:
    """Return the tag of the step that the run points at."""
    for name, read in ((_TRAIN_STATE, _step_in), (POINTER, read_pointer)):
        if name in folder.files:
            try:
                told = read(folder.root / name)
            except BrokenFile:
                continue
            if told:
                return _named(told, tags)
    return None


def _named(told: str, tags: Collection[str]) -> str:
    """Return the tag of the step that a file of the run names; of verl's roles the actor."""
    if any(map(_STEP_OF_VERL.match, (tag.partition("/")[0] for tag in tags))):
        return next((tag for tag in tags if tag.startswith(f"global_step_{told}/")), f"global_step_{told}")
    return f"iter_{int(told):07d}" if told.isdecimal() else told


def _step_in(path: Path) -> str | None:
    from lora_tool.formats.torch_objects import LazyTensor  # for few folders, and all import this
    from lora_tool.formats.torch_zip import read_scalar, read_torch_file

    file = read_torch_file(path)
    step = file.value.get("step") if isinstance(file.value, dict) else None
    value = read_scalar(file, step) if isinstance(step, LazyTensor) else step
    return str(int(value)) if isinstance(value, int | float) and value >= 0 else None


MEGATRON = ShardedKind(
    name="Megatron checkpoint",
    sign="iter_NNNNNNN",
    landmarks=(_METADATA,),
    weights=("*.distcp",),
    others=("common.pt", "run_config.yaml", _METADATA, POINTER, _TRAIN_STATE, "train_state.pt"),
    steps=_ITERATION,
    recognise=_recognise,
    open=_open,
)


def _state(checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> TrainingState:
    from lora_tool_megatron.state import iteration_state  # many folders are recognised, few are read

    return iteration_state(checkpoint, tag=tag, or_newest=or_newest)


def _adopted(stored: TrainingState) -> TrainingState | None:
    from lora_tool_megatron.state import adopted_state

    return adopted_state(stored)


ADDED = AddedKind(kind=MEGATRON, state=_state, adopted=_adopted)
"""The entry point `megatron` of `lora_tool.kinds`."""
