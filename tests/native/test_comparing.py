"""The kernel's comparison sees at every level what numpy sees, and a value beyond its bound is found wherever it is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from lora_tool.core.tensors import DType
from lora_tool.native.library import COMPARABLE, COMPARED, Kernel
from lora_tool.verification import counting
from lora_tool.verification.bounds import Bound
from lora_tool.verification.counting import tally_of
from lora_tool.verification.pieces import Tally
from lora_tool.verification.recompute import Recomputed

SPECIAL = (0, 0x8000, 1, 0x8001, 0x7C00, 0xFC00, 0x7E00, 0x7F80, 0xFF80, 0x7FC0, 0x3F80, 0x0080)
EXACT = ("compared", "outside", "wrong", "first", "moved")
SUMS = ("error_squares", "change_squares", "moved_squares", "dot")
SINGLE = np.dtype(np.float32)


def seen(
    kernel: Kernel | None, types: tuple[DType, DType], bits: NDArray[np.uint16], monkeypatch: pytest.MonkeyPatch
) -> Tally:
    """Return the tally of two rows of elements against others and a change."""
    monkeypatch.setattr(counting, "any_kernel", lambda: kernel)
    stored, base = bits.reshape(2, 2, -1)
    change = np.random.default_rng(1).normal(0, 1e-3, base.shape)
    expected = Recomputed(base, change, lambda rows, _: np.zeros(rows.shape), stored_as=types[1])
    with np.errstate(all="ignore"):
        return tally_of(stored.reshape(-1).view(np.uint8), types[0], expected, [Bound(of_result=1.0)], SINGLE)


@pytest.mark.parametrize("types", list(itertools.product(COMPARABLE, COMPARABLE)), ids="-".join)
@pytest.mark.parametrize("width", [4, 12, 8 * 200])
def test_every_level_sees_what_numpy_sees(
    kernels: tuple[Kernel, ...], types: tuple[DType, DType], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bits = np.random.default_rng(width).integers(0, 1 << 16, 4 * width, dtype=np.uint16)
    plain = bits & np.uint16(0xBFFF)  # nothing above 2
    special = plain.copy()
    special[::7] = np.resize(np.array(SPECIAL, np.uint16), len(special[::7]))
    for elements, kernel in itertools.product((plain, special, bits), kernels):
        wanted, found = (seen(one, types, elements, monkeypatch) for one in (None, kernel))
        assert [getattr(found, name) for name in EXACT] == [getattr(wanted, name) for name in EXACT]
        np.testing.assert_equal(found.ulps, wanted.ulps)
        if elements is plain:  # float32 has room for the sums
            assert [getattr(found, name) for name in SUMS] == pytest.approx(
                [getattr(wanted, name) for name in SUMS], 1e-5
            )


def test_one_value_beyond_its_bound_is_found_wherever_it_is(
    kernels: tuple[Kernel, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 2 * COMPARED + 16
    base = np.full((2, size // 2), 0x3F80, np.uint16)
    for kernel, at in itertools.product(kernels, (0, 7, COMPARED - 1, COMPARED, size - 1)):
        monkeypatch.setattr(counting, "any_kernel", lambda kernel=kernel: kernel)
        stored = base.reshape(-1).copy()
        stored[at] = 0x3F84
        expected = Recomputed(base, np.zeros(base.shape), lambda rows, _: np.zeros(rows.shape), stored_as=DType.BF16)
        tally = tally_of(stored.view(np.uint8), DType.BF16, expected, [Bound(of_result=1.0)], SINGLE)
        assert (tally.first, tally.outside, tally.wrong, tally.moved) == (at, 1, 1, True)
