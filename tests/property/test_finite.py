"""The check of values without numpy, against numpy on every kind of bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_tool.checkpoints.states.file_values import _is_finite
from lora_tool.core.tensors import DType

_TORCH = {DType.BF16: torch.bfloat16, DType.F16: torch.float16, DType.F32: torch.float32, DType.F64: torch.float64}


@pytest.mark.parametrize("dtype", _TORCH)
@given(
    words=st.lists(
        st.sampled_from([0x0000, 0x3F80, 0x7BFF, 0x7C00, 0x7F7F, 0x7F80, 0x7FEF, 0x7FF0, 0xFF80, 0xFFFF])
        | st.integers(0, 0xFFFF),
        min_size=4,
        max_size=40,
    ),
    before=st.integers(0, 3),
)
def test_finite_as_torch_sees_it(dtype: DType, words: list[int], before: int) -> None:
    size = dtype.bits // 8
    data = np.array(words, "<u2").tobytes()
    data = data[: len(data) // size * size]
    seen = torch.frombuffer(bytearray(data), dtype=_TORCH[dtype])
    block = bytearray(b"\xff" * before * size + data + b"\xff" * size)  # what is around is not looked at
    expected = bool(seen.isfinite().all())
    assert _is_finite(block, before * size, before * size + len(data), dtype) is expected
