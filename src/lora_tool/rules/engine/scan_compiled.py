"""The scan of weights by the compiled kernel, which needs no numpy and gives the interpreter's lock away."""

from __future__ import annotations

import threading

from lora_tool.core.tensors import StoredTensor
from lora_tool.native.library import Kernel, Seen
from lora_tool.rules.engine.scan_model import LAYOUTS, NOT_FINITE, Opener, WeightScan, magnitude

_CALL_BYTES = 8 << 20
"""Scanned in one call: a run that fails waits for it."""


def scan_compiled(kernel: Kernel, tensor: StoredTensor, opened: Opener, stopped: threading.Event) -> WeightScan | None:
    """Return the scan of the tensor's values; None where one may be NaN or infinite, or not all could be read."""
    layout, mask = LAYOUTS.get(tensor.dtype), magnitude(tensor.dtype)
    width, seen = layout.nbytes if layout else 1, list[Seen]()
    for span in tensor.spans:
        with opened(span.path) as file:
            for at in range(0, span.nbytes, _CALL_BYTES):
                nbytes = min(_CALL_BYTES, span.nbytes - at)
                found = None if stopped.is_set() else kernel.scan(file, span.offset + at, nbytes, width, mask)
                if found is None:
                    return None
                seen.append(found)
    largest = max((each.largest for each in seen), default=0)
    if layout is None:
        code = min(NOT_FINITE.get(tensor.dtype, b""), default=None)
        return WeightScan(all_zero=bool(seen) and largest == 0) if code is None or largest < code else None
    if largest >= layout.infinity:
        return None
    zero = tensor.spec.numel > 0 and largest == 0
    same = tensor.spec.numel > 1 and all(not each.differing and each.first == seen[0].first for each in seen)
    return WeightScan(
        all_zero=zero, constant=same and not zero, largest=layout.number(largest) if largest >= layout.large else 0.0
    )
