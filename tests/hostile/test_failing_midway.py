"""An error in one unit of many ends the whole run at once: no other worker, and no flush, is waited for for ever."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from lora_tool import plan_merge
from lora_tool.checkpoints import AdapterDir, open_checkpoint, open_model
from lora_tool.core.errors import ExecutionError, LoraToolError
from lora_tool.execution.backends.numpy_backend import NumpyBackend
from lora_tool.execution.engine import execute
from lora_tool.execution.units import ComputeUnit
from tests.hostile.folders import copy_pair, left_behind


@pytest.mark.parametrize("jobs", [1, 2, 4])
@pytest.mark.parametrize("failing", [0, 1, 3])
def test_the_first_error_ends_the_run(failing: int, jobs: int, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    adapter = open_checkpoint(pair.adapter)
    assert isinstance(adapter, AdapterDir)
    plan = plan_merge(open_model(pair.base), adapter, max_shard_size=600)
    units: list[ComputeUnit] = []
    errors: list[LoraToolError] = []

    def run(_backend: NumpyBackend, unit: ComputeUnit, _out: int) -> None:
        units.append(unit)
        number = len(units)
        time.sleep(0.05)
        if number > failing:
            raise ExecutionError("unit failed")

    def merge() -> None:
        try:
            execute(plan, pair.out, jobs=jobs)
        except LoraToolError as error:
            errors.append(error)

    with mock.patch.object(NumpyBackend, "run", run):
        thread = threading.Thread(target=merge, daemon=True)
        thread.start()
        thread.join(timeout=20)
    assert not thread.is_alive(), "the run hangs"
    assert [str(error) for error in errors] == ["unit failed"]
    assert len(units) <= failing + jobs, "units went on being computed after the error"
    assert left_behind(pair) == set()
