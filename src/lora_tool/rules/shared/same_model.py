"""Whether two folders hold one model, whatever types its numbers are stored in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from lora_tool.checkpoints import ModelDir
from lora_tool.checkpoints.quantised import as_matrices
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.manifest import fingerprint
from lora_tool.formats.quantised.encodings import encoding_of
from lora_tool.formats.stored import read_part
from lora_tool.models.ends import is_end

if TYPE_CHECKING:
    from lora_tool.formats.stored_numbers import Matrix

_SAMPLES = 256
_SAMPLE_NUMBERS = 2048
_ALIKE = 0.7
"""The cosine of two samples of one weight, of which one was rounded to a few bits, or scaled by AWQ, is above this; that
of two models' is near 0."""
_TOLERATED = 64
"""Of so many numbers in two types one may differ: it was rounded twice."""


def same_model(one: ModelDir, other: ModelDir) -> bool | None:
    """Return whether both hold the same weights, by samples; None where they have too few tensors in common to tell.

    One may be stored in another type, be quantised, or have another number of vocabulary rows. Quantising changes the
    linear layers, and with AWQ the norms and routers before them, too, but not the ends that it leaves in 16 bits: of
    those a sample must be the same, while other matrices must only be alike.
    """
    if fingerprint(one.weights) == fingerprint(other.weights):
        return True
    first, second = as_matrices(one).tensors, as_matrices(other).tensors
    common = sorted(first.keys() & second.keys())
    if 2 * len(common) < max(len(first), len(second)):
        return None
    quantised = any(encoding_of(table[name]) is not None for table in (first, second) for name in common)
    chosen = common[:: max(1, len(common) // _SAMPLES)]
    verdicts = {_agree(first[name], second[name], quantised=quantised) for name in chosen}
    return None if verdicts <= {None} else False not in verdicts


def _agree(one: StoredTensor, other: StoredTensor, *, quantised: bool) -> bool | None:
    """Return whether a sample from the middle of two tensors is the same, or alike; None where that says nothing."""
    end = is_end(one.name.rpartition(".")[0])
    if one.shape != other.shape and not (end and one.shape[1:] == other.shape[1:]):
        return False
    floats = one.dtype.is_float and other.dtype.is_float and one.spec.numel and other.spec.numel
    if not floats or (quantised and len(one.shape) == 1):
        return None
    import numpy as np  # only where fingerprints differ

    from lora_tool.formats.stored_numbers import rounded

    a, b = _samples(one, other)
    if quantised and not (end and encoding_of(one) is encoding_of(other) is None):
        length = np.linalg.norm(a) * np.linalg.norm(b)
        return bool(length == 0 or np.dot(a, b) > _ALIKE * length)
    types = {one.dtype, other.dtype}
    off = min(np.count_nonzero(rounded(a, each) != rounded(b, each)) for each in types)
    return bool(off == 0 or (len(types) > 1 and off * _TOLERATED <= a.size))


def _samples(one: StoredTensor, other: StoredTensor) -> Iterator[Matrix]:
    """Yield the same numbers of both, from the middle of the rows that both have."""
    import numpy as np

    from lora_tool.formats.stored_numbers import STORED, widened

    numbers = min(one.spec.numel, other.spec.numel)
    count = min(_SAMPLE_NUMBERS, numbers)
    first = (numbers - count) // 2
    for tensor in (one, other):
        width = tensor.dtype.bits // 8
        data = read_part(tensor, first * width, count * width)
        yield widened(np.frombuffer(data, STORED[tensor.dtype]), tensor.dtype)
