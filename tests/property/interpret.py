"""What a plan means, in the most naive way there is: whole tensors in float64, one operation after the other."""

from __future__ import annotations

from typing import Any

import numpy as np

from lora_tool.execution.kernels import STORAGE
from lora_tool.plan.core.ops import BiasDelta, LoraDelta
from lora_tool.plan.core.plan import Plan
from lora_tool.tensors import StoredTensor

Array = np.ndarray[Any, Any]


def interpret(plan: Plan) -> dict[str, Array]:
    """Return the exact values of every output tensor, in float64, as far as float64 goes."""
    table = {}
    for step in plan.steps:
        value = load(step.op.source)
        if isinstance(step.op, LoraDelta):
            for term in step.op.terms:
                delta = term.scaling * (load(term.b) @ load(term.a))
                value = value + (delta.T if step.op.transposed else delta)
        elif isinstance(step.op, BiasDelta):
            value = value + sum(term.scaling * load(term.bias) for term in step.op.terms)
        table[step.out.name] = value
    return table


def load(tensor: StoredTensor) -> Array:
    """Return a stored tensor's values."""
    data = b"".join(span.path.read_bytes()[span.offset :][: span.nbytes] for span in tensor.spans)
    return np.frombuffer(data, STORAGE[tensor.dtype]).astype(np.float64).reshape(tensor.shape)
