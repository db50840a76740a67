"""Every level gives the bits of the definition, for every type, size and place; what is not finite is flagged."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tool.core.tensors import DType
from lora_tool.native.library import CHECKSUM, TYPES, Kernel, checksum, trial
from tests.native.cases import KINDS, Array, Case, Factor, assert_right, drawn_case, fma, numbers

TYPE = st.sampled_from(list(TYPES))
CASES = st.builds(
    drawn_case,
    st.integers(0, 2**32 - 1),
    size=st.tuples(st.integers(1, 40), st.integers(1, 70)),
    ranks=st.lists(st.integers(0, 40), min_size=0, max_size=3).map(tuple),
    kind=st.sampled_from(KINDS),
    types=st.tuples(TYPE, TYPE, TYPE),
)


@settings(max_examples=150)
@given(CASES)
def test_every_level_has_the_bits_of_the_definition(kernels: tuple[Kernel, ...], case: Case) -> None:
    for kernel in kernels:
        assert_right(case, *case.run(kernel))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("types", list(itertools.product(TYPES, TYPES)), ids=lambda types: "-".join(map(str, types)))
def test_every_type_becomes_every_type(kernels: tuple[Kernel, ...], types: tuple[DType, DType], kind: str) -> None:
    source, out = types
    for ranks in (), (3,), (2, 5):
        case = drawn_case(7, size=(25, 65), ranks=ranks, kind=kind, types=(source, DType.F32, out))
        for kernel in kernels:
            assert_right(case, *case.run(kernel))


def test_more_columns_than_the_cache_holds_are_done_in_parts(kernels: tuple[Kernel, ...]) -> None:
    case = drawn_case(3, size=(13, 700), ranks=(300,), kind="plain", types=(DType.BF16, DType.F32, DType.BF16))
    for kernel in kernels:
        assert_right(case, *case.run(kernel))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["W", "B", "A"])
def test_one_value_that_is_not_finite_is_flagged_wherever_it_is(
    kernels: tuple[Kernel, ...], wrong: float, where: str
) -> None:
    for at, kernel in itertools.product(range(0, 77, 19), kernels):
        case = drawn_case(at, size=(7, 11), ranks=(11,), kind="plain", types=(DType.BF16, DType.F32, DType.BF16))
        ((left, right, _),) = case.terms
        assert case.run(kernel)[1]
        # some elements of a factor's memory lie between those that count
        memory = {"W": case.source.reshape(-1), "B": left.memory, "A": right.memory}[where]
        memory[at % len(memory)] = wrong
        assert case.run(kernel)[1] == case.expected()[1]


@pytest.mark.parametrize(
    ("dtype", "largest", "half_a_place"),
    [(DType.BF16, 255 * 2.0**120, 2.0**119), (DType.F16, 65504.0, 16.0)],
    ids=str,
)
def test_what_rounds_to_infinity_is_flagged_and_no_less(
    kernels: tuple[Kernel, ...], dtype: DType, largest: float, half_a_place: float
) -> None:
    edge = np.float32(largest + half_a_place)
    values = np.array([[largest, np.nextafter(edge, np.float32(0)), edge]], np.float32)
    for kernel in kernels:
        for column, fine in enumerate((True, True, False)):
            case = Case(values[:, column : column + 1], DType.F32, dtype, ())
            assert_right(case, *case.run(kernel))
            assert case.run(kernel)[1] == fine


def test_no_mode_of_another_library_changes_a_bit(kernels: tuple[Kernel, ...]) -> None:
    case = drawn_case(5, size=(13, 37), ranks=(9,), kind="subnormal", types=(DType.F32, DType.F32, DType.F32))
    subnormal = case.expected()[0]
    assert np.any((subnormal != 0) & (np.abs(subnormal) < np.finfo(np.float32).tiny))
    if not torch.set_flush_denormal(True):
        pytest.skip("torch cannot flush subnormal numbers on this processor")
    try:
        found = [case.run(kernel)[0].tobytes() for kernel in kernels]
        kept = torch.tensor([1e-40]) * 1.0
    finally:
        torch.set_flush_denormal(False)
    assert set(found) == {subnormal.tobytes()}
    assert kept.item() == 0, "the mode that was set before is set again"


def test_the_trial_of_loading_has_the_sum_of_the_definition(kernels: tuple[Kernel, ...]) -> None:
    assert {checksum(kernel) for kernel in kernels} == {CHECKSUM}
    b, a, bits = trial()
    weights = np.array(bits, np.uint16)
    assert np.isfinite((weights.astype(np.uint32) << 16).view(np.float32)).all()
    assert (len(b), len(a), len(bits)) == (13 * 5, 37 * 5, 13 * 37)


PATTERNS = st.lists(st.integers(0, 2**32 - 1), min_size=3, max_size=3)


@given(st.one_of(PATTERNS, st.builds(lambda seed: list(near_tie(seed)), st.integers(0, 2**32 - 1))))
def test_the_cases_own_fma_is_that_of_fractions(patterns: list[int]) -> None:
    values = np.array(patterns, np.uint32).view(np.float32)
    if not np.isfinite(values).all():
        return
    x, y, z = values.tolist()
    with np.errstate(all="ignore"):
        (found,) = fma(values[:1], values[1:2], values[2:])
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    assert float(found) == nearest(exact)


def near_tie(seed: int) -> Array:
    """Return x, y, z with x·y + z near the middle of two float32 neighbours."""
    rng = np.random.default_rng(seed)
    x, y = numbers(rng, 2, "ties", DType.F32)
    z = np.float32(x * y * 2.0 ** int(rng.integers(-30, 30)))
    return np.array([x, y, z], np.float32).view(np.uint32)


def nearest(exact: Fraction) -> float:
    """Return the float32 that is nearest, the even one of two, infinity beyond them."""
    if exact == 0:
        return 0.0
    place = max(exact.numerator.bit_length() - exact.denominator.bit_length() - 24, -149)
    while place > -149 and abs(exact) < Fraction(2) ** (place + 23):
        place -= 1
    while abs(exact) >= Fraction(2) ** (place + 24):
        place += 1
    rounded = round(exact / Fraction(2) ** place) * Fraction(2) ** place
    return float(rounded) if abs(rounded) < 2**128 else float("inf") * (1 if rounded > 0 else -1)


def test_factors_are_read_in_any_order_of_memory(kernels: tuple[Kernel, ...]) -> None:
    straight = np.arange(12, dtype=np.float32).reshape(4, 3)
    one, other = (
        Factor(straight.reshape(-1), DType.F32, (4, 3), (3, 1)),
        Factor(straight.T.reshape(-1), DType.F32, (4, 3), (1, 4)),
    )
    assert np.array_equal(one.values, straight)
    assert np.array_equal(other.values, straight)
    for kernel in kernels:
        results = [
            Case(np.zeros((4, 4), np.float32), DType.F32, DType.F32, ((factor, one, 1.0),)).run(kernel)[0]
            for factor in (one, other)
        ]
        assert np.array_equal(results[0], straight @ straight.T)
        assert np.array_equal(results[1], straight @ straight.T)


def test_bytes_are_written_some_at_a_time_until_the_system_refuses(kernels: tuple[Kernel, ...], tmp_path: Path) -> None:
    data = np.random.default_rng(0).bytes(1000)
    held, path = np.frombuffer(data, np.uint8), tmp_path / "file"
    path.write_bytes(b"before")
    with path.open("r+b") as file:
        assert kernels[0].write(file.fileno(), held.ctypes.data, 1000, 3, 64) == 1000
    assert path.read_bytes() == b"bef" + data
    with path.open("rb") as file:
        assert kernels[0].write(file.fileno(), held.ctypes.data, 1000, 3, 64) == 0
