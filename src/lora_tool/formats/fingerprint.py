"""A fingerprint that identifies weights wherever their files lie."""

from __future__ import annotations

import hashlib
from operator import attrgetter

from lora_tool.core.tensors import DType
from lora_tool.formats.files import opened_regular
from lora_tool.formats.open_files import OpenFiles
from lora_tool.formats.stored import fill
from lora_tool.formats.weights import Weights

_SAMPLES = 256
_SAMPLE_BYTES = 4096


def fingerprint(weights: Weights) -> str:
    """Return a sha256 that identifies the weights, in milliseconds for any size.

    It covers every tensor's name, dtype and shape, and 4 KiB of up to 256 tensors spread over the files: it tells
    apart two models of one architecture, and any two trained adapters; it is no proof against tampering.
    """
    tensors = sorted(weights.tensors.values(), key=attrgetter("spec.name"))
    forms: dict[tuple[DType, tuple[int, ...]], str] = {}
    lines = []
    for spec in (tensor.spec for tensor in tensors):
        form = spec.dtype, spec.shape
        lines.append(f"{spec.name}{forms.get(form) or forms.setdefault(form, _line_end(*form))}")
    digest = hashlib.sha256("".join(lines).encode("utf-8", "surrogatepass"))
    with OpenFiles(opened_regular) as files:
        for tensor in tensors[:: max(1, len(tensors) // _SAMPLES)]:
            # from the middle, where embeddings have trained rows and padding is rare
            start = max(0, tensor.nbytes - _SAMPLE_BYTES) // 2
            sample = memoryview(bytearray(min(_SAMPLE_BYTES, tensor.nbytes)))
            fill(sample, tensor, start, files.read_exactly)
            digest.update(sample)
    return digest.hexdigest()


def _line_end(dtype: DType, shape: tuple[int, ...]) -> str:
    return f"\0{dtype}\0{shape}\n"
