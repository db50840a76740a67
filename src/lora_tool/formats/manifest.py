"""`lora_tool.json`: the record that every folder written by lora-tool carries."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from msgspec import Struct

from lora_tool.core.errors import BadConfig, Defect
from lora_tool.core.tensors import DType, TensorSpec
from lora_tool.formats.fields import is_strings
from lora_tool.formats.files import opened_regular, read_object
from lora_tool.formats.open_files import OpenFiles
from lora_tool.formats.stored import fill
from lora_tool.formats.weights import Weights

FILE_NAME = "lora_tool.json"
SCHEMA_VERSION = 1


class Manifest(Struct, frozen=True, kw_only=True):
    """A manifest's record of where its folder came from."""

    path: Path
    raw: Mapping[str, Any]
    merged_adapters: tuple[str, ...]
    """The fingerprint of every adapter whose delta is in these weights: merged, in older merges too, or computed with."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec] | None:
        """The tensors that were written, by the ledger; None where it has none, or not of a form that we know."""
        ledger = self.raw.get("ledger")
        if not isinstance(ledger, list) or not all(isinstance(entry, dict) for entry in ledger):
            return None
        try:
            specs = [
                TensorSpec(name=str(entry["name"]), dtype=DType(entry["dtype"]), shape=tuple(entry["shape"]))
                for entry in ledger
            ]
        except (KeyError, TypeError, ValueError):
            return None
        return {spec.name: spec for spec in specs}

    def input(self, name: str) -> Mapping[str, Any]:
        """Return the record of the input `name` (``base``, ``adapter``); empty where there is none."""
        inputs = self.raw.get("inputs")
        found = inputs.get(name) if isinstance(inputs, dict) else None
        return found if isinstance(found, dict) else {}

    @property
    def adapters(self) -> Mapping[str, str]:
        """The adapters that were read, by fingerprint, and where they were: their Hub id or path. One of weight 0 is none."""
        inputs = self.raw.get("inputs")
        named = inputs if isinstance(inputs, dict) else {}
        read = (self.input(name) for name in named if name.split(" ")[0] == "adapter")
        return {
            str(each["fingerprint"]): str(each.get("hub_id") or each.get("path") or "")
            for each in read
            if isinstance(each.get("fingerprint"), str) and each.get("weight", 1) != 0
        }


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in the file `path`. Raises `CorruptFile`, `BadConfig`."""
    raw = read_object(path)
    merged = raw.get("merged_adapters", [])
    if not is_strings(merged):
        raise BadConfig.of(path, Defect.BAD_FIELD, "expected a list of strings", "merged_adapters")
    return Manifest(path=path, raw=raw, merged_adapters=tuple(merged))


# A fingerprint that identifies weights wherever their files lie.


_SAMPLES = 256
_SAMPLE_BYTES = 4096


def fingerprint(weights: Weights) -> str:
    """Return a sha256 that identifies the weights, in milliseconds for any size.

    It covers every tensor's name, dtype and shape, and 4 KiB of up to 256 tensors spread over the files. It
    differs between two models of one architecture, and any two trained adapters; it does not detect tampering.
    """
    import hashlib  # OpenSSL takes 5 ms, a fortieth of a `validate` that compares no fingerprint

    tensors = sorted(weights.tensors.values(), key=attrgetter("spec.name"))
    forms: dict[tuple[DType, tuple[int, ...]], str] = {}
    lines = []
    for spec in map(attrgetter("spec"), tensors):
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
