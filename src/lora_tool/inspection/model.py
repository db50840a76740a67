"""The words of an inspection: what a folder holds, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Smallest, middle and largest of some values. NaN and infinities stay what they are, at the end."""

    least: float
    median: float
    most: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """Frobenius norms over the modules of one group; ΔW is scaling·B·A, for DoRA before its magnitudes."""

    a: Spread
    b: Spread
    delta: Spread | None
    """None where the scaling is not known, because the config cannot be read."""


Measured: TypeAlias = tuple[float, float, float | None]
"""‖A‖, ‖B‖ and ‖ΔW‖ of one module; the last is None where its scaling is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Modules of one name that have rank, scaling, shapes and dtype in common."""

    name: str
    modules: tuple[str, ...]
    layers: tuple[int, ...]
    rank: int | None
    scaling: float | None
    a_shape: tuple[int, ...] | None
    b_shape: tuple[int, ...] | None
    dtype: str
    parameters: int
    norms: Norms | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor by name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How far the run was that wrote this folder."""

    step: int
    epoch: float | None
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """One `checkpoint-N` inside a folder. `kind` is "unreadable" where it could not be opened, `note` says why."""

    name: str
    kind: str
    nbytes: int
    training: Training | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What every kind of folder has."""

    path: str
    kind: str
    disk_bytes: int
    tokenizer_files: tuple[str, ...]
    training: Training | None
    checkpoints: tuple[CheckpointRow, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInspection(Inspection):
    """What an adapter holds."""

    base_model: str | None
    revision: str | None
    task_type: str | None
    peft_type: str | None
    variants: tuple[str, ...]
    """What is not plain LoRA about it: rsLoRA, DoRA, lora_bias, …"""
    targets: tuple[Target, ...]
    head: tuple[TensorInfo, ...]
    saved: tuple[TensorInfo, ...]
    """Whole tensors that are no head: `modules_to_save`, biases."""
    others: tuple[TensorInfo, ...]
    """Tensors of parts that are neither factors nor whole tensors of the model."""
    parameters: int
    nbytes: int
    dtypes: Mapping[str, int]
    """dtype → number of elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInspection(Inspection):
    """What a model folder holds."""

    model_type: str | None
    architectures: tuple[str, ...]
    layers: int | None
    num_labels: int | None
    tied: bool | None
    """Whether output and input embeddings are one tensor; None where the config does not say."""
    quantization: str | None
    head: tuple[TensorInfo, ...]
    tensors: int
    parameters: int
    nbytes: int
    dtypes: Mapping[str, int]
    files: tuple[tuple[str, int], ...]
    """Weight files and their sizes."""
    merged_from: tuple[str, ...]
    """What the manifest names as base and adapters; empty for a base model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    """The files of one tag of a sharded checkpoint; the tag is "." where they lie in the folder itself."""

    tag: str
    files: int
    nbytes: int
    latest: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedInspection(Inspection):
    """What a DeepSpeed or FSDP checkpoint holds."""

    tags: tuple[RankFiles, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInspection(Inspection):
    """A run folder: nothing but its checkpoints."""
