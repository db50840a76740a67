"""The words of an inspection: what a folder holds, as plain data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, TypeAlias

from msgspec import Struct
from msgspec.structs import asdict

from lora_tool.checkpoints import AdapterDir, Checkpoint, ModelDir
from lora_tool.core.display import as_html, counted, json_data, number, printable, shortened, size
from lora_tool.core.errors import BrokenFile
from lora_tool.core.tables import TextTable
from lora_tool.formats import model_card, training_record
from lora_tool.formats.files import inside, read_object
from lora_tool.models.ends import is_last_layer
from lora_tool.workflows.inspection.curves import Curves

_INITS = {"true": "PEFT's default (B = 0)", "false": "random A and B"}
"""Words for values of `init_lora_weights` that say nothing by themselves."""
_SHOWN = 8
"""Tensors that are named before the rest is counted."""


class ValueSpread(Struct, frozen=True, kw_only=True):
    """Smallest, middle and largest of some values. NaN and infinities stay what they are, at the end."""

    least: float
    median: float
    most: float


class Norms(Struct, frozen=True, kw_only=True):
    """Frobenius norms over the modules of one group; ΔW is scaling·B·A, for DoRA before its magnitudes."""

    a: ValueSpread
    b: ValueSpread
    delta: ValueSpread | None
    """None where the scaling is not known, because the config cannot be read."""


Measured: TypeAlias = tuple[float, float, float | None]
"""‖A‖, ‖B‖ and ‖ΔW‖ of one module; the last is None where its scaling is not known."""


class Target(Struct, frozen=True, kw_only=True):
    """Modules of one name that have rank, scaling, shapes and dtype in common."""

    name: str
    modules: tuple[str, ...]
    layers: tuple[int, ...]
    rank: int | None
    alpha: float | None
    """The config's alpha for these modules; None where the config cannot be read."""
    scaling: float | None
    a_shape: tuple[int, ...] | None
    b_shape: tuple[int, ...] | None
    dtype: str
    parameters: int
    norms: Norms | None = None


class Module(Struct, frozen=True, kw_only=True):
    """The numbers of one module's LoRA. What was not asked for, or cannot be computed, is None or empty.

    Norms are Frobenius norms; ΔW is scaling·B·A, for DoRA before its magnitudes.
    """

    module: str
    target: str
    """The name of its row in the tables."""
    layer: int | None
    rank: int | None
    alpha: float | None
    scaling: float | None
    norm_a: float | None = None
    norm_b: float | None = None
    norm_delta: float | None = None
    effective_rank: float | None = None
    """The exponential of the entropy of the singular values' shares of their sum: from 1 to the rank, 0 for zeros."""
    singular_values: tuple[float, ...] = ()
    """Those of ΔW, falling, as many as the rank."""


class TensorInfo(Struct, frozen=True, kw_only=True):
    """One tensor by name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    norm: float | None = None
    """The Frobenius norm, of the heads of adapters whose norms are computed."""
    cosine: float | None = None
    """That of the angle to the first adapter's head, of the heads of several adapters: near 1 if the two began alike."""

    def __str__(self) -> str:
        name, rows = self.name.removeprefix("base_model.model."), self.shape[0] if self.shape else 0
        labels = counted(rows, "label") if is_last_layer(name.rpartition(".")[0]) else ""
        norm = "" if self.norm is None else f"norm {number(self.norm)}"
        cosine = "" if self.cosine is None else f"cosine with the first {number(self.cosine)}"
        return ", ".join(filter(None, (f"{name} {list(self.shape)} {self.dtype}", labels, norm, cosine)))


class TrainingProgress(Struct, frozen=True, kw_only=True):
    """The progress of the run when it wrote this folder."""

    step: int
    epoch: float | None
    loss: float | None
    max_steps: int | None = None
    """Where the run was to end."""
    best_step: int | None = None
    best_metric: float | None = None
    """The value at `best_step` of the metric by which the run chose its best checkpoint."""

    def __str__(self) -> str:
        of = f" of {self.max_steps:,}" if self.max_steps else ""
        epoch = "" if self.epoch is None else f", epoch {self.epoch:.3g}"
        loss = "" if self.loss is None else f", loss {number(self.loss)}"
        at = "" if self.best_step is None else f" at step {self.best_step:,}"
        best = "" if self.best_metric is None else f"; best metric {number(self.best_metric)}{at}"
        return f"step {self.step:,}{of}{epoch}{loss}{best}"


class CheckpointRow(Struct, frozen=True, kw_only=True):
    """One `checkpoint-N` inside a folder. `kind` is "unreadable" where it could not be opened, `note` says why."""

    name: str
    kind: str
    nbytes: int
    training: TrainingProgress | None = None
    note: str | None = None


class Inspection(Struct, frozen=True, kw_only=True):
    """The facts that inspection gives for every kind of folder."""

    path: str
    kind: str
    disk_bytes: int
    tokenizer_files: tuple[str, ...]
    versions: Mapping[str, str]
    """Package → version that made it, where a file in the folder records it."""
    training: TrainingProgress | None
    curves: Curves
    """What the run of this folder logged: name → (step, value) pairs."""
    checkpoints: tuple[CheckpointRow, ...]
    problems: tuple[str, ...]

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield names and values of what the folder is; a value may be empty, or of several lines."""
        yield from self.own_facts()
        yield "made with", ", ".join(f"{package} {version}" for package, version in self.versions.items())
        yield "training", str(self.training or "")
        yield "tokenizer", ", ".join(self.tokenizer_files)
        yield "on disk", size(self.disk_bytes)

    def own_facts(self) -> Iterator[tuple[str, str]]:
        """Yield the facts that only folders of this kind have."""
        yield from ()

    def __str__(self) -> str:
        lines = (f"{name}: {printable(value)}" for name, value in self.facts() if value)
        return "\n".join((f"{self.kind}  {printable(self.path)}", *lines))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({shortened(self.path, 300)!r}: {self.kind}, {size(self.disk_bytes)})"

    def to_json(self) -> dict[str, Any]:
        """Return all facts as JSON data, as `inspect.schema.json` describes them."""
        table: dict[str, Any] = json_data({"schema_version": 1, **asdict(self)})
        return table

    def _repr_html_(self) -> str:
        rows = tuple((name, shortened(value)) for name, value in self.facts() if value)
        return as_html(f"{self.kind}  {printable(self.path)}") + TextTable(columns=("", ""), rows=rows).html()


class AdapterInspection(Inspection, frozen=True, kw_only=True):
    """What an adapter holds."""

    base_model: str | None
    revision: str | None
    task_type: str | None
    peft_type: str | None
    variants: tuple[str, ...]
    """What is not plain LoRA about it: rsLoRA, DoRA, lora_bias, …"""
    alpha: float | None
    """The config's `lora_alpha`; of a module that a pattern names, see its target."""
    dropout: float | None
    init: str | None
    """`init_lora_weights`: "true" is PEFT's default."""
    targets: tuple[Target, ...]
    modules: tuple[Module, ...]
    """Every module with LoRA, target by target."""
    head: tuple[TensorInfo, ...]
    saved: tuple[TensorInfo, ...]
    """Whole tensors that are no head: `modules_to_save`, biases."""
    others: tuple[TensorInfo, ...]
    """Tensors of parts that are neither factors nor whole tensors of the model."""
    parameters: int
    nbytes: int
    dtypes: Mapping[str, int]
    """dtype → number of elements."""

    def own_facts(self) -> Iterator[tuple[str, str]]:
        revision = f" @ {self.revision}" if self.revision else ""
        yield "base model", f"{self.base_model}{revision}" if self.base_model else "not named"
        yield "task", self.task_type or "not named"
        kind = "LoRA" if self.peft_type == "LORA" else self.peft_type or ""
        plain = (variant for variant in self.variants if not variant.startswith("init "))
        sizes = {"rank": _span(each.rank for each in self.targets), "alpha": _span(each.alpha for each in self.targets)}
        yield (
            "method",
            ", ".join((kind, *plain, *(f"{name} {span}" for name, span in sizes.items() if span))) if kind else "",
        )
        if kind == "LoRA":
            yield "dropout", "" if self.dropout is None else f"{self.dropout:g}"
            yield "init", _INITS.get(self.init or "", self.init or "")
        yield "parameters", f"{self.parameters:,}{_dtypes(self.dtypes.items())}, {size(self.nbytes)}"
        yield "head", _tensor_list(self.head)
        yield "saved", _tensor_list(self.saved)
        yield "other", _tensor_list(self.others)


class ModelInspection(Inspection, frozen=True, kw_only=True):
    """What a model folder holds."""

    model_type: str | None
    architectures: tuple[str, ...]
    layers: int | None
    num_labels: int | None
    tied: bool | None
    """Whether output and input embeddings are one tensor; None where the config does not say."""
    quantization: str | None
    experts: str | None
    """How the experts' matrices lie on disk and in memory; None without experts."""
    head: tuple[TensorInfo, ...]
    tensors: int
    parameters: int
    nbytes: int
    dtypes: Mapping[str, int]
    files: tuple[tuple[str, int], ...]
    """Weight files and their sizes."""
    merged_from: tuple[str, ...]
    """What the manifest names as base and adapters; empty for a base model."""

    def own_facts(self) -> Iterator[tuple[str, str]]:
        yield "type", ", ".join(filter(None, (self.model_type, *self.architectures)))
        yield "layers", "" if self.layers is None else str(self.layers)
        yield "parameters", f"{self.parameters:,} in {counted(self.tensors, 'tensor')}{_dtypes(self.dtypes.items())}"
        yield "weights", f"{size(self.nbytes)} in {counted(len(self.files), 'file')}"
        yield "quantised", self.quantization or ""
        yield "experts", self.experts or ""
        yield "head", _tensor_list(self.head) or "none stored"
        yield "labels", "" if self.num_labels is None else str(self.num_labels)
        yield "embeddings", "" if self.tied is None else "tied" if self.tied else "not tied"
        yield "merged from", ", ".join(self.merged_from)


class RankFiles(Struct, frozen=True, kw_only=True):
    """The files of one tag of a sharded checkpoint; the tag is "." where they lie in the folder itself."""

    tag: str
    files: int
    nbytes: int
    latest: bool = False


class ShardedInspection(Inspection, frozen=True, kw_only=True):
    """What a DeepSpeed or FSDP checkpoint holds."""

    tags: tuple[RankFiles, ...]


class RunInspection(Inspection, frozen=True, kw_only=True):
    """A run folder: nothing but its checkpoints, and what they are."""

    latest: Inspection | None
    """The latest checkpoint that can be opened, without norms."""

    def own_facts(self) -> Iterator[tuple[str, str]]:
        if self.latest is not None:
            yield "latest", f"{PurePath(self.latest.path).name}, {self.latest.kind}"
            yield from self.latest.own_facts()


def _span(numbers: Iterable[float | None]) -> str:
    """Return the least and the largest of the numbers that are known, as text; one where they are the same."""
    known = {number for number in numbers if number is not None}
    return " to ".join(f"{number:g}" for number in sorted({min(known), max(known)})) if known else ""


def _tensor_list(tensors: Sequence[TensorInfo]) -> str:
    listed = [*map(str, tensors[:_SHOWN])]
    more = [f"and {len(tensors) - _SHOWN} more"] if len(tensors) > _SHOWN else []
    return "\n".join(listed + more)


def _dtypes(held: Iterable[tuple[str, int]]) -> str:
    """Return the types in brackets, each with its elements where there are several; nothing for nothing."""
    listed = list(held)
    found = listed[0][0] if len(listed) == 1 else ", ".join(f"{dtype} {elements:,}" for dtype, elements in listed)
    return f" ({found})" if found else ""


# Which versions of which packages made a folder, from every file in it that records some.


def versions_of(checkpoint: Checkpoint) -> Mapping[str, str]:
    """Return package → version; of several records of one package the config's counts, which its library wrote."""
    found: dict[str, str] = {}
    for record in _records(checkpoint):
        for package, version in record.items():
            if isinstance(version, str) and version:
                found.setdefault(package, version)
    return found


def _records(checkpoint: Checkpoint) -> Iterator[Mapping[str, object]]:
    if isinstance(checkpoint, AdapterDir) and checkpoint.config:
        yield {"peft": checkpoint.config.peft_version}
    if isinstance(checkpoint, ModelDir):
        if checkpoint.config:
            yield {"transformers": checkpoint.config.raw.get("transformers_version")}
        yield _table(checkpoint.manifest.raw if checkpoint.manifest else {})
    folder = checkpoint.folder
    path = folder.root / training_record.FILE_NAME
    if path.name in folder.files and inside(folder.root, path):
        with contextlib.suppress(BrokenFile):  # `validate` says what is wrong with it
            yield _table(read_object(path))
    path = folder.root / model_card.FILE_NAME
    if path.name in folder.files and inside(folder.root, path):
        yield model_card.framework_versions(path)


def _table(raw: Mapping[str, object]) -> Mapping[str, object]:
    versions = raw.get("versions")
    return versions if isinstance(versions, dict) else {}
