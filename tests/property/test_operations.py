"""Every operation against the formula that defines it: written in any precision, cut anywhere, and verified."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from lora_tool.core.tensors import DType, FileStamp, StoredTensor, TensorAction, TensorSpec
from lora_tool.execution import kernels, units
from lora_tool.execution.backends import numpy_backend
from lora_tool.execution.engine import execute
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.formats.weights import read_single
from lora_tool.plans.core.factor_ops import Beside, Columns, Mix, SmallMatrix
from lora_tool.plans.core.operation import BiasTerm, LoraTerm
from lora_tool.plans.core.ops import (
    Assemble,
    BiasDelta,
    Cast,
    Copy,
    DoraDelta,
    LoraDelta,
    Op,
    Precision,
    ReplaceRows,
    row_ops,
)
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import Step, lay_out
from lora_tool.rules.merged.evidence import Verdict
from lora_tool.verification.checking import check_steps
from lora_tool.verification.initial import taken
from lora_tool.verification.levels import Level
from tests.property.interpret import Array, load, off_by_at_most
from tests.property.strategies import FLOATS, write_weights


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What operations are made from: a weight [height, width], factors, and where an operation begins in a delta."""

    seed: int
    height: int
    width: int
    rank: int
    terms: int
    experts: int
    first: int
    layout: ExpertLayout
    transposed: bool
    rounded: bool
    dtype: DType
    factors: DType
    out: DType


DRAWN = st.builds(
    Drawn,
    seed=st.integers(0, 2**32 - 1),
    height=st.integers(1, 12),
    width=st.integers(1, 12),
    rank=st.integers(1, 5),
    terms=st.integers(1, 3),
    experts=st.integers(1, 3),
    first=st.integers(0, 3),
    layout=st.sampled_from(ExpertLayout),
    transposed=st.booleans(),
    rounded=st.booleans(),
    dtype=st.sampled_from(FLOATS),
    factors=st.sampled_from(FLOATS),
    out=st.sampled_from(FLOATS),
)


def operations(drawn: Drawn, folder: Path) -> dict[str, Op]:
    """Write the inputs into a file of `folder`, and return an operation of every class on them."""
    rng = np.random.default_rng(drawn.seed)
    height, width, first = drawn.height, drawn.width, drawn.first
    arrays: dict[str, Array] = {}

    def numbers(name: str, *shape: int, dtype: DType = drawn.factors) -> None:
        arrays[name] = rng.standard_normal(shape).astype(kernels.STORAGE[dtype])

    def factors(name: str, experts: int, rows: int, columns: int) -> None:
        inner, outer = (rows, columns) if drawn.transposed else (columns, rows)
        numbers(f"{name}.a", experts * drawn.rank, inner)
        numbers(f"{name}.b", outer, experts * drawn.rank)

    numbers("w", height, width, dtype=drawn.dtype)
    numbers("stack", drawn.experts, height, width, dtype=drawn.dtype)
    numbers("bias", height, dtype=drawn.dtype)
    numbers("magnitude", width if drawn.transposed else height)
    indices = tuple(int(row) for row in rng.permutation(height)[: max(1, height // 2)])
    numbers("rows", len(indices), width)
    for number in range(drawn.terms):
        factors(f"term {number}", 1, height + first, width)
        numbers(f"bias {number}", height)
    factors("experts", drawn.experts, height, width)
    write_weights(folder / "in.safetensors", arrays)
    held = read_single(folder / "in.safetensors").tensors
    w = held["w"]

    def term(name: str, experts: int = 1) -> LoraTerm:
        scaling = float(rng.choice([0.5, 2.0, 0.3, 1.7]))
        return LoraTerm(a=held[f"{name}.a"], b=held[f"{name}.b"], scaling=scaling, experts=experts, layout=drawn.layout)

    terms = tuple(replace(term(f"term {number}"), first=first) for number in range(drawn.terms))
    lora = LoraDelta(source=w, terms=terms, transposed=drawn.transposed, rounded=drawn.rounded)
    stack = LoraDelta(source=held["stack"], terms=(term("experts", drawn.experts),), transposed=drawn.transposed)
    dora = DoraDelta(source=w, term=terms[0], magnitude=held["magnitude"], transposed=drawn.transposed)
    replaced = ReplaceRows(source=w, rows=held["rows"], indices=indices)
    wide, tall = [held[f"term {number}.a"] for number in range(drawn.terms)], [w, *[w] * (drawn.terms - 1)]
    strided = Columns(tensor=w, count=(width + 1) // 2, scale=0.3, step=2)
    below = Mix(
        parts=tuple(wide), matrix=SmallMatrix.of(rng.standard_normal((drawn.terms * drawn.rank, 3))), below=True
    )
    mixed = Mix(parts=tuple(tall), matrix=SmallMatrix.of(rng.standard_normal((drawn.terms * width, 2))))
    biases = tuple(BiasTerm(bias=held[f"bias {number}"], scaling=1.5) for number in range(drawn.terms))
    return {
        "copy": Copy(source=w) if drawn.out is drawn.dtype else Cast(source=w),
        "cast": Cast(source=w),
        "lora": lora,
        "stack": Assemble(parts=stack.cut(0, drawn.experts * height)),
        "dora": dora,
        "bias": BiasDelta(source=held["bias"], terms=biases),
        "rows": replaced,
        "beside": Beside(parts=(strided, *(Columns(tensor=each, count=width) for each in tall)), zeros=2),
        "in turn": Beside(
            parts=tuple(Columns(tensor=each, count=width, scale=2.0) for each in tall), zeros=1, leading=3, in_turn=True
        ),
        "below": below,
        "mixed": mixed,
        "assembled": Assemble(parts=(Cast(source=w), lora, dora, replaced)),
    }


def planned(drawn: Drawn, ops: dict[str, Op], precision: Precision) -> Plan:
    steps = []
    for name, op in ops.items():
        shape = op.source.shape if isinstance(op, Assemble) else op.shape
        if isinstance(op, Assemble):
            shape = (sum(part.shape[0] for part in op.parts), *shape[1:])
        out = TensorSpec(name=name, dtype=drawn.out, shape=shape)
        steps.append(Step(out=out, op=op, action=TensorAction.MERGED, reason=str(op)))
    return Plan(
        shards=lay_out(steps, homes={}, max_shard_bytes=None),
        side_files=(),
        leftovers=(),
        inputs=(FileStamp.of(ops["lora"].source.path),),
        precision=precision,
        manifest={},
    )


@contextmanager
def cut_at(rows: int, block: int) -> Iterator[None]:
    """Cut the work into units of so many rows of the narrowest output, and blocks of about so many weights."""
    with ExitStack() as patched:
        patched.enter_context(mock.patch.object(units, "UNIT_WEIGHTS", rows))
        patched.enter_context(mock.patch.object(units, "COPY_BYTES", 8 * rows))
        patched.enter_context(mock.patch.multiple(numpy_backend, BLOCK_WEIGHTS=block, _LEAST_ROWS=1))
        patched.enter_context(mock.patch.object(kernels, "CACHE_BLOCK", block))
        yield


# W is rounded to BF16 before ΔW nearly cancels it, and DoRA scales what is left
CANCELLED = Drawn(
    seed=2395528446,
    height=5,
    width=5,
    rank=2,
    terms=1,
    experts=1,
    first=0,
    layout=ExpertLayout.GROUPED_BY_EXPERT,
    transposed=False,
    rounded=True,
    dtype=DType.F32,
    factors=DType.F32,
    out=DType.BF16,
)


@settings(max_examples=40)
@given(DRAWN, st.sampled_from(Precision), st.integers(1, 60), st.integers(1, 60))
@example(CANCELLED, Precision.PEFT, 60, 60)
def test_what_is_written_is_what_the_operation_means(drawn: Drawn, precision: Precision, unit: int, block: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ops = operations(drawn, Path(folder))
        plan = planned(drawn, ops, precision)
        with cut_at(unit, block):
            written = read_single(execute(plan, Path(folder) / "out") / "model.safetensors")
        for name, op in ops.items():
            values, at = load(written.tensors[name]), 0
            for part in row_ops(op):
                some = values[at : at + part.shape[0]]
                off = np.abs(some - part.reference(load))
                assert np.all(off <= off_by_at_most(part, some, drawn.out, precision)), (name, part)
                at += part.shape[0]
            assert at == len(values)
        # and the second formula says the same
        evidence = check_steps(plan.steps, written.tensors, level=Level.FULL, precision=precision)
        assert {name for name, found in evidence.items() if found.verdict is not Verdict.RIGHT} == set()
        assert all(found.compared == found.numel for found in evidence.values())


@settings(max_examples=40)
@given(DRAWN, st.data())
def test_the_rows_of_an_operation_mean_its_rows(drawn: Drawn, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for op in operations(drawn, Path(folder)).values():
            for part in row_ops(op):
                height = part.shape[0]
                start = data.draw(st.integers(0, height - 1))
                rows = data.draw(st.integers(1, height - start))
                if part.needs_all_rows:
                    start, rows = 0, height
                (some,) = part.cut(start, rows)
                found, expected = some.reference(load), part.reference(load)[start : start + rows]
                # the order in which a product is summed depends on its shape
                assert (
                    np.allclose(found, expected, rtol=0, atol=1e-13)
                    if isinstance(part, Mix)
                    else np.array_equal(found, expected)
                )
                assert all(inside(tensor, part.inputs) for tensor in some.inputs)


def inside(tensor: StoredTensor, wholes: tuple[StoredTensor, ...]) -> bool:
    """Return whether the tensor is some rows of one of those."""
    return any(
        tensor.name == whole.name and all(a.path == b.path for a, b in zip(tensor.spans, whole.spans, strict=False))
        for whole in wholes
    )


@pytest.mark.parametrize("init", ["pissa", "olora"])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_formula_of_an_init_is_that_of_the_second_formula(init: str, transposed: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    arrays = {"w": rng.standard_normal((9, 6)), "a": rng.standard_normal((2, 6)), "b": rng.standard_normal((9, 2))}
    if transposed:
        arrays["w"] = np.ascontiguousarray(arrays["w"].T)
    write_weights(tmp_path / "in.safetensors", arrays)
    held = read_single(tmp_path / "in.safetensors").tensors
    term = LoraTerm(a=held["a"], b=held["b"], scaling=0.5)
    op = LoraDelta(source=held["w"], terms=(term,), transposed=transposed, init=init)
    weight = arrays["w"].T if transposed else arrays["w"]
    gone = taken(init, weight, 2, 0.5)
    expected = weight - gone.left @ gone.right + 0.5 * arrays["b"] @ arrays["a"]
    assert np.allclose(op.reference(load), expected.T if transposed else expected, rtol=0, atol=1e-12)
    assert op.needs_all_rows
