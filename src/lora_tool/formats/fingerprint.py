"""A fingerprint that identifies weights wherever their files lie."""

from __future__ import annotations

import hashlib

from lora_tool.formats.stored import read_part
from lora_tool.formats.weights import Weights

_SAMPLES = 256
_SAMPLE_BYTES = 4096


def fingerprint(weights: Weights) -> str:
    """Return a sha256 that identifies the weights, in milliseconds for any size.

    It covers every tensor's name, dtype and shape, and 4 KiB of up to 256 tensors spread over the files: it tells
    apart two models of one architecture, and any two trained adapters; it is no proof against tampering.
    """
    digest = hashlib.sha256()
    tensors = sorted(weights.tensors.values(), key=lambda tensor: tensor.name)
    for spec in (tensor.spec for tensor in tensors):
        digest.update(f"{spec.name}\0{spec.dtype}\0{spec.shape}\n".encode("utf-8", "surrogatepass"))
    for tensor in tensors[:: max(1, len(tensors) // _SAMPLES)]:
        # from the middle, where embeddings have trained rows and padding is rare
        start = max(0, tensor.nbytes - _SAMPLE_BYTES) // 2
        digest.update(read_part(tensor, start, min(_SAMPLE_BYTES, tensor.nbytes)))
    return digest.hexdigest()
