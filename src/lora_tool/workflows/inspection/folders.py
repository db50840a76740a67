"""What a folder holds, counted: the data behind `lora-tool inspect`.

Everything but the norms is read from names, JSON and tensor headers (`factors` and `spectra` read weights).
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lora_tool.adapters.view import view_of
from lora_tool.checkpoints import (
    AdapterDir,
    Checkpoint,
    Folder,
    ModelDir,
    NamedAdapters,
    RunDir,
    ShardedDir,
    open_checkpoint,
    saves_in,
    trained_among,
)
from lora_tool.checkpoints.quantised import as_matrices
from lora_tool.core.errors import CheckpointError
from lora_tool.core.keys import Part
from lora_tool.core.tensors import StoredTensor, TensorTable
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.formats.quantised.encodings import encoding_of
from lora_tool.formats.trainer_state import TrainerState
from lora_tool.models.ends import HEADS, OUTPUTS, head_of
from lora_tool.workflows.inspection.curves import trainer_state_of, training_curves
from lora_tool.workflows.inspection.experts import layout_of_experts
from lora_tool.workflows.inspection.model import (
    AdapterInspection,
    CheckpointRow,
    Inspection,
    ModelInspection,
    RankFiles,
    RunInspection,
    ShardedInspection,
    TensorInfo,
    TrainingProgress,
    versions_of,
)
from lora_tool.workflows.inspection.targets import targets_and_modules

NORM_BYTES = 512 << 20
"""Adapters up to this size have their norms computed without being asked."""


def inspect_checkpoint(checkpoint: Checkpoint, *, norms: bool | None = None, spectra: bool = False) -> Inspection:
    """Return what the checkpoint holds. `norms` True computes an adapter's norms, None those of small adapters.

    With `spectra` the modules that have norms have singular values, too. Raises `OSError` where weights cannot be read.
    """
    match checkpoint:
        case AdapterDir():
            norms = checkpoint.weights.nbytes <= NORM_BYTES if norms is None else norms
            return _adapter(checkpoint, norms=norms, spectra=norms and spectra)
        case ModelDir():
            return _model(checkpoint)
        case ShardedDir():
            return _sharded(checkpoint)
        case RunDir():
            return _run(checkpoint)
        case NamedAdapters():
            return RunInspection(
                **_common(checkpoint), latest=_adapter(trained_among(checkpoint)[0], norms=False, spectra=False)
            )


def _common(checkpoint: Checkpoint) -> dict[str, Any]:
    folder = checkpoint.folder
    trainer = trainer_state_of(folder)
    return {
        "path": str(folder.root),
        "kind": str(checkpoint.kind),
        "disk_bytes": disk_bytes(folder.root),
        "tokenizer_files": folder.tokenizer_files,
        "versions": versions_of(checkpoint),
        "training": _training(trainer),
        "curves": training_curves(trainer) if trainer else {},
        "checkpoints": tuple(_checkpoint_row(folder, name) for name in saves_in(folder)),
        "problems": tuple(map(str, checkpoint.problems)),
    }


def _training(state: TrainerState | None) -> TrainingProgress | None:
    if state is None:
        return None
    return TrainingProgress(
        step=state.global_step,
        epoch=state.epoch,
        loss=state.last_loss,
        max_steps=state.max_steps,
        best_step=state.best_step,
        best_metric=state.best_metric,
    )


def _run(run: RunDir) -> RunInspection:
    latest = _latest(run)
    common = _common(run)
    if latest is not None:
        common["versions"] = common["versions"] or latest.versions
    return RunInspection(**common, latest=latest)


def _latest(run: RunDir) -> Inspection | None:
    for name in reversed(saves_in(run.folder)):
        try:
            opened = open_checkpoint(run.root / name)
        except CheckpointError:
            continue
        if isinstance(opened, NamedAdapters):
            opened = trained_among(opened)[0]
        if not isinstance(opened, RunDir):
            return inspect_checkpoint(opened, norms=False)
    return None


def _checkpoint_row(folder: Folder, name: str) -> CheckpointRow:
    path = folder.root / name
    try:
        inner = open_checkpoint(path)
    except CheckpointError as error:
        return CheckpointRow(name=name, kind="unreadable", nbytes=disk_bytes(path), note=str(error))
    trainer = inner.folder.trainer
    what = "adapter" if isinstance(inner, AdapterDir) else "model" if isinstance(inner, ModelDir) else str(inner.kind)
    note = f"{len(inner.problems)} problems" if inner.problems else None
    return CheckpointRow(name=name, kind=what, nbytes=disk_bytes(path), training=_training(trainer), note=note)


def disk_bytes(root: Path) -> int:
    """Return the size of all files in and under the folder. Links to files count (the Hub cache), to folders do not."""
    total = 0
    for where, _, names in os.walk(root):
        for name in names:
            try:
                total += os.stat(os.path.join(where, name)).st_size  # noqa: PTH116, PTH118 - thousands of files
            except OSError:
                continue
    return total


def _adapter(adapter: AdapterDir, *, norms: bool, spectra: bool) -> AdapterInspection:
    config, view = adapter.config, view_of(adapter)
    plain = {item.tensor.name: _is_head(item.module) for item in view.parts(Part.PLAIN)}
    factors = {factor.name for layer in view.layers for factor in layer.factors}
    targets, modules = targets_and_modules(view.layers, config, norms=norms, spectra=spectra)
    return AdapterInspection(
        **_common(adapter),
        base_model=config.base_model if config else None,
        revision=config.revision if config else None,
        task_type=config.task_type if config else None,
        peft_type=config.peft_type if config else None,
        variants=tuple(_variants(config)) if config else (),
        alpha=config.lora_alpha if config else None,
        dropout=config.dropout if config else None,
        init=config.init_lora_weights if config else None,
        targets=targets,
        modules=modules,
        head=tuple(_head(adapter.tensors[name], norms=norms) for name, head in plain.items() if head),
        saved=tuple(_info(adapter.tensors[name]) for name, head in plain.items() if not head),
        others=tuple(
            _info(held) for name, held in adapter.tensors.items() if name not in plain and name not in factors
        ),
        parameters=sum(tensor.spec.numel for tensor in adapter.tensors.values()),
        nbytes=adapter.weights.nbytes,
        dtypes=_dtypes(adapter.tensors),
    )


def _variants(config: AdapterConfig) -> Iterator[str]:
    names = {"rsLoRA": config.use_rslora, "DoRA": config.use_dora, "lora_bias": config.lora_bias}
    yield from (name for name, there in names.items() if there)
    if config.bias != "none":
        yield f"bias={config.bias}"
    if config.init_lora_weights != "true":
        yield f"init {config.init_lora_weights}"
    yield from config.refused


def _is_head(module: str) -> bool:
    return head_of(module, HEADS | OUTPUTS) is not None


def _info(tensor: StoredTensor) -> TensorInfo:
    return TensorInfo(name=tensor.name, dtype=str(tensor.dtype), shape=tensor.shape, nbytes=tensor.nbytes)


def _head(tensor: StoredTensor, *, norms: bool) -> TensorInfo:
    if not norms:
        return _info(tensor)
    from lora_tool.formats.stored_numbers import READABLE, square_sum  # numpy, only where values are read

    return replace(_info(tensor), norm=math.sqrt(square_sum(tensor)) if tensor.dtype in READABLE else None)


def _dtypes(tensors: TensorTable) -> Mapping[str, int]:
    held: Counter[str] = Counter()
    for tensor in tensors.values():
        held[str(encoding_of(tensor) or tensor.dtype)] += tensor.spec.numel
    return dict(held.most_common())


def _model(model: ModelDir) -> ModelInspection:
    config, tensors = model.config, as_matrices(model).tensors
    heads = tuple(_info(tensor) for name, tensor in tensors.items() if _is_head(name.rpartition(".")[0]))
    return ModelInspection(
        **_common(model),
        model_type=config.model_type if config else None,
        architectures=config.architectures if config else (),
        layers=config.num_hidden_layers if config else None,
        num_labels=config.num_labels if config else None,
        tied=config.tie_word_embeddings if config else None,
        quantization=config.quantization if config else None,
        experts=layout_of_experts(tensors, config),
        head=heads,
        tensors=len(model.tensors),
        parameters=sum(tensor.spec.numel for tensor in tensors.values()),
        nbytes=model.weights.nbytes,
        dtypes=_dtypes(tensors),
        files=tuple(sorted((file.path.name, file.stamp.size) for file in model.weights.files)),
        merged_from=tuple(_merged_from(model)),
    )


def _merged_from(model: ModelDir) -> Iterator[str]:
    inputs = model.manifest.raw.get("inputs") if model.manifest else None
    for role, described in inputs.items() if isinstance(inputs, dict) else ():
        if isinstance(described, dict):
            name, revision = described.get("hub_id") or described.get("path"), described.get("revision")
            yield f"{role} {name}" + (f" @ {revision}" if revision else "")


def _sharded(checkpoint: ShardedDir) -> ShardedInspection:
    return ShardedInspection(
        **_common(checkpoint),
        tags=tuple(
            RankFiles(
                tag=tag,
                files=len(names),
                nbytes=sum(_file_bytes(checkpoint.root / tag / name) for name in names),
                latest=tag == checkpoint.latest,
            )
            for tag, names in checkpoint.rank_files.items()
        ),
    )


def _file_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
