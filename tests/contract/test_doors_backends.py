"""The door of backends: arithmetic of one's own is one class, and no file of ours knows of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ClassVar

import numpy as np

from lora_tool import plan_merge, verify
from lora_tool.checkpoints import AdapterDir, open_checkpoint, open_model
from lora_tool.execution.backends.backend import refuse_nonfinite
from lora_tool.execution.engine import execute
from lora_tool.execution.kernels import STORAGE, round_to
from lora_tool.execution.local_engine import LocalEngine
from lora_tool.execution.output import write_exactly
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import ComputeUnit
from lora_tool.plans.core.delta_retention import DeltaRetention
from lora_tool.plans.core.ops import Precision, RowOp
from tests.property.interpret import Array, load

FIXTURE = Path(__file__).parents[2] / "fixtures" / "causal-llama"


class ReferenceBackend:
    """What the operations mean, rounded once: each row range is cut from the operation and computed in float64."""

    whole_tensors: ClassVar[bool] = False
    ran: ClassVar[list[ComputeUnit]] = []

    def __init__(self, sources: Sources, precision: Precision, stopped: Callable[[], bool]) -> None:
        del sources, precision, stopped

    @staticmethod
    def one_thread() -> AbstractContextManager[object]:
        return nullcontext()

    def run(self, unit: ComputeUnit, out: int) -> DeltaRetention | None:
        self.ran.append(unit)
        (some,) = unit.op.cut(unit.first, unit.last - unit.first)
        values: Array = some.reference(load)
        if not np.isfinite(values).all():
            refuse_nonfinite(unit)
        rounded = round_to(values, unit.out.dtype, np.empty(values.shape, STORAGE[unit.out.dtype]))
        write_exactly(out, rounded.reshape(-1).view(np.uint8).data, unit.begin)
        return None


def chosen(_precision: Precision, _op: RowOp) -> type[ReferenceBackend]:
    return ReferenceBackend


def test_a_backend_of_ones_own_merges_and_verifies(tmp_path: Path) -> None:
    adapter = open_checkpoint(FIXTURE / "adapter")
    assert isinstance(adapter, AdapterDir)
    plan = plan_merge(open_model(FIXTURE / "base"), adapter)
    ReferenceBackend.ran.clear()
    own = open_model(execute(plan, tmp_path / "own", engine=LocalEngine(jobs=2, choose=chosen)))
    ours = open_model(execute(plan, tmp_path / "ours"))
    assert {unit.out.name for unit in ReferenceBackend.ran} == {
        step.out.name for step in plan.steps if not step.op.is_copy
    }
    for name, tensor in own.tensors.items():
        assert np.allclose(load(tensor), load(ours.tensors[name]), rtol=2.0**-8, atol=0)
    verify(tmp_path / "own").raise_for_errors()
