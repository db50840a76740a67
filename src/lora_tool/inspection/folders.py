"""What a folder holds, counted and grouped: the data behind `lora-tool inspect`.

Everything but the norms is read from names, JSON and tensor headers (`factors` and `spectra` read weights).
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypedDict

from lora_tool.adapter.view import LoraLayer, view_of
from lora_tool.architectures.ends import OUTPUTS
from lora_tool.architectures.heads import HEADS, head_of
from lora_tool.checkpoint import AdapterDir, Checkpoint, Folder, ModelDir, RunDir, ShardedDir, open_checkpoint
from lora_tool.checkpoint.quantised import as_matrices
from lora_tool.errors import CheckpointError
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.formats.quantised.encodings import encoding_of
from lora_tool.formats.trainer_state import TrainerState
from lora_tool.inspection.curves import Curves, trainer_state_of, training_curves
from lora_tool.inspection.makers import versions_of
from lora_tool.inspection.model import (
    AdapterInspection,
    CheckpointRow,
    Inspection,
    Measured,
    ModelInspection,
    Module,
    Norms,
    RankFiles,
    RunInspection,
    ShardedInspection,
    Spread,
    Target,
    TensorInfo,
    TrainingProgress,
)
from lora_tool.inspection.naming import short_names
from lora_tool.keys import Part, split_layer
from lora_tool.tensors import StoredTensor, TensorTable

if TYPE_CHECKING:
    from lora_tool.inspection.spectra import Spectrum

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


class _Common(TypedDict):
    path: str
    kind: str
    disk_bytes: int
    tokenizer_files: tuple[str, ...]
    versions: Mapping[str, str]
    training: TrainingProgress | None
    curves: Curves
    checkpoints: tuple[CheckpointRow, ...]
    problems: tuple[str, ...]


def _common(checkpoint: Checkpoint) -> _Common:
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
        "checkpoints": tuple(_checkpoint_row(folder, name) for name in folder.checkpoints),
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
    for name in reversed(run.folder.checkpoints):
        try:
            opened = open_checkpoint(run.root / name)
        except CheckpointError:
            continue
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
    measured: Sequence[Measured | None] = ()
    if norms:
        from lora_tool.inspection.factors import layer_norms  # noqa: PLC0415 - numpy, only for norms

        measured = layer_norms(view.layers)
    found = _spectra(view.layers) if spectra else {}
    rows = [(name, group) for name, groups in _grouped(view.layers, measured).items() for group in groups]
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
        targets=tuple(_target(name, group, config) for name, group in rows),
        modules=tuple(
            _module(name, layer, norms, config, found.get(layer)) for name, group in rows for layer, norms in group
        ),
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
        held[str(encoding_of(tensor) or tensor.dtype)] += tensor.spec.numel
    return dict(held.most_common())


_Measured: TypeAlias = tuple[LoraLayer, Measured | None]


def _grouped(layers: Sequence[LoraLayer], measured: Sequence[Measured | None]) -> Mapping[str, list[list[_Measured]]]:
    """Return the layers by the name of their row: path without its numbers, and by all that a row has in common."""
    groups: dict[tuple[object, ...], list[_Measured]] = defaultdict(list)
    for layer, norms in zip_longest(layers, measured):
        shapes = layer.a and layer.a.shape, layer.b and layer.b.shape
        path = split_layer(layer.module)[1]
        groups[path, layer.adapter_name, layer.rank, layer.scaling, shapes, _dtype(layer)].append((layer, norms))
    labels = short_names({str(key[0]) for key in groups})
    named: dict[str, list[list[_Measured]]] = defaultdict(list)
    for key, group in groups.items():
        named[labels[str(key[0])] + (f" ({key[1]})" if key[1] else "")].append(group)
    return named


def _dtype(layer: LoraLayer) -> str:
    return "/".join(dict.fromkeys(str(factor.dtype) for factor in layer.factors))


def _target(name: str, group: Sequence[_Measured], config: AdapterConfig | None) -> Target:
    first, members = group[0][0], [layer for layer, _ in group]
    numbers = {number for member in members if (number := split_layer(member.module)[0]) is not None}
    return Target(
        name=name,
        modules=tuple(member.module for member in members),
        layers=tuple(sorted(numbers)),
        rank=first.rank,
        alpha=_alpha(first, config),
        scaling=first.scaling,
        a_shape=first.a.shape if first.a else None,
        b_shape=first.b.shape if first.b else None,
        dtype=_dtype(first),
        parameters=sum(factor.spec.numel for member in members for factor in member.factors),
        norms=_norms([norms for _, norms in group if norms is not None]),
    )


def _alpha(layer: LoraLayer, config: AdapterConfig | None) -> float | None:
    return config.alpha(layer.target) if config else None


def _spectra(layers: Sequence[LoraLayer]) -> Mapping[LoraLayer, Spectrum | None]:
    """Return the spectrum of each layer, None where its factors do not fit together."""
    from threadpoolctl import threadpool_limits  # noqa: PLC0415 - numpy, only where asked for

    from lora_tool.inspection.spectra import spectrum  # noqa: PLC0415

    with threadpool_limits(limits=1, user_api="blas"):  # factors are small: threads would only wait for each other
        return {layer: spectrum(layer) for layer in layers}


def _module(
    target: str, layer: LoraLayer, norms: Measured | None, config: AdapterConfig | None, found: Spectrum | None
) -> Module:
    norm_a, norm_b, norm_delta = norms or (None, None, None)
    return Module(
        module=layer.module,
        target=target,
        layer=split_layer(layer.module)[0],
        rank=layer.rank,
        alpha=_alpha(layer, config),
        scaling=layer.scaling,
        norm_a=norm_a,
        norm_b=norm_b,
        norm_delta=norm_delta,
        effective_rank=found.effective_rank if found else None,
        singular_values=found.singular_values if found else (),
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
