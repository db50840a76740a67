"""The quantisation method of a model, by its config and name, and the 16-bit model that it was made from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.hub_names import hub_id_of
from lora_tool.formats.model_config import ModelConfig
from lora_tool.formats.quantised.auto_round import METHODS as AUTO_ROUND
from lora_tool.formats.quantised.parts import MATRIX

_BITS = (
    r"bnb|nf4|[2-8](?:\.\d+)?-?(?:bit|bpw)|gptq|awq|(?:nv|mx)?fp[48]|gguf|exl[23]|hqq|aqlm|int[48]|i?q[2-8](?:_\w+)?"
    r"|w[248]a(?:16|8|4)"
)
"""The parts of a name that mean quantised weights, as those who publish them write it."""
_BESIDE = r"unsloth|mlx|dynamic|static|block|i1|dwq|qat|kv|torchao|quantized|\d+g"
"""Parts that only occur next to those, and mean nothing on their own."""
READ_METHODS = AUTO_ROUND | frozenset(
    {
        None,
        "awq",
        "bitsandbytes",
        "compressed-tensors",
        "fbgemm_fp8",
        "fp8",
        "gptq",
        "modelopt",
        "mxfp4",
        "mxfp8",
        "torchao",
    }
)
"""Values of `quant_method` whose weights are decoded; None where only the files show it."""
# patterns as text: hardly a command needs them, and compiling takes a while
_END = rf"(?i:(?:[-_.](?:{_BITS}|{_BESIDE}))+\Z)"
_SAYS = rf"(?i:[-_.](?:{_BITS})(?=[-_.]|\Z))"
_CARD_BASE = r"(?m:^base_model:[ \t]*(?:\n[ \t]*-)?[ \t]*['\"]?(?P<id>[\w.\-]+/[\w.\-]+)['\"]?[ \t]*$)"
_CARD = 1 << 16


def full_precision_name(name: str) -> str | None:
    """Return `name` without an end that says how it is quantised: of `X-bnb-4bit` it is `X`; None without such an end."""
    end = re.search(_END, name)
    return name[: end.start()] if end and re.search(_SAYS, end[0]) else None


def quantised_by_name(name: str) -> str:
    """Return the end of a sentence about a missing model: that its name says it is quantised; else ""."""
    better = full_precision_name(hub_id_of(name) or "")
    return f"; by its name it is quantised, and {better} is the model that it was made from" if better else ""


def quantised_as(config: ModelConfig) -> str | None:
    """Return how the config says that the weights are quantised, as `4-bit gptq`; None for plain weights."""
    if config.quantization is None:
        return None
    table = config.raw.get("quantization_config") or config.raw.get("quantization")
    given = table if isinstance(table, dict) else {}
    in_words = {"load_in_4bit": 4, "load_in_8bit": 8}
    bits = next((count for name, count in in_words.items() if given.get(name) is True), given.get("bits"))
    return f"{bits}-bit {config.quantization}" if type(bits) is int else config.quantization


def require_read(config: ModelConfig, hub_id: str | None) -> None:
    """Raise `UnsupportedAdapter` where `config` names quantised weights that are not decoded.

    The hint names the full-precision model that they were made from; `hub_id` is the model's, None for a folder's.
    """
    if config.quantization not in READ_METHODS:
        raise UnsupportedAdapter(
            f"{hub_id or config.path}: the base is quantised ({quantised_as(config)}), and lora-tool does not read that format",
            hint=give_full_precision(hub_id, config, config.path.parent),
        )


def give_full_precision(hub_id: str | None, config: ModelConfig | None, folder: Path) -> str:
    """Return the hint for who gave a quantised base: the 16-bit model that it was made from.

    Sources are the name on the Hub, the config's `_name_or_path` and the card in `folder`; where they differ, all
    names are returned.
    """
    found = [full_precision_name(hub_id or ""), _recorded(config), _of_card(folder)]
    named = list(dict.fromkeys(name for name in found if name and name != hub_id)) or ["MODEL"]
    return f"give the full-precision model that it was made from: `base={named[0]}`" + "".join(
        f", or {name}" for name in named[1:]
    )


def _recorded(config: ModelConfig | None) -> str | None:
    """Return the Hub id under which the config says that the model was loaded, if that one is not quantised, too."""
    name = config.raw.get("_name_or_path") if config is not None else None
    found = hub_id_of(name) if isinstance(name, str) else None
    return found and (full_precision_name(found) or found)


def _of_card(folder: Path) -> str | None:
    try:
        with (folder / "README.md").open(encoding="utf-8", errors="replace") as card:
            found = re.search(_CARD_BASE, card.read(_CARD))
    except OSError:
        return None
    return (full_precision_name(found["id"]) or found["id"]) if found else None


# How weights are quantised, by the config: the sizes of tiles and codes, and the parts that every weight has.


_BYTE = 8
"""The most bits of a code."""


def sizes(table: Mapping[str, Any]) -> tuple[frozenset[tuple[int, int]], frozenset[int]]:
    """Return the tiles and the numbers of bits that a config names."""
    weights = _schemes(table)
    tiles = [_block(each.get("block_structure")) or [1, each.get("group_size")] for each in weights]
    if table.get("quant_method") in ("fp8", "modelopt", "mxfp8"):  # modelopt has no other tiles, and does not say it
        tiles.append(table.get("weight_block_size", [128, 128]))
    pairs = (tuple(tile) for tile in tiles if isinstance(tile, list))
    bits = (each.get("num_bits") for each in weights)
    return (
        frozenset(pair for pair in pairs if len(pair) == MATRIX and all(type(n) is int and n > 0 for n in pair)),
        frozenset(each for each in bits if type(each) is int and 0 < each <= _BYTE),
    )


def _block(said: object) -> object:
    """Return the rows and columns of a block, which older files of compressed-tensors have as text: `128x128`."""
    if not isinstance(said, str):
        return said
    return [int(each) for each in said.split("x") if each.isascii() and each.isdigit()]


def _schemes(table: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return how the groups of compressed-tensors say that weights are quantised, each with its `format`."""
    groups = table.get("config_groups")
    listed = [each for each in groups.values() if isinstance(each, dict)] if isinstance(groups, dict) else []
    named = (({"format": table.get("format")} | group, group.get("weights")) for group in listed)
    return [each | {"format": group["format"]} for group, each in named if isinstance(each, dict)]


def is_compressed(table: Mapping[str, Any]) -> bool:
    """Return whether a table of compressed-tensors says that weights are stored as codes, and not only caches or inputs."""
    return table.get("quantization_status") == "compressed" and bool(_schemes(table))


def least_bits(table: Mapping[str, Any]) -> int:
    """Return the width of the narrowest integers that a config has in bytes: W4A8 leaves half of each of them empty."""
    in_bytes = [each for each in _schemes(table) if each["format"] != "pack-quantized" and each.get("type") != "float"]
    bits = [each.get("num_bits") for each in in_bytes]
    return min((each for each in bits if type(each) is int and 0 < each <= _BYTE), default=_BYTE)


def always(table: Mapping[str, Any]) -> frozenset[str]:
    """Return the name ends of the parts that every integer weight has by the config: one without them is faulty."""
    weights = [each for each in _schemes(table) if each.get("type") == "int"]
    found = {
        "_zero_point": all(each.get("symmetric") is False for each in weights),
        "_g_idx": all(each.get("actorder") in ("group", "dynamic") for each in weights),
    }
    return frozenset(end for end, everywhere in found.items() if weights and everywhere)
