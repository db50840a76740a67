"""The arithmetic against torch, on bit patterns, and against fractions."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tool.core.tensors import DType
from lora_tool.execution.kernels import (
    STORAGE,
    exact_product,
    is_small,
    overflows,
    round_to,
    round_to_odd,
    slices,
    sums_of_squares,
)

Array = np.ndarray[Any, Any]
TORCH = {DType.BF16: torch.bfloat16, DType.F16: torch.float16, DType.F32: torch.float32}
SPREAD = np.arange(0, 2**32, 4093, dtype=np.uint64).astype(np.uint32)
"""About a million bit patterns over all of float32."""
EDGES = np.array(
    [
        (high << 16) + low
        for high in (*range(0x80), 0x3F80, 0x3F81, 0x477F, 0x4780, 0x7F7F, 0x7F80, 0x7F81, 0x7FFF)
        for low in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    ],
    dtype=np.uint32,
)
"""Around zero, the subnormals, ties, the largest numbers, infinity and NaN."""


def rounded(values: Array, dtype: DType) -> Array:
    return round_to(values, dtype, np.empty(values.shape, STORAGE[dtype]))


def assert_same_numbers(ours: Array, theirs: Array) -> None:
    """Bit for bit, except that a NaN is any NaN."""
    nan = np.isnan(theirs.astype(np.float64))
    assert np.array_equal(np.isnan(ours.astype(np.float64)), nan)
    assert ours[~nan].tobytes() == theirs[~nan].tobytes()


def torch_rounded(values: Array, dtype: DType) -> Array:
    raw = torch.from_numpy(values).to(TORCH[dtype]).contiguous().view(torch.uint8).numpy()
    return np.asarray(raw.view(STORAGE[dtype]))


@np.errstate(all="ignore")
def test_rounding_float32_is_torchs_over_all_of_its_range() -> None:
    patterns = np.concatenate([SPREAD, EDGES, EDGES | np.uint32(1 << 31)])
    values = patterns.view(np.float32)
    for dtype in (DType.BF16, DType.F16, DType.F32):
        assert_same_numbers(rounded(values, dtype), torch_rounded(values, dtype))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
@np.errstate(all="ignore")
def test_rounding_any_float32_is_torchs(patterns: list[int]) -> None:
    values = np.array(patterns, np.uint32).view(np.float32)
    for dtype in (DType.BF16, DType.F16):
        assert_same_numbers(rounded(values, dtype), torch_rounded(values, dtype))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=20))
@np.errstate(all="ignore")
def test_rounding_float64_to_bfloat16_is_the_nearest_by_fractions(numbers: list[float]) -> None:
    near_ties = [tie + sign * 2.0**-40 * abs(tie) for tie in ties(numbers) for sign in (-1, 0, 1)]
    values = np.array([*numbers, *near_ties])
    for value, got in zip(values, rounded(values, DType.BF16), strict=True):
        assert_nearest_bfloat16(float(value), got)


def ties(numbers: list[float]) -> list[float]:
    """Return numbers half way between two bfloat16 neighbours, near the given ones."""
    with np.errstate(all="ignore"):
        low = np.array(numbers).astype(ml_dtypes.bfloat16).astype(np.float64)
    high = np.nextafter(low.astype(ml_dtypes.bfloat16), ml_dtypes.bfloat16(np.inf)).astype(np.float64)
    return [(a + b) / 2 for a, b in zip(low.tolist(), high.tolist(), strict=True) if np.isfinite(a) and np.isfinite(b)]


def assert_nearest_bfloat16(value: float, got: Any) -> None:
    largest = Fraction(255 * 2**120)  # bfloat16's
    if abs(Fraction(value)) >= largest + Fraction(2) ** 119:
        assert np.isinf(float(got))
        assert np.sign(float(got)) == np.sign(value)
        return
    assert np.isfinite(float(got))
    here = abs(Fraction(float(got)) - Fraction(value))
    for towards in (np.inf, -np.inf):
        neighbour = float(np.nextafter(got, ml_dtypes.bfloat16(towards)))
        if np.isinf(neighbour):
            continue
        there = abs(Fraction(neighbour) - Fraction(value))
        assert here < there or (here == there and not int(got.view(np.uint16)) & 1)


LARGEST = float(np.finfo(np.float32).max)


@given(st.lists(st.floats(-LARGEST, LARGEST), min_size=1, max_size=50))
def test_rounding_to_odd_keeps_exact_values_and_gives_an_odd_neighbour_of_the_others(numbers: list[float]) -> None:
    for value, got in zip(numbers, round_to_odd(np.array(numbers)), strict=True):
        if float(np.float32(value)) == value:
            assert float(got) == value
        else:
            assert int(got.view(np.uint32)) & 1
            inner = float(np.nextafter(got, np.float32(0)))
            gap = abs(Fraction(float(got)) - Fraction(inner))
            assert abs(Fraction(float(got)) - Fraction(value)) < gap


@np.errstate(all="ignore")
def test_rounding_to_odd_keeps_what_is_not_finite() -> None:
    kept = round_to_odd(np.array([np.inf, -np.inf, np.nan, 1e300]))
    assert kept[:2].tolist() == [np.inf, -np.inf]
    assert np.isnan(kept[2])
    assert np.isinf(kept[3])


factors = st.tuples(
    st.integers(1, 9), st.integers(1, 300), st.integers(1, 9), st.integers(0, 2**32 - 1), st.integers(-30, 30)
)


@given(factors)
def test_exact_product_does_not_depend_on_the_order_of_summation(sizes: tuple[int, int, int, int, int]) -> None:
    b, a, rng = drawn(sizes)
    order = rng.permutation(b.shape[1])
    straight = exact_product(slices(b, axis=1), slices(a, axis=0))
    shuffled = exact_product(slices(b[:, order], axis=1), slices(a[order], axis=0))
    by_rows = np.vstack([exact_product(slices(row[None], axis=1), slices(a, axis=0)) for row in b])
    assert straight.tobytes() == shuffled.tobytes() == by_rows.tobytes()


@settings(max_examples=40)
@given(factors)
def test_exact_product_is_accurate(sizes: tuple[int, int, int, int, int]) -> None:
    b, a, _ = drawn(sizes)
    got = exact_product(slices(b, axis=1), slices(a, axis=0))
    bound = 2.0**-38 * b.shape[1] * np.abs(b).max(axis=1, keepdims=True) * np.abs(a).max(axis=0, keepdims=True)
    assert np.all(np.abs(got - exact(b, a)) <= bound + 1e-300)


def drawn(sizes: tuple[int, int, int, int, int]) -> tuple[Array, Array, np.random.Generator]:
    rows, inner, columns, seed, exponent = sizes
    rng = np.random.default_rng(seed)
    b = rng.standard_normal((rows, inner)).astype(np.float32).astype(np.float64)
    a = rng.standard_normal((inner, columns)).astype(np.float32).astype(np.float64) * 2.0**exponent
    return b, a, rng


def exact(b: Array, a: Array) -> Array:
    columns = a.T.tolist()
    return np.array(
        [
            [float(sum(Fraction(x) * Fraction(y) for x, y in zip(row, column, strict=True))) for column in columns]
            for row in b.tolist()
        ]
    )


@given(st.lists(st.floats(width=32), max_size=30))
@np.errstate(all="ignore")
def test_what_is_called_small_is_finite_in_every_type_but_float16(numbers: list[float]) -> None:
    for dtype in (np.float32, np.float64):
        values = np.array(numbers, dtype=dtype)
        if is_small(values):
            assert np.isfinite(values).all()
            assert not overflows(values, rounded(values, DType.BF16))
        else:
            assert not (np.abs(values) < 2.0**60).all()


@given(st.lists(st.floats(width=32), min_size=1, max_size=30))
@np.errstate(all="ignore")
def test_overflow_is_an_infinity_that_was_none(numbers: list[float]) -> None:
    values = np.array(numbers, np.float32)
    result = rounded(values, DType.F16)
    assert overflows(values, result) == any(np.isfinite(x) and abs(x) >= 65520 for x in numbers)


@settings(max_examples=50)
@given(shape=st.tuples(st.integers(0, 40), st.integers(0, 40)), axis=st.integers(0, 1), seed=st.integers(0, 2**32 - 1))
def test_sums_of_squares_are_those_of_a_loop_in_pairs(shape: tuple[int, int], axis: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal(shape)
    found = sums_of_squares(values, axis=axis)
    assert found.tobytes() == np.array([_in_pairs(line.tolist()) for line in (values if axis else values.T)]).tobytes()
    exact = [
        float(sum((Fraction(v) ** 2 for v in line), Fraction())) for line in (values if axis else values.T).tolist()
    ]
    assert np.allclose(found, exact, rtol=1e-15, atol=0)


def _in_pairs(numbers: list[float]) -> float:
    """Add the squares as `sums_of_squares` says it does, one rounding of Python's at a time."""
    parts = [number * number for number in numbers]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [a + b for a, b in zip(parts[:half], parts[-half:], strict=True)] + parts[half : len(parts) - half]
    return parts[0] if parts else 0.0
