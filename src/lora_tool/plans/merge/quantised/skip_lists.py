"""The modules of a quantised model that are not quantised: which belong together, and where its config lists them.

A server fuses layers that read the same input, and takes them all quantised or all plain (vLLM refuses "some but not
all shards of qkv_proj"), so that a set in which one becomes plain becomes plain as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from lora_tool.checkpoints import ModelDir
from lora_tool.checkpoints.quantised import quantisation_table, with_table
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.formats.model_config import ModelConfig
from lora_tool.formats.quantised.auto_round import METHODS as AUTO_ROUND
from lora_tool.formats.quantised.encodings import encoding_of
from lora_tool.models.ends import MATRIX, is_input, is_output
from lora_tool.models.layers import EXPERTS

_LISTS = {
    "awq": ("modules_to_not_convert",),
    "bitsandbytes": ("llm_int8_skip_modules",),
    "compressed-tensors": ("ignore",),
    "fbgemm_fp8": ("modules_to_not_convert",),
    "fp8": ("ignored_layers", "modules_to_not_convert"),
    "modelopt": ("ignore",),
    "mxfp4": ("modules_to_not_convert",),
    "mxfp8": ("ignored_layers", "modules_to_not_convert"),
    "torchao": ("modules_to_not_convert",),
}
"""`quant_method` → the names of the list of plain modules; a new list gets the last one."""


_PATTERNS = {
    "compressed-tensors": lambda experts: f"re:{re.escape(experts)}\\..*",
    "modelopt": lambda experts: f"{experts}*",
}
"""`quant_method` → how its list names all experts of a layer; others name the module above them."""


def with_plain_modules(
    stored: ModelDir, plain: ModelDir, names: Collection[str], parameter_of: Callable[[str], str]
) -> ModelConfig:
    """Return the config of a quantised base that names the modules of the weights `names` as plain, in addition to those it names.

    Servers compare its list with names on disk, transformers with those in memory, which `parameter_of` gives: both are
    in it. Raises `UnsupportedAdapter` for a format that has no such list, or keeps it elsewhere.
    """
    config = stored.whole_config
    table = quantisation_table(config)
    method = str(table.get("quant_method"))
    if method == "gptq" and table:
        return with_table(config, {**table, **_of_gptq(table, plain, names, parameter_of)})
    if method in AUTO_ROUND:
        plain_layer = {"bits": 16, "act_bits": 16}
        left = dict.fromkeys((_module(name) for name in _both(sorted(names), parameter_of)), plain_layer)
        extra = table.get("extra_config")
        return with_table(config, {**table, "extra_config": {**(extra if isinstance(extra, dict) else {}), **left}})
    keys = _LISTS.get(method)
    if keys is None or not table:
        raise UnsupportedAdapter(
            f"{config.path} has no quantization_config with a list of plain modules that loaders respect",
            hint='`store="all-16bit"` writes plain weights throughout',
        )
    key = next((name for name in keys if table.get(name)), keys[-1])
    listed = table.get(key)
    held = listed if listed and isinstance(listed, list) else _plain_matrices(plain, parameter_of)
    both = _both(sorted(names), parameter_of)
    experts = dict.fromkeys(found["experts"] for found in map(EXPERTS.match, both) if found)
    modules = (_module(name) for name in both if not EXPERTS.match(name))
    pattern = _PATTERNS.get(method, str)
    added = [each for each in (*modules, *map(pattern, experts)) if each not in held]
    return with_table(config, {**table, key: [*held, *added]})


def _of_gptq(
    table: Mapping[str, Any], plain: ModelDir, names: Collection[str], parameter_of: Callable[[str], str]
) -> dict[str, Any]:
    """Return a GPTQ config's fields for plain modules.

    gptqmodel reads `dynamic`, which leaves them out; transformers and vLLM read the list of quantised ones, and without
    it take every layer of a block for quantised.
    """
    quantised = [name for name, tensor in plain.tensors.items() if encoding_of(tensor) is not None]
    left_out: dict[str, Any] = {f"-:^{re.escape(_module(name))}$": {} for name in _both(sorted(names), parameter_of)}
    dynamic = table.get("dynamic")
    return {
        "dynamic": {**left_out, **(dynamic if isinstance(dynamic, dict) else {})},  # the first that matches counts
        "modules_in_block_to_quantize": [
            [_module(name) for name in _both([name for name in quantised if name not in names], parameter_of)]
        ],
    }


def _both(names: Iterable[str], parameter_of: Callable[[str], str]) -> list[str]:
    """Return names on disk, and then those in memory that are others."""
    on_disk = list(names)
    return list(dict.fromkeys([*on_disk, *map(parameter_of, on_disk)]))


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _plain_matrices(plain: ModelDir, parameter_of: Callable[[str], str]) -> list[str]:
    """Return the layers that are not quantised: without a list a loader leaves the output layer plain, which may be
    tied and not on disk, and with a list only the modules in it.
    """
    found = [
        name
        for name, tensor in plain.tensors.items()
        if name.endswith(".weight") and len(tensor.shape) == MATRIX and encoding_of(tensor) is None
    ]
    layers = [module for module in map(_module, _both(found, parameter_of)) if not is_input(module)]
    outputs = () if any(is_output(_module(name)) for name in plain.tensors) else ("lm_head",)
    return list(dict.fromkeys([*layers, *outputs]))
