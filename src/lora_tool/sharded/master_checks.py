"""LT414: masters against the 16-bit weights that were saved with them.

A sample of every rank's part is compared: it proves order, step and run of the ranks, where names and counters show
nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_tool.formats.files import open_regular, read_at
from lora_tool.report import Finding
from lora_tool.sharded.master_copies import SavedCopies
from lora_tool.tensors import DType

_SAMPLE = 1 << 14
"""Elements that are compared at the beginning of each rank's part of a tensor."""


def rounding_faults(saved: SavedCopies) -> Iterator[Finding]:
    """Yield LT414 for trained tensors whose masters do not round to the weights saved with them."""
    for name, copy in saved.copies.items():
        (whole,) = copy.spans
        size, done = copy.dtype.bits // 8, 0
        for span in saved.masters[name].spans:
            count = min(_SAMPLE, span.nbytes // 4)
            master = _read(span.path, span.offset, count * 4, "<f4")
            held = _read(whole.path, whole.offset + done // 4 * size, count * size, f"<u{size}")
            done += span.nbytes
            if not _rounds_to(master, held, copy.dtype):
                yield Finding(
                    code="LT414",
                    severity=saved.severity,
                    path=str(span.path),
                    subject=name,
                    message=f"does not round to the {copy.dtype} weights in {whole.path}: of another run or step",
                    hint="copy this rank's file again, or use another tag: --tag T",
                )
                break


def _read(path: Path, offset: int, nbytes: int, dtype: str) -> NDArray[Any]:
    with open_regular(path) as fd:
        return np.frombuffer(read_at(path, fd, offset, nbytes), dtype)


def _rounds_to(master: NDArray[Any], held: NDArray[Any], dtype: DType) -> bool:
    """Return whether `held`, the bits of values of `dtype`, are the float32 values `master`, rounded to nearest even."""
    if dtype is DType.F32:
        # also 16-bit weights that were widened when they were saved
        rounded = (master.view(np.uint32), _bfloat16(master).astype(np.uint32) << 16, _float16(master, np.float32))
        return any(np.array_equal(bits.view(np.uint32), held) for bits in rounded)
    if dtype is DType.BF16:
        return np.array_equal(_bfloat16(master), held)
    if dtype is DType.F16:
        return np.array_equal(_float16(master, np.float16).view(np.uint16), held)
    return True  # no type that weights are trained in: nothing is proven


def _bfloat16(values: NDArray[Any]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    with np.errstate(all="ignore"):
        return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _float16(values: NDArray[Any], out: type[np.floating[Any]]) -> NDArray[Any]:
    with np.errstate(all="ignore"):
        return values.astype(np.float16).astype(out)
