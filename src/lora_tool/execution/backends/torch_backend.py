"""The arithmetic of `--precision peft`: torch, in the order of operations of PEFT's default `merge_and_unload`.

PEFT loads the base in its dtype and the factors in float32, forms the whole delta as `(B @ A) * scaling` in float32,
and adds it in place to the 16-bit weight, which rounds once (peft 0.21, `LoraLayer.get_delta_weight` and `merge`).
A product's bits may depend on the shapes that a BLAS is given, so the delta is formed whole, as PEFT forms it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import ClassVar, NoReturn

from lora_tool.core.choices import assert_never
from lora_tool.core.errors import MissingDependency
from lora_tool.core.tensors import FLOAT_NAMES, StoredTensor
from lora_tool.execution.backends.backend import refuse_nonfinite, refuse_overflow
from lora_tool.execution.backends.numpy_backend import NumpyBackend
from lora_tool.execution.kernels import retention
from lora_tool.execution.output import write_exactly
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import ComputeUnit
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.plans.core.delta_retention import DeltaRetention
from lora_tool.plans.core.factor_ops import Beside, Columns, Mix
from lora_tool.plans.core.operation import LoraTerm
from lora_tool.plans.core.ops import (
    BiasDelta,
    Cast,
    Copy,
    Dequantise,
    DoraDelta,
    LoraDelta,
    LowRank,
    OnSource,
    Precision,
    ReplaceRows,
    RowOp,
)

try:
    import torch
except ImportError as error:  # pragma: no cover - the test environment has torch
    raise MissingDependency("torch", extra="merge") from error

_TORCH = {dtype: getattr(torch, name) for dtype, name in FLOAT_NAMES.items()}


class TorchBackend:
    """See `Backend`."""

    whole_tensors: ClassVar[bool] = True

    def __init__(self, sources: Sources, precision: Precision, stopped: Callable[[], bool]) -> None:
        del precision  # of an init that is recomputed: there is one way
        self._sources = sources
        self._stopped = stopped
        self._factors: dict[StoredTensor, torch.Tensor] = {}
        self._sample: tuple[torch.Tensor, torch.Tensor] | None = None

    @staticmethod
    @contextlib.contextmanager
    def one_thread() -> Iterator[None]:
        """Give torch one thread, and the BLAS of numpy."""
        threads = torch.get_num_threads()
        with NumpyBackend.one_thread():
            torch.set_num_threads(1)
            try:
                yield
            finally:
                torch.set_num_threads(threads)

    def run(self, unit: ComputeUnit, out: int) -> DeltaRetention | None:
        """See `Backend`."""
        if self._stopped():
            return None
        self._sample = None
        merged = self._values(unit.op, _TORCH[unit.out.dtype])
        if unit.is_new and not bool(torch.isfinite(merged).all()):
            self._refuse(unit, merged)
        write_exactly(out, _bytes_of(merged.contiguous()), unit.at)
        if self._sample is None:
            return None
        before, meant = self._sample
        return retention(before.numpy(), meant.numpy(), _sampled(merged).numpy())

    def _refuse(self, unit: ComputeUnit, merged: torch.Tensor) -> NoReturn:
        finite = all(bool(torch.isfinite(self._load(tensor)).all()) for tensor in unit.op.inputs)
        if finite and not bool(torch.isnan(merged).any()):
            refuse_overflow(unit)
        refuse_nonfinite(unit)

    def _values(self, op: RowOp, dtype: torch.dtype) -> torch.Tensor:
        match op:
            case Beside():
                made = torch.zeros(op.shape, dtype=torch.float64)
                for part, place in zip(op.parts, op.places, strict=True):
                    made[:, place] = part.scale * self._columns(part)
                return made.to(dtype)
            case Mix():
                matrix = torch.from_numpy(op.matrix.values.copy())
                whole = torch.cat([self._load(part).to(torch.float64) for part in op.parts], dim=0 if op.below else 1)
                return (matrix.T @ whole if op.below else whole @ matrix).to(dtype)
            case _:
                return self._changed(op, dtype)

    def _columns(self, part: Columns) -> torch.Tensor:
        return self._load(part.tensor).to(torch.float64)[:, part.first :: part.step][:, : part.count]

    def _changed(self, op: OnSource, dtype: torch.dtype) -> torch.Tensor:
        weight = self._load(op.source).to(dtype)
        match op:
            case Copy() | Cast() | Dequantise():
                return weight
            case BiasDelta():
                for bias in op.terms:
                    weight += self._factor(bias.bias, weight) * bias.scaling
                return weight
            case LoraDelta():
                return self._lora(op, weight)
            case ReplaceRows():
                return weight.index_copy(0, torch.tensor(op.indices), self._load(op.rows).to(dtype))
            case DoraDelta():
                return self._dora(op, weight)
            case _:
                return assert_never(op)

    def _lora(self, op: LoraDelta, weight: torch.Tensor) -> torch.Tensor:
        if op.init is not None:
            weight = _residual(weight, op)
        before = meant = _sampled(weight)
        for lora in op.terms:
            delta = self._delta(op, lora, weight)
            meant = meant + _sampled(delta)
            weight += delta.to(weight.dtype) if op.rounded else delta
        self._sample = (before, meant)
        return weight

    def _dora(self, op: DoraDelta, weight: torch.Tensor) -> torch.Tensor:
        """Return what PEFT's `DoraLinearVariant.merge_unsafe` computes, in its order of operations."""
        delta = self._delta(op, op.term, weight)
        unmerged = weight.T + delta.T if op.transposed else weight + delta
        norms: torch.Tensor = torch.linalg.norm(unmerged, dim=1).to(unmerged.dtype)
        factor = (self._factor(op.magnitude, weight) / norms).view(-1, 1)
        merged = (factor.T if op.transposed else factor) * (weight + delta)
        self._sample = (_sampled(weight), _sampled(merged))
        return merged.to(weight.dtype)

    def _delta(self, op: LowRank, term: LoraTerm, weight: torch.Tensor) -> torch.Tensor:
        """Return scaling·(B·A) as W is stored, of the rows of the source; formed whole, because shapes decide bits."""
        b, a = self._factor(term.b, weight), self._factor(term.a, weight)
        if term.experts == 1:
            delta = b @ a
            delta = (delta.T if op.transposed else delta) * term.scaling
        else:
            # one expert of what PEFT's `ParamWrapper.get_delta_weight` computes for all of them
            only = slice(term.expert, term.expert + 1)
            stacked = a.reshape(term.experts, term.rank, -1)[only]
            if term.layout is ExpertLayout.RANK_MAJOR:
                columns = b.reshape(b.shape[0], term.rank, term.experts)[:, :, only]
            else:
                columns = b.reshape(b.shape[0], term.experts, term.rank).transpose(1, 2)[:, :, only]
            equation = "o r e, e r i -> e i o" if op.transposed else "o r e, e r i -> e o i"
            delta = torch.einsum(equation, columns, stacked)[0] * term.scaling
        return delta[term.first : term.first + op.source.shape[0]]

    def _factor(self, tensor: StoredTensor, weight: torch.Tensor) -> torch.Tensor:
        """PEFT gives factors the type of the weight, and then upcasts 16-bit ones to float32."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        if tensor not in self._factors:
            # a stack of experts has hundreds of steps in a row with the same two factors
            while len(self._factors) > 1:
                self._factors.pop(next(iter(self._factors)))
            self._factors[tensor] = self._load(tensor)
        return self._factors[tensor].to(dtype)

    def _load(self, tensor: StoredTensor) -> torch.Tensor:
        values = torch.empty(tensor.shape, dtype=_TORCH[tensor.dtype])
        self._sources.read_into(tensor, 0, _bytes_of(values))
        return values


_SAMPLED_WEIGHTS = 1 << 19


def _sampled(values: torch.Tensor) -> torch.Tensor:
    """Return the first rows, flat, in float64: as many as hold about half a million elements."""
    rows = max(1, _SAMPLED_WEIGHTS // max(1, values.numel() // max(1, values.shape[0])))
    return values[:rows].reshape(-1).to(torch.float64)


def _residual(weight: torch.Tensor, op: LoraDelta) -> torch.Tensor:
    """Return what PEFT leaves of a weight when it builds the layer: `LoraLayer.pissa_init` and `olora_init`, peft 0.21.

    Its bits depend on how many threads torch has.
    """
    (term,) = op.terms
    wide = (weight.T if op.transposed else weight).to(torch.float32)
    if op.init == "pissa":
        left, values, right = torch.linalg.svd(wide, full_matrices=False)
        values = values[: term.rank] / term.scaling
        a = torch.diag(torch.sqrt(values)) @ right[: term.rank]
        b = left[:, : term.rank] @ torch.diag(torch.sqrt(values))
    else:
        q, r = torch.linalg.qr(wide)
        a, b = r[: term.rank].contiguous(), q[:, : term.rank].contiguous()
    residual: torch.Tensor = wide - term.scaling * b @ a
    return (residual.T if op.transposed else residual).to(weight.dtype)


def _bytes_of(values: torch.Tensor) -> memoryview:
    return values.reshape(-1).view(torch.uint8).numpy().data
