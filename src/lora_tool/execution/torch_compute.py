"""The arithmetic of `--precision peft`: torch, in the order of operations of PEFT's default `merge_and_unload`.

PEFT loads the base in its dtype and the factors in float32, forms the whole delta as `(B @ A) * scaling` in float32,
and adds it in place to the 16-bit weight, which rounds once (peft 0.21, `LoraLayer.get_delta_weight` and `merge`).
A product's bits may depend on the shapes that a BLAS is given, so the delta is formed whole, as PEFT forms it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NoReturn

from lora_tool.actions import NEW
from lora_tool.errors import MissingDependency
from lora_tool.execution.compute import inputs_of, refuse_nonfinite, refuse_overflow, survival
from lora_tool.execution.output import write_exactly
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import ComputeUnit
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.plan.core.delta_retention import DeltaRetention
from lora_tool.plan.core.ops import BiasDelta, Cast, DoraDelta, LoraDelta, LoraTerm, ReplaceRows
from lora_tool.plan.core.steps import Step
from lora_tool.tensors import FLOAT_NAMES, StoredTensor

try:
    import torch
except ImportError as error:  # pragma: no cover - the test environment has torch
    raise MissingDependency("torch", extra="merge") from error

_TORCH = {dtype: getattr(torch, name) for dtype, name in FLOAT_NAMES.items()}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Give torch one thread while our own workers use the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class TorchComputer:
    """One worker's arithmetic. Units are whole tensors."""

    def __init__(self, sources: Sources, stopped: Callable[[], bool]) -> None:
        self._sources = sources
        self._stopped = stopped
        self._factors: dict[StoredTensor, torch.Tensor] = {}
        self._sample: tuple[torch.Tensor, torch.Tensor] | None = None
        self.survived: dict[str, list[tuple[int, DeltaRetention]]] = {}
        """Output tensor → samples of what rounding left of its change, with where each is."""

    def run(self, unit: ComputeUnit, out: int) -> None:
        """Compute the tensor and write it to the descriptor `out`. Raises `ExecutionError` on NaN or infinity."""
        if self._stopped():
            return
        step = unit.step
        self._sample = None
        merged = self._values(step.op, _TORCH[step.out.dtype])
        if step.action in NEW and not bool(torch.isfinite(merged).all()):
            self._refuse(step, merged)
        if self._sample is not None:
            before, meant = self._sample
            found = survival(before.numpy(), meant.numpy(), _sampled(merged).numpy())
            self.survived.setdefault(step.out.name, []).append((unit.begin, found))
        write_exactly(out, _bytes_of(merged.contiguous()), unit.at)

    def _refuse(self, step: Step, merged: torch.Tensor) -> NoReturn:
        finite = all(bool(torch.isfinite(self._load(tensor)).all()) for tensor in inputs_of(step.op))
        if finite and not bool(torch.isnan(merged).any()):
            refuse_overflow(step)
        refuse_nonfinite(step)

    def _values(self, op: object, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(op, Cast):
            return self._load(op.source).to(dtype)
        if isinstance(op, BiasDelta):
            bias = self._load(op.source).to(dtype)
            for term in op.terms:
                bias += self._factor(term.bias, bias) * term.scaling
            return bias
        if isinstance(op, LoraDelta):
            weight = self._load(op.source).to(dtype)
            if op.init is not None:
                weight = _residual(weight, op)
            before = meant = _sampled(weight)
            for lora in op.terms:
                delta = self._delta(op, lora, weight)
                meant = meant + _sampled(delta)
                weight += delta.to(dtype) if op.rounded else delta
            self._sample = (before, meant)
            return weight
        if isinstance(op, ReplaceRows):
            weight = self._load(op.source).to(dtype)
            return weight.index_copy(0, torch.tensor(op.indices), self._load(op.rows).to(dtype))
        if isinstance(op, DoraDelta):
            return self._dora(op, self._load(op.source).to(dtype))
        raise AssertionError(f"{type(op).__name__} is not computed")

    def _dora(self, op: DoraDelta, weight: torch.Tensor) -> torch.Tensor:
        """Return what PEFT's `DoraLinearVariant.merge_unsafe` computes, in its order of operations."""
        delta = self._delta(op, op.term, weight)
        unmerged = weight.T + delta.T if op.transposed else weight + delta
        norms = torch.linalg.norm(unmerged, dim=1).to(unmerged.dtype)
        factor = (self._factor(op.magnitude, weight) / norms).view(-1, 1)
        merged = (factor.T if op.transposed else factor) * (weight + delta)
        self._sample = (_sampled(weight), _sampled(merged))
        return merged.to(weight.dtype)

    def _delta(self, op: LoraDelta | DoraDelta, term: LoraTerm, weight: torch.Tensor) -> torch.Tensor:
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
    wide = wide - term.scaling * b @ a
    return (wide.T if op.transposed else wide).to(weight.dtype)


def _bytes_of(values: torch.Tensor) -> memoryview:
    return memoryview(values.reshape(-1).view(torch.uint8).numpy())
