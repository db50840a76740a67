"""Steps on parameters in memory become steps on the tensors on disk whose rows they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.tensors import DType, Span, StoredTensor, TensorAction, TensorSpec, contiguous
from lora_tool.models.mapping.model import RowMapping, RowSlice
from lora_tool.plans.core.operation import LoraTerm
from lora_tool.plans.core.ops import Assemble, Copy, LoraDelta, ReplaceRows
from lora_tool.plans.core.steps import Step
from lora_tool.plans.merge.fused.split_steps import cut, disk_steps

FILE = Path("model.safetensors")


def stored(name: str, *shape: int, offset: int = 0, dtype: DType = DType.F32) -> StoredTensor:
    spec = TensorSpec(name=name, dtype=dtype, shape=shape)
    return StoredTensor(spec=spec, spans=(Span(path=FILE, offset=offset, nbytes=spec.nbytes),))


def copied(tensor: StoredTensor) -> Step:
    return Step(out=tensor.spec, op=Copy(source=tensor), action=TensorAction.COPIED, reason="as in the base")


def merged(tensor: StoredTensor, *, experts: int = 1) -> Step:
    rows, columns = tensor.shape[-2:]
    a, b = stored("A", 2 * experts, columns), stored("B", rows, 2 * experts)
    op = LoraDelta(source=tensor, terms=(LoraTerm(a=a, b=b, scaling=1.0, experts=experts),))
    return Step(out=tensor.spec, op=op, action=TensorAction.MERGED, reason="LoRA")


def rows(name: str, start: int, count: int) -> RowSlice:
    return RowSlice(name=name, start=start, rows=count)


def made_of(*pieces: RowSlice, columns: int = 4) -> RowMapping:
    count = sum(piece.rows for piece in pieces)
    return RowMapping(shape=(count, columns), pieces=pieces, sources=tuple(piece.name for piece in pieces))


def test_neighbouring_spans_of_a_file_are_one() -> None:
    spans = [
        Span(path=FILE, offset=0, nbytes=8),
        Span(path=FILE, offset=8, nbytes=8),
        Span(path=FILE, offset=20, nbytes=4),
    ]
    assert contiguous(spans) == (Span(path=FILE, offset=0, nbytes=16), spans[2])


def test_rows_of_a_copy_are_its_bytes() -> None:
    (part,) = cut(copied(stored("w", 6, 4)), 2, 3)
    assert part == Copy(
        source=StoredTensor(spec=TensorSpec(name="w", dtype=DType.F32, shape=(3, 4)), spans=part.source.spans)
    )
    assert part.source.spans == (Span(path=FILE, offset=2 * 16, nbytes=3 * 16),)


def test_rows_of_a_delta_know_which_they_are() -> None:
    (part,) = cut(merged(stored("w", 6, 4)), 2, 3)
    assert isinstance(part, LoraDelta)
    assert (part.terms[0].first, part.source.shape) == (2, (3, 4))


def test_rows_of_a_stack_are_one_delta_per_expert() -> None:
    parts = cut(merged(stored("stack", 3, 4, 5), experts=3), 2, 8)
    found = [(p.terms[0].expert, p.terms[0].first, p.source.shape[0]) for p in parts if isinstance(p, LoraDelta)]
    assert found == [(0, 2, 2), (1, 0, 4), (2, 0, 2)]


def test_trained_rows_stay_with_the_part_that_has_them() -> None:
    tensor = stored("w", 6, 4)
    op = ReplaceRows(source=tensor, rows=stored("rows", 2, 4), indices=(1, 4))
    step = Step(out=tensor.spec, op=op, action=TensorAction.MERGED, reason="2 rows")
    assert isinstance(cut(step, 2, 2)[0], Copy)
    (part,) = cut(step, 3, 3)
    assert isinstance(part, ReplaceRows)
    assert (part.indices, part.rows.spans[0].offset) == ((1,), 16)


def test_a_fused_parameter_is_split_into_the_tensors_that_it_was_made_of() -> None:
    q, k = stored("q", 4, 4), stored("k", 2, 4, offset=64)
    fused = StoredTensor(
        spec=TensorSpec(name="qk", dtype=DType.F32, shape=(6, 4)), spans=contiguous((*q.spans, *k.spans))
    )
    written = {"q": made_of(rows("qk", 0, 4)), "k": made_of(rows("qk", 4, 2))}
    found = {step.out.name: step for step in disk_steps({"qk": merged(fused)}, written, {"q": q, "k": k})}
    assert [(name, step.op.source) for name, step in found.items()] == [("q", q), ("k", k)]
    assert [op.terms[0].first for step in found.values() if isinstance(op := step.op, LoraDelta)] == [0, 4]


def test_a_tensor_of_several_parameters_is_assembled_and_its_copies_are_one() -> None:
    packed = stored("packed", 9, 4)
    q, k, v = (
        StoredTensor(spec=TensorSpec(name=name, dtype=DType.F32, shape=(3, 4)), spans=tuple(packed.part(at * 48, 48)))
        for at, name in enumerate("qkv")
    )
    written = {"packed": made_of(*(rows(name, 0, 3) for name in "qkv"))}
    (step,) = disk_steps({"q": merged(q), "k": copied(k), "v": copied(v)}, written, {"packed": packed})
    assert isinstance(step.op, Assemble)
    assert [(type(part), part.source.shape) for part in step.op.parts] == [(LoraDelta, (3, 4)), (Copy, (6, 4))]
    assert (step.out.shape, step.action, step.reason) == ((9, 4), TensorAction.MERGED, "LoRA")
    (untouched,) = disk_steps({"q": copied(q), "k": copied(k), "v": copied(v)}, written, {"packed": packed})
    assert untouched.op == Copy(source=packed)


def test_a_renamed_parameter_goes_back_to_its_name() -> None:
    old = stored("old.gamma", 4)
    named = StoredTensor(spec=TensorSpec(name="new.weight", dtype=DType.F32, shape=(4,)), spans=old.spans)
    written = {"old.gamma": RowMapping(shape=(4,), pieces=(rows("new.weight", 0, 4),), sources=("new.weight",))}
    (step,) = disk_steps({"new.weight": copied(named)}, written, {"old.gamma": old})
    assert step == copied(old)


def test_parts_of_different_types_are_refused() -> None:
    steps = {"q": copied(stored("q", 3, 4)), "k": copied(stored("k", 3, 4, dtype=DType.F16))}
    with pytest.raises(UnsupportedAdapter, match="tensors with different dtypes"):
        list(disk_steps(steps, {"packed": made_of(rows("q", 0, 3), rows("k", 0, 3))}, {}))
