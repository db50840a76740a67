"""What a folder holds, counted and grouped: the data behind `lora-tool inspect`.

Everything but the norms is read from names, JSON and tensor headers (`factors` and `spectra` read weights).
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TypedDict

from lora_tool.adapter.view import LoraLayer, view_of
from lora_tool.architectures.ends import OUTPUTS
from lora_tool.architectures.heads import HEADS, head_of
from lora_tool.checkpoint import AdapterDir, Checkpoint, Folder, ModelDir, RunDir, ShardedDir, open_checkpoint
from lora_tool.errors import CheckpointError
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.formats.trainer_state import TrainerState
from lora_tool.inspection.model import (
    AdapterInspection,
    CheckpointRow,
    Inspection,
    Measured,
    ModelInspection,
    Norms,
    RankFiles,
    RunInspection,
    ShardedInspection,
    Spread,
    Target,
    TensorInfo,
    TrainingProgress,
)
from lora_tool.keys import Part, split_layer
from lora_tool.tensors import StoredTensor, TensorTable

NORM_BYTES = 512 << 20
"""Adapters up to this size have their norms computed without being asked."""


def inspect_checkpoint(checkpoint: Checkpoint, *, norms: bool | None = None) -> Inspection:
    """Return what the checkpoint holds. `norms` True computes an adapter's norms, None only those of small adapters.

    Raises `OSError` where weights cannot be read.
    """
    match checkpoint:
        case AdapterDir():
            return _adapter(checkpoint, norms=checkpoint.weights.nbytes <= NORM_BYTES if norms is None else norms)
        case ModelDir():
            return _model(checkpoint)
        case ShardedDir():
            return _sharded(checkpoint)
        case RunDir():
            return RunInspection(**_common(checkpoint))


class _Common(TypedDict):
    path: str
    kind: str
    disk_bytes: int
    tokenizer_files: tuple[str, ...]
    training: TrainingProgress | None
    checkpoints: tuple[CheckpointRow, ...]
    problems: tuple[str, ...]


def _common(checkpoint: Checkpoint) -> _Common:
    folder = checkpoint.folder
    return {
        "path": str(folder.root),
        "kind": str(checkpoint.kind),
        "disk_bytes": disk_bytes(folder.root),
        "tokenizer_files": folder.tokenizer_files,
        "training": _training(folder.trainer),
        "checkpoints": tuple(_checkpoint_row(folder, name) for name in folder.checkpoints),
        "problems": tuple(map(str, checkpoint.problems)),
    }


def _training(state: TrainerState | None) -> TrainingProgress | None:
    return None if state is None else TrainingProgress(step=state.global_step, epoch=state.epoch, loss=state.last_loss)


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


def _adapter(adapter: AdapterDir, *, norms: bool) -> AdapterInspection:
    config, view = adapter.config, view_of(adapter)
    plain = {item.tensor.name: _is_head(item.module) for item in view.parts(Part.PLAIN)}
    factors = {factor.name for layer in view.layers for factor in layer.factors}
    measured: Sequence[Measured | None] = ()
    if norms:
        from lora_tool.inspection.factors import layer_norms  # noqa: PLC0415 - numpy, only for norms

        measured = layer_norms(view.layers)
    return AdapterInspection(
        **_common(adapter),
        base_model=config.base_model if config else None,
        revision=config.revision if config else None,
        task_type=config.task_type if config else None,
        peft_type=config.peft_type if config else None,
        variants=tuple(_variants(config)) if config else (),
        targets=tuple(_targets(view.layers, measured)),
        head=tuple(_info(adapter.tensors[name]) for name, head in plain.items() if head),
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


def _dtypes(tensors: TensorTable) -> Mapping[str, int]:
    held: Counter[str] = Counter()
    for tensor in tensors.values():
        held[str(tensor.dtype)] += tensor.spec.numel
    return dict(held.most_common())


def _targets(layers: Sequence[LoraLayer], measured: Sequence[Measured | None]) -> Iterator[Target]:
    """Yield the modules grouped by path without its numbers, and by all that a group has in common."""
    groups: dict[tuple[object, ...], list[tuple[LoraLayer, Measured | None]]] = defaultdict(list)
    for layer, norms in zip_longest(layers, measured):
        dtype = "/".join(dict.fromkeys(str(factor.dtype) for factor in layer.factors))
        shapes = layer.a and layer.a.shape, layer.b and layer.b.shape
        path = split_layer(layer.module)[1]
        groups[path, layer.adapter_name, layer.rank, layer.scaling, shapes, dtype].append((layer, norms))
    labels = short_names({str(key[0]) for key in groups})
    for key, group in groups.items():
        first, members = group[0][0], [layer for layer, _ in group]
        numbers = {number for member in members if (number := split_layer(member.module)[0]) is not None}
        yield Target(
            name=labels[str(key[0])] + (f" ({first.adapter_name})" if first.adapter_name else ""),
            modules=tuple(member.module for member in members),
            layers=tuple(sorted(numbers)),
            rank=first.rank,
            scaling=first.scaling,
            a_shape=first.a.shape if first.a else None,
            b_shape=first.b.shape if first.b else None,
            dtype=str(key[-1]),
            parameters=sum(factor.spec.numel for member in members for factor in member.factors),
            norms=_norms([norms for _, norms in group if norms is not None]),
        )


def _norms(values: list[Measured]) -> Norms | None:
    if not values:
        return None
    deltas = [delta for _, _, delta in values if delta is not None]
    return Norms(
        a=spread([a for a, _, _ in values]),
        b=spread([b for _, b, _ in values]),
        delta=spread(deltas) if deltas else None,
    )


def spread(values: list[float]) -> Spread:
    """Return least, median and most of at least one value; NaN counts as larger than everything."""
    ordered = sorted(values, key=lambda value: (value != value, value))  # noqa: PLR0124 - NaN is not itself
    middle = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return Spread(least=ordered[0], median=sum(middle) / 2, most=ordered[-1])


def short_names(paths: Iterable[str]) -> Mapping[str, str]:
    """Return for each dotted path its shortest suffix that no other path ends with, keeping what a `*` numbers."""
    listed = set(paths)
    endings = Counter(suffix for path in listed for suffix in _suffixes(path))
    return {path: next((suffix for suffix in _suffixes(path) if endings[suffix] == 1), path) for path in listed}


def _suffixes(path: str) -> Iterator[str]:
    parts = path.split(".")
    # `experts.*.gate_proj` says more than `gate_proj`: begin before the last number that is not the layer's
    stars = [at for at, part in enumerate(parts) if part == "*"]
    begin = min(stars[-1] - 1, len(parts) - 1) if len(stars) > 1 else len(parts) - 1
    yield from (".".join(parts[at:]) for at in range(max(begin, 0), -1, -1))


def _model(model: ModelDir) -> ModelInspection:
    config = model.config
    heads = tuple(_info(tensor) for name, tensor in model.tensors.items() if _is_head(name.rpartition(".")[0]))
    return ModelInspection(
        **_common(model),
        model_type=config.model_type if config else None,
        architectures=config.architectures if config else (),
        layers=config.num_hidden_layers if config else None,
        num_labels=config.num_labels if config else None,
        tied=config.tie_word_embeddings if config else None,
        quantization=config.quantization if config else None,
        head=heads,
        tensors=len(model.tensors),
        parameters=sum(tensor.spec.numel for tensor in model.tensors.values()),
        nbytes=model.weights.nbytes,
        dtypes=_dtypes(model.tensors),
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
