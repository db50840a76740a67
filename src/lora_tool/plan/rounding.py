"""LT414: masters against the 16-bit weights that were saved with them.

Stages 1 and 2 save both in one checkpoint; under stage 3 the HF Trainer writes gathered weights beside it. A sample of
every rank's part is compared: it proves order, step and run of the ranks, where names and counters show nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lora_tool import keys
from lora_tool.checkpoint import AdapterDir, ModelDir, open_checkpoint
from lora_tool.errors import CheckpointError, UnsupportedCheckpoint
from lora_tool.formats.files import open_regular
from lora_tool.formats.partitions import Role, entries
from lora_tool.formats.zero import ZeroTag
from lora_tool.report import Finding, Severity
from lora_tool.tensors import DType, StoredTensor

_SAMPLE = 1 << 14
"""Elements that are compared at the beginning of each rank's part of a tensor."""

Tensors = Mapping[str, StoredTensor]


def rounding_faults(root: Path, tag: ZeroTag, tensors: Tensors) -> Iterator[Finding]:
    """Yield LT414 for trained tensors whose masters do not round to the weights saved with them."""
    known = entries(tag)
    masters = {
        name: tensor
        for name, tensor in tensors.items()
        if known[name].role is Role.TRAINED and tensor.dtype is DType.F32
    }
    if tag.stage in (1, 2) and tag.first is not None:
        file, held = tag.first.file, tag.first.module
        copies = {
            name: file.stored(held[name], name)
            for name in masters
            if name in held and held[name].shape == known[name].shape
        }
        yield from _disagreeing(masters, copies, Severity.ERROR)
    elif tag.stage == 3:  # noqa: PLR2004 - the stage
        copies, same_step = _gathered_beside(root, tag, masters)
        # a file of which nobody knows when it was written proves less
        yield from _disagreeing(masters, copies, Severity.ERROR if same_step else Severity.WARNING)


def _gathered_beside(root: Path, tag: ZeroTag, masters: Tensors) -> tuple[dict[str, StoredTensor], bool]:
    """Return the masters' names → their copies in the adapter or model in `root`; whether it is of the same step."""
    try:
        beside = open_checkpoint(root)
    except (CheckpointError, UnsupportedCheckpoint):
        return {}, False
    if not isinstance(beside, AdapterDir | ModelDir) or any(problem.fatal for problem in beside.weights.problems):
        return {}, False
    held = {keys.parse(name).canonical: tensor for name, tensor in beside.tensors.items()}
    found = {name: held.get(keys.parse(name).canonical) for name in masters}
    trainer, first = beside.folder.trainer, tag.first
    same_step = trainer is not None and first is not None and trainer.global_step == first.global_steps
    return {name: copy for name, copy in found.items() if copy and copy.shape == masters[name].shape}, same_step


def _disagreeing(masters: Tensors, copies: Tensors, severity: Severity) -> Iterator[Finding]:
    for name, copy in copies.items():
        (whole,) = copy.spans
        size, done = copy.dtype.bits // 8, 0
        for span in masters[name].spans:
            count = min(_SAMPLE, span.nbytes // 4)
            master = _read(span.path, span.offset, count * 4, "<f4")
            held = _read(whole.path, whole.offset + done // 4 * size, count * size, f"<u{size}")
            done += span.nbytes
            if not _rounds_to(master, held, copy.dtype):
                yield Finding(
                    code="LT414",
                    severity=severity,
                    path=str(span.path),
                    subject=name,
                    message=f"does not round to the {copy.dtype} weights in {whole.path}: of another run or step",
                    hint="copy this rank's file again, or use another tag: --tag T",
                )
                break


def _read(path: Path, offset: int, nbytes: int, dtype: str) -> NDArray[Any]:
    with open_regular(path) as fd:
        return np.frombuffer(os.pread(fd, nbytes, offset), dtype)


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
