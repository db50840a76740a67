"""Editing checkpoints byte by byte, with nothing of ours or of theirs: safetensors as bytes, JSON as text."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
INDEX = "model.safetensors.index.json"
PREFIX = "base_model.model."
_WIDTH = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "I8": 1, "I64": 8, "F8_E4M3": 1}


@dataclass(frozen=True)
class Raw:
    """One tensor as it lies in a file."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


Tensors = dict[str, Raw]


_VALUES = (0.25, -0.125, 0.0625, 0.1875, -0.25, 0.125, -0.03125)
"""What `raw` fills tensors with: exact in every type, and not all the same, which would be a disease."""


def raw(*shape: int, dtype: str = "F32", value: float | None = None) -> Raw:
    """Return a tensor of small values, or of `value` everywhere."""
    count = math.prod(shape)
    values = _VALUES if value is None else (value,)
    if dtype not in ("F32", "BF16"):
        return Raw(dtype, shape, b"\1" * _WIDTH[dtype] * count)
    singles = [struct.pack("<f", number)[4 - _WIDTH[dtype] :] for number in values]
    return Raw(dtype, shape, b"".join(singles[at % len(singles)] for at in range(count)))


def filled(value: float, *shape: int) -> Raw:
    """Return a tensor that has one value throughout."""
    return Raw("F32", shape, struct.pack("<f", value) * math.prod(shape))


def read_parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return header and data of a safetensors file."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write_parts(path: Path, header: Mapping[str, Any] | str, data: bytes) -> None:
    text = header if isinstance(header, str) else json.dumps(header)
    encoded = text.encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def read(path: Path) -> Tensors:
    header, data = read_parts(path)
    return {
        name: Raw(entry["dtype"], tuple(entry["shape"]), data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def write(path: Path, tensors: Mapping[str, Raw]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        offsets = [at, at + len(tensor.data)]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        at = offsets[1]
    write_parts(path, header, b"".join(tensor.data for tensor in tensors.values()))


@contextmanager
def tensors(folder: Path, name: str = WEIGHTS) -> Iterator[Tensors]:
    """Give the tensors of a file for editing in place, and write them back."""
    table = read(folder / name)
    yield table
    write(folder / name, table)


@contextmanager
def fields(folder: Path, name: str = CONFIG) -> Iterator[dict[str, Any]]:
    """Give the fields of a JSON file for editing in place, and write them back."""
    table = json.loads((folder / name).read_text())
    yield table
    (folder / name).write_text(json.dumps(table, indent=2))


def renamed(folder: Path, change: Callable[[str], str]) -> None:
    """Give every tensor of an adapter another name."""
    write(folder / WEIGHTS, {change(name): tensor for name, tensor in read(folder / WEIGHTS).items()})


def renamed_in_model(folder: Path, old: str, new: str) -> None:
    """Give every tensor of a sharded model with `old` in its name `new` there."""
    for path in folder.glob("*.safetensors"):
        write(path, {name.replace(old, new): tensor for name, tensor in read(path).items()})
    index = folder / INDEX
    index.write_text(index.read_text().replace(old, new))


def lora(module: str, *, rows: int, columns: int, rank: int = 4) -> Tensors:
    """Return a pair for a new module."""
    name = f"{PREFIX}{module}.lora_"
    return {f"{name}A.weight": raw(rank, columns), f"{name}B.weight": raw(rows, rank)}


def trained_tokens(folder: Path, indices: list[int] | dict[str, list[int]], *, rows: int, width: int = 16) -> None:
    """Give an adapter trained tokens: `indices` in its config, and `rows` of them among its tensors."""
    with fields(folder) as config:
        config["trainable_token_indices"] = indices
    with tensors(folder) as table:
        table[f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"] = raw(rows, width)


def lora_on_embeddings(folder: Path, *, rows: int) -> None:
    """Give an adapter LoRA on embeddings of so many rows."""
    with tensors(folder) as table:
        table[f"{PREFIX}model.embed_tokens.lora_embedding_A"] = raw(4, rows)
        table[f"{PREFIX}model.embed_tokens.lora_embedding_B"] = raw(16, 4)
    with fields(folder) as config:
        config["target_modules"].append("embed_tokens")


def as_classifier(folder: Path, *, labels: int | None = 1, rows: int = 1, pad: int | None = 0) -> None:
    """Make a causal-LM folder a sequence classifier's: one file, a head of `rows`, a config with `labels`."""
    table: Tensors = {}
    for shard in sorted(folder.glob("model-*.safetensors")):
        table |= read(shard)
        shard.unlink()
    (folder / INDEX).unlink()
    table.pop("lm_head.weight", None)
    write(folder / "model.safetensors", table | {"score.weight": raw(rows, 16, dtype="BF16")})
    with fields(folder, "config.json") as config:
        config["architectures"] = [config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")]
        config["pad_token_id"] = pad
        if labels is not None:
            config["id2label"] = {str(at): f"LABEL_{at}" for at in range(labels)}
            config["label2id"] = {f"LABEL_{at}": at for at in range(labels)}


def emptied(tensor: Raw) -> Raw:
    """Return what ZeRO-3 leaves of a tensor that was not gathered."""
    return replace(tensor, shape=(0,), data=b"")


def scaled(tensor: Raw, factor: float) -> Raw:
    """Return an F32 tensor with its values multiplied."""
    values = struct.unpack(f"<{len(tensor.data) // 4}f", tensor.data)
    return replace(tensor, data=struct.pack(f"<{len(values)}f", *(value * factor for value in values)))


def scrambled(tensor: Raw) -> Raw:
    """Return a tensor of the same form with other values."""
    return replace(tensor, data=tensor.data[::-1])
