"""Edits of merged models, with numpy and the adapter's own factors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests import checkpoint_edits as edit
from tests.checkpoint_edits import INDEX, PREFIX, WEIGHTS, Raw, Tensors, fields

Q_PROJ = "model.layers.0.self_attn.q_proj"
NORM = "model.layers.0.input_layernorm.weight"
SCORE = "score.weight"
PAIRS = Path(__file__).parents[1] / "pairs.jsonl"
"""Twelve pairs of which the reward model of the fixtures ranks eleven right."""

F64 = NDArray[np.float64]

_DTYPES = {"BF16": np.dtype(ml_dtypes.bfloat16), "F32": np.dtype("<f4"), "F16": np.dtype("<f2")}


@contextmanager
def weights(folder: Path) -> Iterator[Tensors]:
    """Give all tensors of a model for editing, and write them back as one file."""
    shards = sorted(folder.glob("model*.safetensors"))
    table: Tensors = {}
    for shard in shards:
        table |= edit.read(shard)
    yield table
    for shard in shards:
        shard.unlink()
    (folder / INDEX).unlink(missing_ok=True)
    edit.write(folder / "model.safetensors", table)


def base_of(folder: Path) -> Tensors:
    """Return all tensors of the base beside the folder."""
    table: Tensors = {}
    for shard in sorted((folder.parent / "base").glob("model*.safetensors")):
        table |= edit.read(shard)
    return table


def numbers(tensor: Raw) -> F64:
    """Return a tensor's values."""
    return np.frombuffer(tensor.data, _DTYPES[tensor.dtype]).reshape(tensor.shape).astype(np.float64)


def stored(values: F64, like: Raw) -> Raw:
    """Return a tensor of `values`, rounded to the dtype of another by way of float32, as a merge rounds."""
    return Raw(like.dtype, like.shape, values.astype(np.float32).astype(_DTYPES[like.dtype]).tobytes())


def deltas(folder: Path) -> dict[str, F64]:
    """Return ΔW of every module of the adapter beside the folder, by the weight's name."""
    config = json.loads((folder.parent / "adapter" / "adapter_config.json").read_text())
    scaling = config["lora_alpha"] / config["r"]
    table = edit.read(folder.parent / "adapter" / WEIGHTS)
    modules = [name.removesuffix(".lora_A.weight") for name in table if name.endswith(".lora_A.weight")]
    return {
        f"{module.removeprefix(PREFIX)}.weight": scaling
        * (numbers(table[f"{module}.lora_B.weight"]) @ numbers(table[f"{module}.lora_A.weight"]))
        for module in modules
    }


def remerged(folder: Path, change: Callable[[str, F64], F64]) -> None:
    """Replace every merged tensor by its base's plus `change` of its name and ΔW, rounded as a merge rounds."""
    base = base_of(folder)
    with weights(folder) as table:
        for name, delta in deltas(folder).items():
            table[name] = stored(numbers(base[name]) + change(name, delta), table[name])


def flipped(tensor: Raw) -> Raw:
    """Return the tensor with the last bit of its middle value changed."""
    data = bytearray(tensor.data)
    data[len(data) // 4 * 2] ^= 1
    return Raw(tensor.dtype, tensor.shape, bytes(data))


def without_manifest(folder: Path, *, unknown: bool = False) -> None:
    """Leave the folder as another tool would have left it, of a model type that nobody knows where `unknown`."""
    (folder / "lora_tool.json").unlink()
    for place in (folder, folder.parent / "base") if unknown else ():
        with fields(place, "config.json") as config:
            config.update(model_type="our_own", architectures=["OurModel"])


def quantised(folder: Path, name: str) -> F64:
    """Make one weight of a model FP8, with one scale for all of it; return its codes as numbers."""
    with weights(folder) as table:
        values = numbers(table[name])
        scale = np.abs(values).max() / 448
        codes = (values / scale).astype(ml_dtypes.float8_e4m3fn)
        table[name] = Raw("F8_E4M3", table[name].shape, codes.tobytes())
        table[f"{name}_scale_inv"] = Raw("F32", (), np.float32(scale).tobytes())
    with fields(folder, "config.json") as config:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": None}
    return np.asarray(codes, np.float64)
