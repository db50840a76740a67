"""What a folder is: base or merged model, adapter, DeepSpeed or FSDP checkpoint, or a run full of checkpoints.

`open_checkpoint` reads names, JSON files and tensor headers, never a weight. What it finds wrong is in the
checkpoint's `problems`: a report wants to show all of it, and `require_whole` is there for those who need it good.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lora_tool import keys
from lora_tool.checkpoint import other_formats
from lora_tool.checkpoint.folders import (
    AdapterDir,
    Checkpoint,
    DcpDir,
    Folder,
    ModelDir,
    RunDir,
    ZeroDir,
    read_folder,
    unexpected,
)
from lora_tool.checkpoint.nearby import consolidate_command
from lora_tool.checkpoint.other_formats import OtherFormat
from lora_tool.errors import (
    BadConfig,
    CheckpointError,
    CorruptFile,
    Defect,
    NotACheckpoint,
    Problem,
    UnsupportedCheckpoint,
)
from lora_tool.formats import adapter_config, manifest, model_config
from lora_tool.formats.adapter_config import read_adapter_config
from lora_tool.formats.files import inside, open_regular, read_at
from lora_tool.formats.manifest import Manifest, read_manifest
from lora_tool.formats.model_config import read_model_config
from lora_tool.formats.weights import Weights, read_sharded, read_single

Config = TypeVar("Config")

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PICKLE = "adapter_model.bin"
MODEL_WEIGHTS = "model.safetensors"
MODEL_INDEX = "model.safetensors.index.json"
MODEL_PICKLE = "pytorch_model.bin"
MODEL_PICKLE_INDEX = "pytorch_model.bin.index.json"
_ADAPTER_SHARD = re.compile(r"adapter_model-\d{5}-of-\d{5}\.(safetensors|bin)\Z")
_MODEL_SHARD = re.compile(r"(model-\d{5}-of-\d{5}\.safetensors|pytorch_model-\d{5}-of-\d{5}\.bin)\Z")
_RANK_FILE = re.compile(r"(bf16_|fp16_)?(zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states\.pt\Z")
_LAST_NUMBER = re.compile(r"\d{1,18}\Z")
_DCP_METADATA = ".metadata"
_ENOUGH = 5
"""Names of folders by which a reader recognises the place."""
_OTHER_RANK_FILES = (
    (
        re.compile(r"model_world_size_\d+_rank_\d+\.pt\Z"),
        "verl's file of one rank, a pickle of DTensors: not put together",
    ),
    (
        re.compile(r"pytorch_model_fsdp_rank\d+\.bin\Z"),
        "FSDP's local state of one rank, without shapes: not put together",
    ),
    (
        re.compile(r"shard-\d{5}-model-\d{5}-of-\d{5}\.safetensors\Z"),
        "one rank's part of a model, as torch's HuggingFaceStorageWriter cuts it: not put together",
    ),
)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Return what the local folder `path` is and holds, read from names, JSON and headers alone.

    What is wrong inside is in `problems`. Raises `NotACheckpoint` where there is nothing to describe, and
    `UnsupportedCheckpoint` for rank files that are refused by name.
    """
    folder = read_folder(Path(path))
    names = set(folder.files)
    if names & {adapter_config.FILE_NAME, ADAPTER_WEIGHTS, ADAPTER_PICKLE}:
        return _open_adapter(folder)
    has_weights = bool(names & {MODEL_WEIGHTS, MODEL_INDEX, MODEL_PICKLE, MODEL_PICKLE_INDEX}) or any(
        map(_MODEL_SHARD.match, names)
    )
    sharded = None if has_weights else _open_zero(folder) or _open_dcp(folder)
    if sharded is not None:
        return sharded
    if folder.checkpoints and not has_weights:
        return RunDir(folder=folder, problems=folder.problems)
    if not has_weights:
        _refuse_other_rank_files(folder)
    if has_weights or model_config.FILE_NAME in names:
        return _open_model(folder)
    below = _sharded_below(folder)
    if len(below) == 1:  # OpenRLHF's `_actor`
        return below[0]
    if not below:
        _refuse_other_formats(folder)
    raise _no_checkpoint_itself(folder, [sharded.root.name for sharded in below])


def adapters_below(path: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Return the adapter folders in the folder `path` where it is no checkpoint itself, by name.

    `PeftModel.save_pretrained` puts an adapter that is not called `default` into a folder of its name.
    """
    root = Path(path)
    names = set(_listed(root))
    if names & {adapter_config.FILE_NAME, ADAPTER_WEIGHTS, ADAPTER_PICKLE, model_config.FILE_NAME, MODEL_WEIGHTS}:
        return ()
    if any(name.startswith("checkpoint-") for name in names):
        return ()  # a run: its checkpoints are states of one adapter
    return tuple(root / name for name in sorted(names) if adapter_config.FILE_NAME in _listed(root / name))


def open_sharded(path: str | os.PathLike[str]) -> ZeroDir | DcpDir:
    """Return the DeepSpeed or FSDP checkpoint in the folder `path`, also where an adapter or model lies beside it.

    The HF Trainer puts both into one folder; OpenRLHF puts the checkpoint one folder down (`_actor`). Raises
    `NotACheckpoint` where there is none, or several.
    """
    folder = read_folder(Path(path))
    here = _open_zero(folder) or _open_dcp(folder)
    if here is not None:
        return here
    below = _sharded_below(folder)
    if len(below) == 1:
        return below[0]
    if below:
        last = max(below, key=lambda sharded: _step_of(sharded.root.name)).root
        raise NotACheckpoint(
            f"{folder.root} holds {len(below)} checkpoints: {', '.join(sharded.root.name for sharded in below[:8])}",
            hint=f"lora-tool consolidate {shlex.quote(str(last))}",
        )
    _refuse_other_rank_files(folder)
    raise _not_sharded(folder)


def _not_sharded(folder: Folder) -> NotACheckpoint:
    """Return what the folder is instead; what lacks weights may have them in a training checkpoint nearby."""
    try:
        found = open_checkpoint(folder.root)
    except CheckpointError:
        return NotACheckpoint(
            f"{folder.root} holds no DeepSpeed checkpoint (global_step…) and no FSDP one (.metadata)",
            hint=consolidate_command(folder.root),
        )
    lacking = isinstance(found, AdapterDir) or any(problem.fatal for problem in found.problems)
    return unexpected(
        found,
        "a DeepSpeed checkpoint (global_step…) or an FSDP one (.metadata)",
        hint=consolidate_command(folder.root) if lacking else None,
    )


def _refuse_other_rank_files(folder: Folder) -> None:
    for name in folder.files:
        for pattern, what in _OTHER_RANK_FILES:
            if pattern.match(name):
                raise UnsupportedCheckpoint(f"{folder.root / name}: {what}", hint="save it again as a full state dict")


def _refuse_other_formats(folder: Folder, *, adapter: bool | None = None) -> None:
    found = other_formats.of_files(folder.files, adapter=adapter)
    if found is not None:
        raise _other_format(folder.root / found[0], found[1])
    single = next((name for name in folder.files if name.endswith(".safetensors")), None)
    if adapter is None and single is not None:
        _refuse_other_names(read_single(folder.root / single))


def _refuse_other_names(weights: Weights) -> None:
    other = other_formats.of_tensors(weights.tensors.keys())
    if other is not None:
        raise _other_format(weights.files[0].path, other)


def _other_format(path: Path, other: OtherFormat) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(f"{path} is {other.text}", hint=other.way_out)


def _sharded_below(folder: Folder) -> list[ZeroDir | DcpDir]:
    found: list[ZeroDir | DcpDir] = []
    for name in folder.folders:
        if not inside(folder.root, folder.root / name):
            continue
        try:
            inner = read_folder(folder.root / name)
        except NotACheckpoint:  # it cannot be listed
            if name.startswith(("global_step", "pytorch_model_fsdp_")):
                raise
            continue
        found += filter(None, [_open_zero(inner) or _open_dcp(inner)])
    return found


def require_whole(checkpoint: Checkpoint) -> None:
    """Return if every file could be read and believed. Raises `CorruptFile` or `BadConfig` for the first that cannot."""
    for problem in checkpoint.problems:
        if problem.fatal:
            error = BadConfig if problem.defect is Defect.BAD_FIELD else CorruptFile
            raise error(problem, hint=f"lora-tool validate {checkpoint.root}")


def open_model(path: str | os.PathLike[str], *, hint: str | None = None) -> ModelDir:
    """Return the model folder `path`. Raises `NotACheckpoint` where it is something else, with the `hint` if given."""
    checkpoint = open_checkpoint(path)
    if not isinstance(checkpoint, ModelDir):
        raise unexpected(checkpoint, "a model", hint=hint)
    return checkpoint


def open_adapter(path: str | os.PathLike[str], *, hint: str | None = None) -> AdapterDir:
    """Return the adapter folder `path`. Raises `NotACheckpoint` where it is something else, with the `hint` if given."""
    checkpoint = open_checkpoint(path)
    if not isinstance(checkpoint, AdapterDir):
        raise unexpected(checkpoint, "an adapter", hint=hint)
    return checkpoint


def _read_config(
    folder: Folder, name: str, read: Callable[[Path], Config]
) -> tuple[Config | None, tuple[Problem, ...]]:
    path = folder.root / name
    if name not in folder.files:
        problem = Problem(defect=Defect.BAD_FIELD, path=str(path), message="is missing")
        return None, (problem,)
    if not inside(folder.root, path):
        return None, (Problem(defect=Defect.NOT_A_FILE, path=str(path), message="is a link out of its folder"),)
    try:
        return read(path), ()
    except (CorruptFile, BadConfig) as error:
        return None, (error.problem,)


def _open_adapter(folder: Folder) -> AdapterDir:
    config, problems = _read_config(folder, adapter_config.FILE_NAME, read_adapter_config)
    # safetensors first, as PEFT does where both are there
    name = next((name for name in (ADAPTER_WEIGHTS, ADAPTER_PICKLE) if name in folder.files), None)
    if name is None:
        _refuse_other_formats(folder, adapter=True)
    weights = read_single(folder.root / name) if name else _no_adapter_weights(folder)
    _refuse_other_names(weights)
    return AdapterDir(
        folder=folder,
        config=config,
        weights=weights,
        keys={name: keys.parse(name) for name in weights.tensors},
        problems=(*folder.problems, *problems, *(config.problems if config else ()), *weights.problems),
    )


def _open_model(folder: Folder) -> ModelDir:
    config, problems = _read_config(folder, model_config.FILE_NAME, read_model_config)
    written: Manifest | None = None
    manifest_problems: tuple[Problem, ...] = ()
    if manifest.FILE_NAME in folder.files:
        written, manifest_problems = _read_config(folder, manifest.FILE_NAME, read_manifest)
    weights = _model_weights(folder)
    return ModelDir(
        folder=folder,
        config=config,
        weights=weights,
        manifest=written,
        problems=(
            *folder.problems,
            *problems,
            *(config.problems if config else ()),
            *manifest_problems,
            *weights.problems,
        ),
    )


def _model_weights(folder: Folder) -> Weights:
    shards = [name for name in folder.files if _MODEL_SHARD.match(name)]
    # the single file before the shards, safetensors before torch files: what transformers loads where several are there
    ways = (MODEL_WEIGHTS, read_single), (MODEL_INDEX, read_sharded), (MODEL_PICKLE, read_single)
    for name, read_weights in (*ways, (MODEL_PICKLE_INDEX, read_sharded)):
        if name in folder.files:
            weights = read_weights(folder.root / name)
            break
    else:
        if not shards:
            _refuse_other_formats(folder, adapter=False)
            return _no_weights(folder, MODEL_WEIGHTS)
        message = f"is missing, but {len(shards)} shards are there: which tensors belong together cannot be known"
        index = MODEL_INDEX if shards[0].endswith(".safetensors") else MODEL_PICKLE_INDEX
        problem = Problem(defect=Defect.NO_WEIGHTS, path=str(folder.root / index), message=message)
        return Weights(files=(), tensors={}, problems=(problem,))
    read = {file.path.name for file in weights.files}
    broken = any(problem.fatal for problem in weights.problems)
    stray = [name for name in shards if name not in read and not broken]
    problems = [
        Problem(
            defect=Defect.STRAY_WEIGHTS,
            path=str(folder.root / name),
            message="is a weights file that no index names; transformers ignores it",
            fatal=False,
        )
        for name in stray
    ]
    return Weights(
        files=weights.files,
        tensors=weights.tensors,
        index=weights.index,
        problems=(*weights.problems, *problems),
    )


def _no_adapter_weights(folder: Folder) -> Weights:
    shards = [name for name in folder.files if _ADAPTER_SHARD.match(name)]
    if not shards:
        return _no_weights(folder, ADAPTER_WEIGHTS)
    message = f"is missing, but {len(shards)} shards are there ({shards[0]}): PEFT reads an adapter from one file alone"
    problem = Problem(defect=Defect.NO_WEIGHTS, path=str(folder.root / ADAPTER_WEIGHTS), message=message)
    return Weights(files=(), tensors={}, problems=(problem,))


def _no_weights(folder: Folder, expected: str) -> Weights:
    problem = Problem(defect=Defect.NO_WEIGHTS, path=str(folder.root / expected), message="is missing")
    return Weights(files=(), tensors={}, problems=(problem,))


def _open_zero(folder: Folder) -> ZeroDir | None:
    here = tuple(name for name in folder.files if _RANK_FILE.match(name))
    if here:
        return ZeroDir(folder=folder, latest=None, rank_files={".": here}, problems=folder.problems)
    rank_files = {}
    for tag in sorted(folder.folders, key=_step_of):
        names = tuple(sorted(filter(_RANK_FILE.match, _listed(folder.root / tag))))
        if names:
            rank_files[tag] = names
    if not rank_files:
        return None
    latest = None
    if "latest" in folder.files:
        try:
            path = folder.root / "latest"
            with open_regular(path) as fd:
                latest = read_at(path, fd, 0, 200).decode(errors="replace").strip()
        except CorruptFile:
            latest = None
    return ZeroDir(folder=folder, latest=latest, rank_files=rank_files, problems=folder.problems)


def _step_of(tag: str) -> tuple[int, str]:
    """Return what sorts tags and checkpoints by their step: the number that the name ends with, 0 without one."""
    match = _LAST_NUMBER.search(tag)
    return int(match[0]) if match else 0, tag


def _open_dcp(folder: Folder) -> DcpDir | None:
    parts = {}
    for name in (".", *folder.folders):
        listed = folder.files if name == "." else _listed(folder.root / name)
        if _DCP_METADATA in listed:
            parts[name] = tuple(sorted(file for file in listed if file.endswith(".distcp")))
    return DcpDir(folder=folder, parts=parts, problems=folder.problems) if parts else None


def _listed(path: Path) -> tuple[str, ...]:
    try:
        return tuple(entry.name for entry in os.scandir(path))
    except OSError:
        return ()


def _no_checkpoint_itself(folder: Folder, sharded: list[str]) -> NotACheckpoint:
    """Return what the folder holds instead of being a checkpoint; `sharded` are names of some of its folders."""
    configs = {adapter_config.FILE_NAME, model_config.FILE_NAME}
    held = [name for name in folder.folders if name in sharded or configs & set(_listed(folder.root / name))]
    ls = f"lora-tool ls {shlex.quote(str(folder.root))}"
    if held:
        listed = ", ".join(held[:_ENOUGH]) + (", …" if len(held) > _ENOUGH else "")
        return NotACheckpoint(
            f"{folder.root} is no checkpoint itself, but holds: {listed}",
            hint=f"name one of them: {shlex.quote(str(folder.root / held[0]))}; what they are: {ls}",
        )
    return NotACheckpoint(
        f"{folder.root} holds no adapter_config.json, config.json, checkpoint-N, global_stepN or .metadata",
        hint=f"what is further down: {ls}" if folder.folders else None,
    )
