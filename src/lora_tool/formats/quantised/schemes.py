"""What a config says of how weights are quantised: the sizes of tiles and codes, and the parts that every weight has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_tool.formats.quantised.parts import MATRIX

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
    """Return ends of names of what every weight of integers has, as the config says: without it, it is another weight."""
    weights = [each for each in _schemes(table) if each.get("type") == "int"]
    found = {
        "_zero_point": all(each.get("symmetric") is False for each in weights),
        "_g_idx": all(each.get("actorder") in ("group", "dynamic") for each in weights),
    }
    return frozenset(end for end, everywhere in found.items() if weights and everywhere)
