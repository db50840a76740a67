"""The words of an inspection: what a folder holds, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from lora_tool.display import counted, number, printable, shortened, size

_SHOWN = 8
"""Tensors that are named before the rest is counted."""


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
class TrainingProgress:
    """How far the run was that wrote this folder."""

    step: int
    epoch: float | None
    loss: float | None

    def __str__(self) -> str:
        epoch = "" if self.epoch is None else f", epoch {self.epoch:.3g}"
        return f"step {self.step:,}{epoch}" + ("" if self.loss is None else f", loss {number(self.loss)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRow:
    """One `checkpoint-N` inside a folder. `kind` is "unreadable" where it could not be opened, `note` says why."""

    name: str
    kind: str
    nbytes: int
    training: TrainingProgress | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What every kind of folder has."""

    path: str
    kind: str
    disk_bytes: int
    tokenizer_files: tuple[str, ...]
    training: TrainingProgress | None
    checkpoints: tuple[CheckpointRow, ...]
    problems: tuple[str, ...]

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield names and values of what the folder is; a value may be empty, or of several lines."""
        yield from self._own_facts()
        yield "training", str(self.training or "")
        yield "tokenizer", ", ".join(self.tokenizer_files)
        yield "on disk", size(self.disk_bytes)

    def _own_facts(self) -> Iterator[tuple[str, str]]:
        yield from ()

    def __str__(self) -> str:
        lines = (f"{name}: {printable(value)}" for name, value in self.facts() if value)
        return "\n".join((f"{self.kind}  {printable(self.path)}", *lines))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shortened(self.path, 300)!r}: {self.kind}, {size(self.disk_bytes)})"

    def _repr_html_(self) -> str:
        import html  # noqa: PLC0415 - only in notebooks

        rows = (
            f"<tr><th>{name}</th><td>{html.escape(shortened(printable(value)))}</td></tr>"
            for name, value in self.facts()
            if value
        )
        return f"<b>{self.kind}</b> {html.escape(printable(self.path))}<table>{''.join(rows)}</table>"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
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

    def _own_facts(self) -> Iterator[tuple[str, str]]:
        revision = f" @ {self.revision}" if self.revision else ""
        yield "base model", f"{self.base_model}{revision}" if self.base_model else "not named"
        yield "task", self.task_type or "not named"
        kind = "LoRA" if self.peft_type == "LORA" else self.peft_type or ""
        yield "method", ", ".join((kind, *self.variants)) if kind else ""
        yield "parameters", f"{self.parameters:,}{_dtypes(self.dtypes.items())}, {size(self.nbytes)}"
        yield "head", _tensor_list(self.head)
        yield "saved", _tensor_list(self.saved)
        yield "other", _tensor_list(self.others)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
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

    def _own_facts(self) -> Iterator[tuple[str, str]]:
        yield "type", ", ".join(filter(None, (self.model_type, *self.architectures)))
        yield "layers", "" if self.layers is None else str(self.layers)
        yield "parameters", f"{self.parameters:,} in {counted(self.tensors, 'tensor')}{_dtypes(self.dtypes.items())}"
        yield "weights", f"{size(self.nbytes)} in {counted(len(self.files), 'file')}"
        yield "quantised", self.quantization or ""
        yield "head", _tensor_list(self.head) or "none stored"
        yield "labels", "" if self.num_labels is None else str(self.num_labels)
        yield "embeddings", "" if self.tied is None else "tied" if self.tied else "not tied"
        yield "merged from", ", ".join(self.merged_from)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFiles:
    """The files of one tag of a sharded checkpoint; the tag is "." where they lie in the folder itself."""

    tag: str
    files: int
    nbytes: int
    latest: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ShardedInspection(Inspection):
    """What a DeepSpeed or FSDP checkpoint holds."""

    tags: tuple[RankFiles, ...]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunInspection(Inspection):
    """A run folder: nothing but its checkpoints."""


def _tensor_list(tensors: Sequence[TensorInfo]) -> str:
    listed = [
        f"{tensor.name.removeprefix('base_model.model.')} {list(tensor.shape)} {tensor.dtype}"
        for tensor in tensors[:_SHOWN]
    ]
    more = [f"and {len(tensors) - _SHOWN} more"] if len(tensors) > _SHOWN else []
    return "\n".join(listed + more)


def _dtypes(held: Iterable[tuple[str, int]]) -> str:
    """Return the types in brackets, each with its elements where there are several; nothing for nothing."""
    listed = list(held)
    found = listed[0][0] if len(listed) == 1 else ", ".join(f"{dtype} {elements:,}" for dtype, elements in listed)
    return f" ({found})" if found else ""
