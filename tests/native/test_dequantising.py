"""Quantised weights have the bits of numpy when the kernel decodes them, whatever their format, size and place."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_tool.execution.native.dequantising import KernelArithmetic, arithmetic
from lora_tool.execution.native.library import VARIABLE, Kernel, kernel
from lora_tool.formats.quantised.decoding import Arithmetic, Scaled, decoded
from lora_tool.formats.quantised.encodings import dequantised
from lora_tool.formats.quantised.layouts import read_quantised
from lora_tool.tensors import StoredTensor
from lora_tool.verification.elements import Files
from tests.quantised_samples import config_of
from tests.unit.test_quantised_weights import NAMES, stored


@pytest.mark.parametrize("sample", NAMES)
def test_every_format_has_the_bits_of_numpy(sample: str, kernels: tuple[Kernel, ...]) -> None:
    (encoding,) = read_quantised(stored(sample), config_of(sample)).weights.values()
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


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 70), st.integers(1, 40), st.booleans(), st.booleans()
)
def test_codes_of_every_size_and_stride(
    kernels: tuple[Kernel, ...], seed: int, rows: int, columns: int, group: int, halves: bool, shared: bool
) -> None:
    random = np.random.default_rng(seed)
    group = 2 * group if halves else group
    width = -(-columns // 2) if halves else columns
    table = random.integers(0, 2**32, (256, 1 + halves), dtype=np.uint32).view(np.float32)  # of all kinds, NaN too
    part = Scaled(
        codes=random.integers(0, 256, (rows, width + 3), dtype=np.uint8)[:, 1 : 1 + width],
        table=table,
        scales=random.standard_normal((1 if shared else rows, -(-columns // group)), np.float32),
        group=group,
        columns=columns,
        again=np.float32(random.choice([1, 1 / 127])),
    )
    expected = np.empty((rows, columns), np.float32)
    with np.errstate(all="ignore"):
        Arithmetic().scale(part, expected)
    for one in kernels:
        found = np.empty_like(expected)
        KernelArithmetic(one).scale(part, found)
        np.testing.assert_array_equal(found, expected)
        assert np.array_equal(np.signbit(found), np.signbit(expected)) or np.isnan(expected).any()


def test_without_the_kernel_numpy_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(arithmetic(), KernelArithmetic) == (kernel() is not None)
    monkeypatch.setenv(VARIABLE, "off")
    assert type(arithmetic()) is Arithmetic
