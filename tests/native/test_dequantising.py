"""Codes become the numbers of numpy, and numbers its codes, when the kernel makes them: whatever their format and size."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tool.core.tensors import DType, StoredTensor
from lora_tool.formats.quantised.decoding import Arithmetic, decoded
from lora_tool.formats.quantised.encodings import dequantised
from lora_tool.formats.quantised.grids import grid_of
from lora_tool.formats.quantised.requantising import Rounding, Scales
from lora_tool.native.library import VARIABLE, Kernel, kernel
from lora_tool.native.quantised import KernelArithmetic, KernelRounding, arithmetic
from lora_tool.verification.elements import Files
from tests.native.coded_cases import CodedCase, coded_cases, weight_of
from tests.unit.test_quantised_weights import NAMES, encoding_in


@pytest.mark.parametrize("sample", NAMES)
def test_every_format_has_the_bits_of_numpy(sample: str, kernels: tuple[Kernel, ...]) -> None:
    encoding = encoding_in(sample)
    rows = dequantised(encoding).shape[0]
    with Files() as files:

        def read(tensor: StoredTensor, start: int, nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
            return files.read(tensor, start, nbytes)

        for first, last in ((0, rows), (1, 3), (rows - 1, rows)):
            expected = decoded(encoding, first, last, read)
            for one in kernels:
                found = decoded(encoding, first, last, read, KernelArithmetic(one))
                assert (found.dtype, found.shape, found.tobytes()) == (
                    expected.dtype,
                    expected.shape,
                    expected.tobytes(),
                )


@settings(max_examples=80)
@given(coded_cases())
def test_codes_of_every_size_and_place(kernels: tuple[Kernel, ...], case: CodedCase) -> None:
    expected = case.numbers()
    for one in kernels:
        found = np.empty_like(expected)
        KernelArithmetic(one).scale(case.part, found)
        assert found.tobytes() == expected.tobytes()


@settings(max_examples=80)
@given(coded_cases())
def test_what_is_added_to_codes_is_added_to_their_numbers(kernels: tuple[Kernel, ...], case: CodedCase) -> None:
    for one in kernels:
        case.assert_right(*case.run(one))


@settings(max_examples=80)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 70), st.integers(1, 20), st.integers(1, 40),
    st.sampled_from([DType.F8_E4M3, DType.I8, None]),
)  # fmt: skip
def test_numbers_become_the_codes_of_numpy(
    kernels: tuple[Kernel, ...], seed: int, rows: int, columns: int, tall: int, wide: int, dtype: DType | None
) -> None:
    random = np.random.default_rng(seed)
    encoding = weight_of(rows, columns, (min(tall, rows), min(wide, columns)), dtype)
    grid = grid_of(encoding)
    first = int(random.integers(0, rows))
    of = grid.scales_at(first), grid.scales_at(rows - 1) + 1
    stored = np.abs(random.standard_normal((of[1] - of[0], grid.across), np.float32)) + np.float32(0.01)
    stored[random.random(stored.shape) < 0.1] = 0
    # the grid's own numbers, what lies in the middle between two, and what no code reaches
    values = random.integers(-1024, 1025, (rows - first, columns)).astype(np.float32) * np.float32(2.0) ** (
        random.integers(-12, 1, (rows - first, columns)).astype(np.float32)
    )
    expected = (
        Rounding().extremes(encoding, values, first, of),
        Rounding().codes(encoding, values.copy(), Scales(stored), first, of[0]),
    )
    for one in kernels:
        rounding = KernelRounding(one)
        low, high = rounding.extremes(encoding, values, first, of)
        assert np.array_equal(low, expected[0][0])
        assert np.array_equal(high, expected[0][1])
        codes = rounding.codes(encoding, values.copy(), Scales(stored), first, of[0])
        assert (codes.dtype, codes.tobytes()) == (expected[1].dtype, expected[1].tobytes())


def test_every_code_and_every_tie_of_e4m3_with_every_scale(kernels: tuple[Kernel, ...]) -> None:
    # the kernel does not divide
    random = np.random.default_rng(0)
    scales = np.exp2(random.uniform(-75, 75, (512, 1))).astype(np.float32)
    scales[::9] *= -1
    scales[0] = 1
    numbers = np.sort(np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    ties = np.concatenate([numbers, (numbers[1:] + numbers[:-1]) / 2]) * scales
    near = [ties, *(np.nextafter(ties, np.float32(side)) for side in (-np.inf, np.inf)), np.zeros_like(ties)]
    values = np.concatenate([*near, *(-each for each in near)], axis=1)
    rows, columns = values.shape
    encoding = weight_of(rows, columns, (1, columns), DType.F8_E4M3)
    expected = Rounding().codes(encoding, values.copy(), Scales(scales), 0, 0)
    assert expected[0].tobytes() == values[0].astype(ml_dtypes.float8_e4m3fn).tobytes()
    for one in kernels:
        assert KernelRounding(one).codes(encoding, values.copy(), Scales(scales), 0, 0).tobytes() == expected.tobytes()


def test_without_the_kernel_numpy_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(arithmetic(), KernelArithmetic) == (kernel() is not None)
    monkeypatch.setenv(VARIABLE, "off")
    assert type(arithmetic()) is Arithmetic
