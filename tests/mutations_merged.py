"""Injuries of merged models: what goes wrong in merges, done to a good one with numpy and the adapter's own factors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests import checkpoint_edits as edit
from tests.checkpoint_edits import INDEX, PREFIX, WEIGHTS, Raw, Tensors, fields, raw, tensors
from tests.mutations import FIXTURES, merged_in
from tests.mutations import _breaks as breaks

MERGED = "reward-qwen2/merged"
CAUSAL_MERGED = "causal-llama/merged"
Q_PROJ = "model.layers.0.self_attn.q_proj"
NORM = "model.layers.0.input_layernorm.weight"
SCORE = "score.weight"
PAIRS = Path(__file__).with_name("pairs.jsonl")
"""Twelve pairs of which the reward model of the fixtures ranks eleven right."""
_BF16 = np.dtype(ml_dtypes.bfloat16)

F64 = NDArray[np.float64]


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
    table: Tensors = {}
    for shard in sorted((folder.parent / "base").glob("model*.safetensors")):
        table |= edit.read(shard)
    return table


def numbers(tensor: Raw) -> F64:
    dtype = {"BF16": _BF16, "F32": np.dtype("<f4"), "F16": np.dtype("<f2")}[tensor.dtype]
    return np.frombuffer(tensor.data, dtype).reshape(tensor.shape).astype(np.float64)


def stored(values: F64, like: Raw) -> Raw:
    dtype = {"BF16": _BF16, "F32": np.dtype("<f4"), "F16": np.dtype("<f2")}[like.dtype]
    return Raw(like.dtype, like.shape, values.astype(np.float32).astype(dtype).tobytes())


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


@breaks("LT601", MERGED, verified=True)
def _unmerged(folder: Path) -> None:
    with weights(folder) as table:
        table[f"{PREFIX}{Q_PROJ}.lora_A.weight"] = raw(4, 16)


@breaks("LT602", MERGED, verified=True)
def _missing(folder: Path) -> None:
    with weights(folder) as table:
        del table[NORM]


@breaks("LT602 by the manifest", MERGED)
def _missing_in_manifest(folder: Path) -> None:
    _missing(folder)


@breaks("LT603", MERGED, verified=True)
def _extra(folder: Path) -> None:
    with weights(folder) as table:
        table["v_head.summary.weight"] = raw(1, 16)


@breaks("LT604", MERGED, verified=True)
def _other_shape(folder: Path) -> None:
    with weights(folder) as table:
        table[NORM] = raw(8, dtype="BF16")


@breaks("LT604 other type", MERGED, verified=True, quiet=True)
def _other_type(folder: Path) -> None:
    with weights(folder) as table:
        for name, tensor in table.items():
            table[name] = stored(numbers(tensor), Raw("F32", tensor.shape, b""))
    with fields(folder, "lora_tool.json") as manifest:
        manifest["operation"] = "something else"


@breaks("LT605", MERGED, verified=True)
def _one_bit(folder: Path) -> None:
    with weights(folder) as table:
        table[NORM] = flipped(table[NORM])


@breaks("LT606", MERGED, verified=True)
def _one_forgotten(folder: Path) -> None:
    base = base_of(folder)
    with weights(folder) as table:
        table[f"{Q_PROJ}.weight"] = base[f"{Q_PROJ}.weight"]


@breaks("LT607", MERGED, verified=True)
def _nothing_merged(folder: Path) -> None:
    remerged(folder, lambda _name, delta: 0 * delta)


@breaks("LT607 without a head", CAUSAL_MERGED, verified=True)
def _the_base(folder: Path) -> None:
    base = base_of(folder)
    with weights(folder) as table:
        table.update(base)


@breaks("LT608", MERGED, verified=True)
def _rows_of_zeros(folder: Path) -> None:
    with weights(folder) as table:
        tensor = table[f"{Q_PROJ}.weight"]
        values = numbers(tensor)
        values[8:12] = 0
        table[f"{Q_PROJ}.weight"] = stored(values, tensor)


@breaks("LT626", "causal-llama/resized", verified=True)
def _a_row_of_a_factor(folder: Path) -> None:
    with tensors(folder) as table:
        name = f"{PREFIX}{Q_PROJ}.lora_B.weight"
        values = numbers(table[name])
        values[3] = 0
        table[name] = stored(values, table[name])


@breaks("LT608 one bit", MERGED, verified=True)
def _one_bit_of_a_sum(folder: Path) -> None:
    with weights(folder) as table:
        tensor = table[f"{Q_PROJ}.weight"]
        data = bytearray(tensor.data)
        data[100] ^= 2  # two units in the last place
        table[f"{Q_PROJ}.weight"] = Raw(tensor.dtype, tensor.shape, bytes(data))


@breaks("LT608 not a number", MERGED, verified=True)
def _not_a_number(folder: Path) -> None:
    with weights(folder) as table:
        tensor = table[f"{Q_PROJ}.weight"]
        values = numbers(tensor)
        values[3, 4] = np.nan
        table[f"{Q_PROJ}.weight"] = stored(values, tensor)


@breaks("LT609", MERGED, verified=True)
def _twice(folder: Path) -> None:
    remerged(folder, lambda _name, delta: 2 * delta)


@breaks("LT610", MERGED, verified=True)
def _scaling_left_out(folder: Path) -> None:
    remerged(folder, lambda _name, delta: delta / 2)


@breaks("LT610 one tensor", MERGED, verified=True)
def _one_other_scaling(folder: Path) -> None:
    remerged(folder, lambda name, delta: 1.2 * delta if name == f"{Q_PROJ}.weight" else delta)


@breaks("LT610 subtracted", CAUSAL_MERGED, verified=True)
def _subtracted(folder: Path) -> None:
    remerged(folder, lambda _name, delta: -delta)


@breaks("LT611", MERGED, verified=True)
def _transposed(folder: Path) -> None:
    remerged(folder, lambda name, delta: delta.T if name == f"{Q_PROJ}.weight" else delta)


@breaks("LT612", MERGED, verified=True)
def _of_another_run(folder: Path) -> None:
    noise = np.random.default_rng(5)

    def other(_name: str, delta: F64) -> F64:
        return np.asarray(noise.standard_normal(delta.shape) * np.abs(delta).mean())

    remerged(folder, other)


@breaks("LT613", MERGED, verified=True)
def _no_head(folder: Path) -> None:
    with weights(folder) as table:
        del table[SCORE]
    with fields(folder, "config.json") as config:
        config["architectures"] = ["Qwen2ForCausalLM"]


@breaks("LT613 by the manifest", MERGED)
def _no_head_in_manifest(folder: Path) -> None:
    _no_head(folder)


@breaks("LT614", MERGED, verified=True)
def _random_head(folder: Path) -> None:
    with weights(folder) as table:
        table[SCORE] = raw(*table[SCORE].shape, dtype="BF16")


@breaks("LT605 by its bytes", MERGED, with_base=True)
def _one_bit_by_bytes(folder: Path) -> None:
    _one_bit(folder)


@breaks("LT606 by its bytes", MERGED, with_base=True)
def _one_forgotten_by_bytes(folder: Path) -> None:
    _one_forgotten(folder)


@breaks("LT607 by its bytes", MERGED, with_base=True)
def _nothing_merged_by_bytes(folder: Path) -> None:
    _nothing_merged(folder)


@breaks("LT614 by its bytes", CAUSAL_MERGED, with_base=True)
def _other_saved_by_bytes(folder: Path) -> None:
    with tensors(folder.parent / "adapter") as table:
        table[f"{PREFIX}model.norm.weight"] = raw(16, dtype="BF16")
    with fields(folder.parent / "adapter") as config:
        config["modules_to_save"] = ["model.norm"]
    merged_in(folder.parent)
    base = base_of(folder)
    with weights(folder) as table:
        table["model.norm.weight"] = base["model.norm.weight"]


@breaks("LT615", MERGED, verified=True)
def _no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with fields(folder, "tokenizer_config.json") as config:
        config.pop("chat_template", None)


@breaks("LT616", MERGED, verified=True)
def _other_rotary_base(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["rope_parameters"]["rope_theta"] = 500000.0


@breaks("LT616 class", CAUSAL_MERGED, verified=True)
def _other_class(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["architectures"] = ["LlamaModel"]


@breaks("LT616 no class", MERGED, verified=True)
def _no_class(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        del config["architectures"]


@breaks("LT617", MERGED, verified=True)
def _other_base_recorded(folder: Path) -> None:
    with fields(folder, "lora_tool.json") as manifest:
        inputs: dict[str, Any] = manifest["inputs"]
        inputs["base"]["fingerprint"] = "0" * 64


@breaks("LT618", MERGED, verified=True)
def _into_another_base(folder: Path) -> None:
    merged = set(deltas(folder)) | {SCORE}
    with weights(folder) as table:
        for name in table.keys() - merged:
            table[name] = flipped(table[name])


@breaks("LT619", MERGED, verified=True)
def _tiny(folder: Path) -> None:
    with tensors(folder.parent / "adapter") as table:
        for name, tensor in table.items():
            if "lora_B" in name:
                table[name] = stored(numbers(tensor) * 1e-4, tensor)
    merged_in(folder.parent)


@breaks("LT620", MERGED, verified=True, logits=True)
def _sees_two_tokens(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config.update(use_sliding_window=True, sliding_window=2, layer_types=["sliding_attention"] * 2)


def _of_no_manifest(folder: Path, *, unknown: bool = False) -> None:
    """Leave the folder as another tool would have left it, of a model type that nobody knows where `unknown`."""
    (folder / "lora_tool.json").unlink()
    for place in (folder, folder.parent / "base") if unknown else ():
        with fields(place, "config.json") as config:
            config.update(model_type="our_own", architectures=["OurModel"])


@breaks("LT320", CAUSAL_MERGED)
def forget_the_end_of_a_turn(folder: Path) -> None:
    with fields(folder, "generation_config.json") as config:
        config["eos_token_id"] = 2


@breaks("LT321", "causal-llama/base")
def _merged_by_verl(folder: Path) -> None:
    shutil.copytree(FIXTURES / "causal-llama" / "adapter", folder / "lora_adapter")


@breaks("LT317", MERGED)
def _head_of_a_wider_model(folder: Path) -> None:
    _of_no_manifest(folder)
    with weights(folder) as table:
        table[SCORE] = raw(1, 24, dtype="BF16")


@breaks("LT317 short projection", "causal-llama/base")
def _short_projection(folder: Path) -> None:
    with weights(folder) as table:
        table["model.layers.1.self_attn.o_proj.weight"] = raw(8, 16)


@breaks("LT317 flat head", MERGED)
def _flat_head(folder: Path) -> None:
    _of_no_manifest(folder)
    with weights(folder) as table:
        table[SCORE] = raw(16, dtype="BF16")


@breaks("LT318", CAUSAL_MERGED)
def _lost_norm(folder: Path) -> None:
    _of_no_manifest(folder)
    with weights(folder) as table:
        del table["model.norm.weight"]


@breaks("LT318 of the biases", MERGED)
def _lost_bias(folder: Path) -> None:
    _of_no_manifest(folder)
    with weights(folder) as table:
        del table["model.layers.1.self_attn.k_proj.bias"]


@breaks("LT319", CAUSAL_MERGED)
def _of_another_trainer(folder: Path) -> None:
    _of_no_manifest(folder)
    with weights(folder) as table:
        table["v_head.summary.weight"] = raw(1, 16)


@breaks("LT322", "causal-llama/base")
def _config_of_what_was_dequantised(folder: Path) -> None:
    with fields(folder, "config.json") as config:
        config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@breaks("LT322 the scales are lost", "causal-llama/base")
def _scales_lost(folder: Path) -> None:
    with weights(folder) as table:
        table["model.layers.1.mlp.up_proj.weight"] = raw(32, 16, dtype="F8_E4M3")


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


@breaks("LT323", "causal-llama/base")
def _one_of_three_that_are_fused(folder: Path) -> None:
    quantised(folder, f"{Q_PROJ}.weight")


@breaks("LT627", CAUSAL_MERGED, verified=True)
def _added_to_the_codes(folder: Path) -> None:
    name = f"{Q_PROJ}.weight"
    codes = quantised(folder.parent / "base", name)
    merged_in(folder.parent)
    with weights(folder) as table:
        table[name] = stored(codes + deltas(folder)[name], table[name])


@breaks("LT615 no tokenizer", MERGED, with_base=True, adapters=())
def _no_tokenizer(folder: Path) -> None:
    _of_no_manifest(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)


@breaks("LT616 beside the base", CAUSAL_MERGED, with_base=True, adapters=())
def _other_epsilon(folder: Path) -> None:
    _of_no_manifest(folder)
    with fields(folder, "config.json") as config:
        config["rms_norm_eps"] = 1.0


@breaks("LT621", CAUSAL_MERGED, with_base=True, adapters=())
def _lost_beside_the_base(folder: Path) -> None:
    _of_no_manifest(folder, unknown=True)
    with weights(folder) as table:
        del table[NORM]


@breaks("LT622", CAUSAL_MERGED, with_base=True, adapters=())
def _new_bias(folder: Path) -> None:
    _of_no_manifest(folder, unknown=True)
    with weights(folder) as table:
        table["model.layers.0.self_attn.q_proj.bias"] = raw(16)


@breaks("LT623", CAUSAL_MERGED, with_base=True, adapters=())
def _turned(folder: Path) -> None:
    _of_no_manifest(folder, unknown=True)
    with weights(folder) as table:
        tensor = table["model.layers.0.mlp.down_proj.weight"]
        table["model.layers.0.mlp.down_proj.weight"] = raw(*reversed(tensor.shape), dtype=tensor.dtype)


@breaks("LT624", CAUSAL_MERGED, with_base=True, adapters=(), deep=True)
def _renamed_base(folder: Path) -> None:
    _of_no_manifest(folder)
    with weights(folder) as table:
        table.update(base_of(folder))


@breaks("LT625", MERGED, verified=True, pairs=PAIRS, min_accuracy=0.9)
def _trained_on_swapped_columns(folder: Path) -> None:
    with tensors(folder.parent / "adapter") as table:
        name = next(name for name in table if name.endswith("score.weight"))
        table[name] = stored(-numbers(table[name]), table[name])
    merged_in(folder.parent)
