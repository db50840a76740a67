"""What a plan means, in the most naive way there is: whole tensors in float64, by the formulas of the operations."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.execution.kernels import STORAGE
from lora_tool.plans.core.factor_ops import FactorOp, Mix, SmallMatrix
from lora_tool.plans.core.ops import BiasDelta, DoraDelta, LoraDelta, LowRank, Precision, RowOp
from lora_tool.plans.core.plan import Plan
from lora_tool.verification.bounds import stated_bound
from lora_tool.verification.elements import half_ulps

Array = np.ndarray[Any, Any]


def interpret(plan: Plan) -> dict[str, Array]:
    """Return the exact values of every output tensor, in float64, as far as float64 goes."""
    return {step.out.name: step.op.reference(load).reshape(step.out.shape) for step in plan.steps}


def load(tensor: StoredTensor) -> Array:
    """Return a stored tensor's values."""
    data = b"".join(span.path.read_bytes()[span.offset :][: span.nbytes] for span in tensor.spans)
    return np.frombuffer(data, STORAGE[tensor.dtype]).astype(np.float64).reshape(tensor.shape)


def off_by_at_most(op: RowOp, written: Array, out: DType, precision: Precision) -> Array:
    """Return how far each value may be from the formula's: see `lora_tool.verification.bounds`."""
    bound = stated_bound(op, out, precision)
    exact = op.reference(load)
    source = exact if isinstance(op, FactorOp) else load(op.source)
    products = np.zeros_like(exact)
    if isinstance(op, Mix):
        sizes = replace(op, matrix=SmallMatrix.of(np.abs(op.matrix.values)))
        products = sizes.reference(lambda tensor: np.abs(load(tensor)))
    if isinstance(op, LowRank):
        grown = LoraDelta(source=op.source, terms=op.terms, transposed=op.transposed)
        products = grown.reference(lambda tensor: np.abs(load(tensor))) - np.abs(source)
    elif isinstance(op, BiasDelta):
        products = op.reference(lambda tensor: np.abs(load(tensor))) - np.abs(source)
    if isinstance(op, DoraDelta):
        products = products * np.abs(exact) / np.maximum(np.abs(grown.reference(load)), 1e-300)
    half = half_ulps(np.ascontiguousarray(written), out)
    return np.asarray(bound.of_result * half + bound.of_change * np.abs(exact - source) + bound.of_product * products)
