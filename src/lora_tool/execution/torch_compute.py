"""The arithmetic of `--precision peft`: torch, in the order of operations of PEFT's default `merge_and_unload`.

PEFT loads the base in its dtype and the factors in float32, forms the whole delta as `(B @ A) * scaling` in float32,
and adds it in place to the 16-bit weight, which rounds once (peft 0.21, `LoraLayer.get_delta_weight` and `merge`).
A product's bits may depend on the shapes that a BLAS is given, so the delta is formed whole, as PEFT forms it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np

from lora_tool.errors import MissingDependency
from lora_tool.execution import kernels
from lora_tool.execution.compute import bytes_of, refuse_nonfinite, refuse_overflow, write_exactly
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import ComputeUnit
from lora_tool.plan.model import BiasDelta, Cast, LoraDelta
from lora_tool.tensors import DType, StoredTensor

try:
    import torch
except ImportError as error:  # pragma: no cover - the test environment has torch
    raise MissingDependency("torch", extra="merge") from error

_TORCH = {
    DType.BF16: torch.bfloat16,
    DType.F16: torch.float16,
    DType.F32: torch.float32,
    DType.F64: torch.float64,
}


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

    def run(self, unit: ComputeUnit, out: int) -> None:
        """Compute the tensor and write it to the descriptor `out`. Raises `ExecutionError` on NaN or infinity."""
        if self._stopped():
            return
        step = unit.step
        merged = self._values(step.op, _TORCH[step.out.dtype])
        array = _as_numpy(merged.contiguous(), step.out.dtype)
        if not isinstance(step.op, Cast) and not kernels.is_finite_stored(array, step.out.dtype):
            where = int((~torch.isfinite(merged.reshape(-1))).nonzero()[0])
            if bool(torch.isinf(merged.reshape(-1)[where])):
                refuse_overflow(step)
            refuse_nonfinite(step, where)
        write_exactly(out, bytes_of(array), unit.at)

    def _values(self, op: object, dtype: torch.dtype) -> torch.Tensor:
        if isinstance(op, Cast):
            return self._load(op.source).to(dtype)
        if isinstance(op, BiasDelta):
            bias = self._load(op.source).to(dtype)
            for term in op.terms:
                bias += self._factor(term.bias) * term.scaling
            return bias
        if isinstance(op, LoraDelta):
            weight = self._load(op.source).to(dtype)
            for lora in op.terms:
                delta = self._factor(lora.b) @ self._factor(lora.a)
                weight += (delta.T if op.transposed else delta) * lora.scaling
            return weight
        raise AssertionError(f"{type(op).__name__} is not computed")

    def _factor(self, tensor: StoredTensor) -> torch.Tensor:
        """PEFT upcasts 16-bit factors to float32 when it loads them, and leaves wider ones."""
        return self._load(tensor).to(torch.float32)

    def _load(self, tensor: StoredTensor) -> torch.Tensor:
        if not tensor.shape:
            stored = np.empty((), kernels.STORAGE[tensor.dtype])
            self._sources.read_into(tensor, 0, memoryview(stored.reshape(-1)).cast("B"))
        else:
            stored = self._sources.rows(tensor, 0, tensor.shape[0])
        if tensor.dtype is DType.BF16:
            return torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(stored)


def _as_numpy(values: torch.Tensor, dtype: DType) -> kernels.AnyArray:
    if dtype is DType.BF16:
        return np.asarray(values.view(torch.int16).numpy()).view(np.uint16)
    return np.asarray(values.numpy())
