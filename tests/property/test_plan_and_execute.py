"""Laws of plans and of what executing them writes."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tool import plan_merge
from lora_tool.checkpoints import AdapterDir, open_checkpoint, open_model
from lora_tool.core.tensors import DType, Span, StoredTensor, TensorAction, TensorSpec
from lora_tool.execution import kernels, units
from lora_tool.execution import local_engine as worker
from lora_tool.execution.backends import numpy_backend
from lora_tool.execution.engine import execute
from lora_tool.plans.core.ops import Cast, Copy, row_ops
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import Shard, Step, lay_out
from tests.property.interpret import interpret, load, off_by_at_most
from tests.property.strategies import STORED, Inputs, inputs, specs

SIZES = st.none() | st.integers(1, 5000)


def steps_of(wanted: list[TensorSpec]) -> list[Step]:
    def copied(spec: TensorSpec) -> Step:
        source = StoredTensor(spec=spec, spans=(Span(path=Path("x"), offset=0, nbytes=spec.nbytes),))
        return Step(out=spec, op=Copy(source=source), action=TensorAction.COPIED, reason="test")

    return [copied(spec) for spec in wanted]


@given(specs(), SIZES, st.data())
def test_the_layout_holds_each_step_once_and_keeps_to_the_limit(
    wanted: list[TensorSpec], limit: int | None, data: st.DataObject
) -> None:
    homes = {spec.name: data.draw(st.sampled_from(["a", "b", "c"])) for spec in wanted if data.draw(st.booleans())}
    steps = steps_of(wanted)
    shards = lay_out(steps, homes=homes, max_shard_bytes=limit) if steps else ()
    laid = [step for shard in shards for step in shard.steps]
    assert sorted(step.out.name for step in laid) == sorted(spec.name for spec in wanted)
    assert len({shard.filename for shard in shards}) == len(shards)
    if limit is not None:
        assert [step.out.name for step in laid] == [spec.name for spec in wanted]
        assert all(shard.data_bytes <= limit or len(shard.steps) == 1 for shard in shards)
    else:
        together = [{homes[step.out.name] for step in shard.steps if step.out.name in homes} for shard in shards]
        assert all(len(names) <= 1 for names in together)


@given(specs(), st.integers(1, 64), st.integers(1, 64), st.booleans())
def test_units_cover_the_data_once(wanted: list[TensorSpec], copy_bytes: int, weights: int, whole: bool) -> None:
    steps = tuple(
        Step(out=step.out, op=Cast(source=step.op.source) if number % 2 else step.op, action=step.action, reason="test")
        for number, step in enumerate(steps_of(wanted))
    )
    shard = Shard(filename="x", steps=steps)
    with mock.patch.multiple(units, COPY_BYTES=copy_bytes, UNIT_WEIGHTS=weights):
        ranges = [(unit.begin, unit.begin + unit.nbytes) for unit in units.units_of(shard, whole=lambda _: whole)]
    at = len(shard.header)
    for begin, end in ranges:
        assert begin == at
        at = end
    assert at == len(shard.header) + shard.data_bytes


@contextmanager
def planned(
    given_inputs: Inputs, precision: str, dtype: DType | None, limit: int | None
) -> Iterator[tuple[Plan, Path]]:
    with tempfile.TemporaryDirectory() as folder:
        base, adapter = given_inputs.write(Path(folder))
        opened = open_checkpoint(adapter)
        assert isinstance(opened, AdapterDir)
        plan = plan_merge(open_model(base), opened, precision=precision, dtype=dtype, max_shard_size=limit)
        yield plan, Path(folder)


def digest(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@settings(max_examples=60)
@given(inputs(), st.sampled_from(["float32", "float64", "peft"]), st.none() | st.sampled_from(STORED), SIZES)
def test_what_is_written_is_what_the_plan_means(
    given_inputs: Inputs, precision: str, dtype: DType | None, limit: int | None
) -> None:
    with planned(given_inputs, precision, dtype, limit) as (plan, folder):
        expected = interpret(plan)
        written = open_model(execute(plan, folder / "out", jobs=2))
        assert not written.problems
        assert {name: tensor.spec for name, tensor in written.tensors.items()} == {
            s.out.name: s.out for s in plan.steps
        }
        for step in plan.steps:
            got, exact = load(written.tensors[step.out.name]), expected[step.out.name]
            (op,) = row_ops(step.op)
            room = 0 if op.is_copy else off_by_at_most(op, got, step.out.dtype, plan.precision)
            assert np.all(np.abs(got - exact) <= room), step.out.name


@settings(max_examples=25)
@given(
    inputs(),
    st.sampled_from(["float32", "float64", "peft"]),
    st.sampled_from([1, 3]),
)
def test_executing_again_gives_the_same_bytes_with_any_number_of_workers(
    given_inputs: Inputs, precision: str, jobs: int
) -> None:
    with planned(given_inputs, precision, None, 700) as (plan, folder):
        first = digest(execute(plan, folder / "first", jobs=1))
        assert digest(execute(plan, folder / "again", jobs=jobs)) == first


def weights(folder: Path) -> dict[str, bytes]:
    """Return what `digest` does, without the manifest: its samples are taken from blocks."""
    return {name: found for name, found in digest(folder).items() if name != "lora_tool.json"}


@settings(max_examples=25)
@given(inputs(), st.integers(0, 12), st.integers(0, 12), st.integers(0, 10))
def test_float64_gives_the_same_bytes_for_any_size_of_block(
    given_inputs: Inputs, block: int, unit: int, cache: int
) -> None:
    with planned(given_inputs, "float64", None, None) as (plan, folder):
        first = weights(execute(plan, folder / "first"))
        with (
            mock.patch.multiple(numpy_backend, BLOCK_WEIGHTS=1 << block, _LEAST_ROWS=1),
            mock.patch.object(units, "UNIT_WEIGHTS", 1 << unit),
            mock.patch.object(units, "COPY_BYTES", 1 << unit),
            mock.patch.object(kernels, "CACHE_BLOCK", 1 << cache),
        ):
            assert weights(execute(plan, folder / "cut", jobs=2)) == first


@settings(max_examples=15)
@given(inputs())
def test_copying_without_the_kernels_help_gives_the_same_bytes(given_inputs: Inputs) -> None:
    with planned(given_inputs, "float32", None, None) as (plan, folder):
        first = digest(execute(plan, folder / "first"))
        with mock.patch.object(worker, "_copy_in_kernel", lambda _unit, _source, _out: 0):
            assert digest(execute(plan, folder / "read-and-written")) == first


@pytest.mark.parametrize("tied", [False, True])
def test_every_input_tensor_has_one_fate(tied: bool) -> None:
    @settings(max_examples=20)
    @given(inputs().filter(lambda drawn: drawn.tied == tied))
    def law(given_inputs: Inputs) -> None:
        with planned(given_inputs, "float32", None, None) as (plan, _):
            outputs = {step.out.name for step in plan.steps}
            leftovers = [item.name for item in plan.leftovers]
            assert outputs == set(given_inputs.base)
            assert sorted(leftovers) == sorted(given_inputs.adapter)
            assert all(item.action is TensorAction.CONSUMED for item in plan.leftovers)
            assert plan.data_bytes == sum(math.prod(a.shape) * a.itemsize for a in given_inputs.base.values())

    law()
