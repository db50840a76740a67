"""Scanning many tensors in threads: reading from the disk and looking at values overlap."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from lora_tool.core.batches import batches_of_bytes
from lora_tool.core.tensors import StoredTensor, TensorTable
from lora_tool.rules.engine.scan_model import WeightScan, scan_workers

ScanSome = Callable[[Sequence[StoredTensor], threading.Event], list[WeightScan]]
"""Scans tensors one after the other, until the event is set: then its results are not used."""

_TASK_BYTES = 8 << 20


def scan_in_threads(
    tensors: TensorTable, scan_some: ScanSome, *, progress: Callable[[int], None] | None = None
) -> dict[str, WeightScan]:
    """Return the scan of each tensor by name. Raises what `scan_some` raises, for the first tensor that fails."""
    found = {}
    stopped = threading.Event()
    together = tuple(batches_of_bytes(tensors.values(), _TASK_BYTES))
    with ThreadPoolExecutor(scan_workers()) as pool:
        try:
            for some, scans in zip(together, pool.map(scan_some, together, [stopped] * len(together)), strict=True):
                for tensor, one in zip(some, scans, strict=True):
                    found[tensor.name] = one
                    if progress is not None:
                        progress(tensor.nbytes)
        except BaseException:
            stopped.set()  # a tensor may take hours, and leaving the pool waits for it
            pool.shutdown(cancel_futures=True)
            raise
    return found
