"""What differs between two adapters, or between two models: by module, with norms and cosines.

Adapters are compared by what they do, not by how they are written: of each module's ΔW = scaling·B·A, the norm of the
difference comes from the triangles of the stacked factors, [s₁B₁, −s₂B₂]·[A₁; A₂], without forming a product; two
adapters with other factors and the same ΔW are alike.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

from lora_tool.adapters.view import AdapterView, LoraLayer, view_of
from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.checkpoints.quantised import as_matrices
from lora_tool.core.choices import TextEnum
from lora_tool.core.display import as_html, json_data, number, printable, ranges
from lora_tool.core.keys import split_layer
from lora_tool.core.progress import Progress
from lora_tool.core.tables import TextTable
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.stored_numbers import READABLE, Matrix, raw_blocks, square_sum, stored_blocks, widened
from lora_tool.workflows.inspection.factors import matrices, triangle
from lora_tool.workflows.inspection.targets import place, short_names


@enum.unique
class ModuleChange(TextEnum):
    """How a module or tensor of the second folder differs from that of the first."""

    SAME = "same"
    """The same bytes; for LoRA, the same bytes of both factors and the same scaling."""
    ALIKE = "alike in effect"
    """Another rank, other factors, and the same ΔW but for rounding in float64."""
    CHANGED = "changed"
    FIRST_ONLY = "only in the first"
    SECOND_ONLY = "only in the second"
    UNLIKE = "not comparable"
    """Of another shape, or of a type that is not compared by value; `note` says which."""


class Difference(Struct, frozen=True, kw_only=True):
    """One module's ΔW, or one tensor, in both. Norms are Frobenius norms; those of the absent are None."""

    name: str
    kind: str
    """"LoRA" or "tensor"."""
    change: ModuleChange
    first: float | None = None
    second: float | None = None
    apart: float | None = None
    """The norm of the second minus the first."""
    cosine: float | None = None
    """The cosine of the angle between them; None where one is zero."""
    note: str = ""

    @property
    def target(self) -> str:
        return split_layer(self.name)[1]

    @property
    def relative(self) -> float | None:
        """`apart` divided by the first's norm."""
        return self.apart / self.first if self.apart is not None and self.first else None

    @property
    def turned(self) -> float | None:
        """1 - cosine, from 0 to 2, with the digits that a cosine near 1 has lost; None where one of the two is zero."""
        if not self.first or not self.second or self.apart is None:
            return None
        # the law of cosines: the square of `apart` is that of the norms' difference and 2 first second (1 - cosine)
        beyond = (self.apart - (self.second - self.first)) * (self.apart + (self.second - self.first))
        return min(max(beyond / (2 * self.first * self.second), 0.0), 2.0) if math.isfinite(beyond) else math.nan


_COLUMNS = (
    "target", "×>", "layers", "", "‖first‖>", "‖second‖>", "relative>", "at most>", "cosine at least>", "median>", "",
)  # fmt: skip


class Comparison(Struct, frozen=True, kw_only=True):
    """All modules and tensors of both folders, in the order of the first, and the config fields that differ."""

    fields: Mapping[str, tuple[str, str]]
    differences: tuple[Difference, ...]

    def __repr__(self) -> str:
        changed = sum(item.change is not ModuleChange.SAME for item in self.differences)
        return f"Comparison({changed} of {len(self.differences)} modules and tensors differ)"

    def __str__(self) -> str:
        return "\n".join(
            filter(None, (self.summary, *self._field_lines(), str(self.by_target) if self.by_target.rows else ""))
        )

    def _repr_html_(self) -> str:
        above = as_html("\n".join((self.summary, *self._field_lines())))
        return above + (self.by_target.html() if self.by_target.rows else "")

    def _field_lines(self) -> Iterator[str]:
        yield from (printable(f"{name}: {first} → {second}") for name, (first, second) in self.fields.items())

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON data."""
        return {"schema_version": 1, "same": self.same, **json_data(asdict(self))}

    @property
    def by_target(self) -> TextTable:
        """The modules that differ, a row for those of one target that differ in one way."""
        groups: dict[tuple[str, ModuleChange, str], list[Difference]] = defaultdict(list)
        for item in self.differences:
            if item.change is not ModuleChange.SAME:
                groups[item.target, item.change, item.note].append(item)
        names = _short({item.target: item.kind for members in groups.values() for item in members})
        differ = len({change for _, change, _ in groups}) > 1  # else the summary says it of all
        rows = []
        for (target, change, note), members in sorted(groups.items(), key=lambda group: place(group[0][0])):
            layers = sorted({layer for item in members if (layer := split_layer(item.name)[0]) is not None})
            relatives = [item.relative for item in members if item.relative is not None]
            distances = [item.turned for item in members if item.turned is not None]
            rows.append(
                (
                    names[target],
                    str(len(members)),
                    ranges(layers),
                    str(change) if differ else "",
                    _median([item.first for item in members if item.first is not None]),
                    _median([item.second for item in members if item.second is not None]),
                    _median(relatives),
                    number(max(relatives, default=None)),
                    cosine(max(distances, default=None)),
                    cosine(statistics.median(distances) if distances else None),
                    note,
                )
            )
        return TextTable(columns=_COLUMNS, rows=tuple(rows))

    @property
    def summary(self) -> str:
        if self.same:
            return f"the same: {len(self.differences):,} modules and tensors"
        counts = Counter(item.change for item in self.differences)
        return ", ".join(f"{counts[change]:,} {change}" for change in ModuleChange if counts[change])

    @property
    def same(self) -> bool:
        return not self.fields and all(item.change is ModuleChange.SAME for item in self.differences)


_NEAR = 1e-3
"""1 - cosine below which three digits of a cosine are 1.00."""
_NOISE = 1e-14
"""What rounding in float64 leaves of 1 - cosine where the directions are the same."""


def cosine(away: float | None) -> str:
    """Return the cosine 1 - `away` as text: near 1 as its distance from 1, where three digits would all read 1.00."""
    if away is None or not away < _NEAR:
        return number(None if away is None else 1.0 - away)
    return f"1 - {away:.1e}" if away > _NOISE else "1"


def _short(kinds: Mapping[str, str]) -> Mapping[str, str]:
    """Return short names of targets; a tensor keeps the module that its parameter belongs to."""
    split = {target: target.rpartition(".") if kind == "tensor" else (target, "", "") for target, kind in kinds.items()}
    modules = short_names({module for module, _, _ in split.values()})
    return {target: modules[module] + dot + leaf for target, (module, dot, leaf) in split.items()}


def _median(values: Sequence[float]) -> str:
    return number(statistics.median(values) if values else None)


_ALIKE = 1e-12
"""Far above what QR and products in float64 leave of a difference of nothing, far below any type that is stored."""
_FIELDS = ("revision", "peft_type", "task_type", "r", "lora_alpha", "use_rslora", "use_dora", "bias")
_MODEL_FIELDS = ("model_type", "architectures", "num_labels", "tie_word_embeddings", "quantization")


def compare_adapters(first: AdapterDir, second: AdapterDir, progress: Progress = lambda _: None) -> Comparison:
    """Return how `second` differs from `first`. Reads both adapters' weights. Raises `OSError`."""
    views = view_of(first), view_of(second)
    layers = [{(layer.module, layer.adapter_name): layer for layer in view.layers} for view in views]
    differences = []
    for path, name in dict.fromkeys((*layers[0], *layers[1])):
        pair = layers[0].get((path, name)), layers[1].get((path, name))
        differences.append(_lora(path + (f" ({name})" if name else ""), *pair))
        progress(sum(tensor.nbytes for item in pair if item for tensor in (item.a, item.b) if tensor))
    whole = [_beside_factors(view) for view in views]
    return Comparison(
        fields=_base_fields(first, second) | _fields(first.config, second.config, _FIELDS),
        differences=(*differences, *_tensors(whole[0], whole[1], progress)),
    )


def compare_models(first: ModelDir, second: ModelDir, progress: Progress = lambda _: None) -> Comparison:
    """Return how `second` differs from `first`, tensor by tensor in blocks, quantised weights by what they stand for.

    Reads all weights. Raises `OSError`.
    """
    return Comparison(
        fields=_fields(first.config, second.config, _MODEL_FIELDS),
        differences=tuple(_tensors(as_matrices(first).tensors, as_matrices(second).tensors, progress)),
    )


def _base_fields(first: AdapterDir, second: AdapterDir) -> dict[str, tuple[str, str]]:
    """Return the base models where they differ; a relative path means what it means from its adapter."""

    def meant(adapter: AdapterDir) -> str:
        name = adapter.config.base_model if adapter.config else None
        folder = adapter.root / (name or "")
        return str(folder.resolve()) if name and folder.is_dir() else str(name)

    pair = meant(first), meant(second)
    return {"base_model": pair} if pair[0] != pair[1] else {}


def _fields(first: object, second: object, names: tuple[str, ...]) -> dict[str, tuple[str, str]]:
    if first is None or second is None:
        return {} if first is second else {"config": ("there" if first else "none", "there" if second else "none")}
    pairs = {name: (_shown(getattr(first, name)), _shown(getattr(second, name))) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _shown(value: object) -> str:
    """Return a config's value as a reader would write it."""
    if isinstance(value, tuple | list | frozenset):
        return ", ".join(map(str, sorted(value) if isinstance(value, frozenset) else value))
    return "not set" if value is None else str(value)


def _beside_factors(view: AdapterView) -> Mapping[str, StoredTensor]:
    """Return the adapter's other tensors, by the names that `save_pretrained` gives them."""
    factors = {factor.name for layer in view.layers for factor in layer.factors}
    keys = view.adapter.keys.items()
    return {key.canonical: view.adapter.tensors[name] for name, key in keys if name not in factors}


def _lora(name: str, first: LoraLayer | None, second: LoraLayer | None) -> Difference:
    of = partial(Difference, name=name, kind="LoRA")
    factors = [_factors(item) for item in (first, second) if item]
    norms = [_product_norm(*pair) if pair else None for pair in factors]
    if first is None or second is None:
        return _absent(of, norms[0], in_first=second is None)
    left, right = factors
    if left is None or right is None:
        return of(change=ModuleChange.UNLIKE, note="a pair is broken or has no scaling")
    shapes = [f"{item.a.shape[1]} → {item.b.shape[0]}" for item in (first, second) if item.a and item.b]
    if shapes[0] != shapes[1]:
        return of(change=ModuleChange.UNLIKE, note=f"in → out {shapes[0]} and {shapes[1]}")
    if first.scaling == second.scaling and all(map(np.array_equal, left, right)):
        return of(change=ModuleChange.SAME, first=norms[0], second=norms[1], apart=0.0, cosine=1.0)
    apart = _product_norm(np.hstack((left[0], -right[0])), np.hstack((left[1], right[1])))
    norm, other = norms[0] or 0.0, norms[1] or 0.0
    note = f"rank {first.rank} and {second.rank}" if first.rank != second.rank else ""
    change = ModuleChange.ALIKE if apart <= _ALIKE * max(norm, other) else ModuleChange.CHANGED
    return _apart(partial(of, change=change, note=note), norm, other, apart)


def _factors(layer: LoraLayer) -> tuple[Matrix, Matrix] | None:
    """Return scaling·B, [out, r], and Aᵀ, [in, r]; None where they do not fit together."""
    found = matrices(layer)
    return None if found is None or layer.scaling is None else (layer.scaling * found[0], found[1])


def _product_norm(left: Matrix, right: Matrix) -> float:
    """Return the Frobenius norm of left·rightᵀ; NaN where a factor is not finite."""
    return float(np.linalg.norm(triangle(left) @ triangle(right).T))


def _absent(of: Callable[..., Difference], norm: float | None, *, in_first: bool) -> Difference:
    return (
        of(change=ModuleChange.FIRST_ONLY, first=norm) if in_first else of(change=ModuleChange.SECOND_ONLY, second=norm)
    )


def _apart(of: Callable[..., Difference], first: float, second: float, apart: float) -> Difference:
    # the law of cosines; rounding may leave the range by a hair
    cosine = (first * first + second * second - apart * apart) / (2 * first * second) if first and second else None
    if cosine is not None and math.isfinite(cosine):
        cosine = min(max(cosine, -1.0), 1.0)
    return of(first=first, second=second, apart=apart, cosine=cosine)


def _tensors(
    first: Mapping[str, StoredTensor], second: Mapping[str, StoredTensor], progress: Progress
) -> Iterator[Difference]:
    for name in dict.fromkeys((*first, *second)):
        yield _tensor(name, first.get(name), second.get(name), progress)


def _tensor(name: str, first: StoredTensor | None, second: StoredTensor | None, progress: Progress) -> Difference:
    of = partial(Difference, name=name, kind="tensor")
    if first is None or second is None:
        there = first or second
        norm = math.sqrt(square_sum(there)) if there and there.dtype in READABLE else None
        progress(there.nbytes if there else 0)
        return _absent(of, norm, in_first=second is None)
    types = f"{first.dtype} and {second.dtype}" if first.dtype is not second.dtype else ""
    if first.shape != second.shape:
        return of(change=ModuleChange.UNLIKE, note=f"shape {list(first.shape)} and {list(second.shape)}")
    if {first.dtype, second.dtype} <= READABLE:
        return _by_value(of, first, second, types, progress)
    if not types and all(map(np.array_equal, raw_blocks(first), raw_blocks(second))):
        return of(change=ModuleChange.SAME)
    return of(change=ModuleChange.CHANGED, note=types or f"{first.dtype}, compared by bytes")


def _by_value(
    of: Callable[..., Difference], first: StoredTensor, second: StoredTensor, types: str, progress: Progress
) -> Difference:
    same, sums = not types, [0.0, 0.0, 0.0]
    for parts in zip(stored_blocks(first), stored_blocks(second), strict=True):
        equal = not types and np.array_equal(parts[0].view(np.uint8), parts[1].view(np.uint8))
        same = same and equal
        a = widened(parts[0], first.dtype)
        b = a if equal else widened(parts[1], second.dtype)
        with np.errstate(all="ignore"):  # NaN and infinities are shown as what they are
            squares = [float(np.dot(a, a)), float(np.dot(b, b)), 0.0 if equal else float(np.dot(b - a, b - a))]
        sums = [total + square for total, square in zip(sums, squares, strict=True)]
        progress(parts[0].nbytes + parts[1].nbytes)
    norm, other, apart = map(math.sqrt, sums)
    if same:
        return of(change=ModuleChange.SAME, first=norm, second=other, apart=0.0, cosine=1.0 if norm else None)
    return _apart(partial(of, change=ModuleChange.CHANGED, note=types), norm, other, apart)
