"""AutoRound's quantisation tables, in the words of the formats that it packs codes as: GPTQ's, AWQ's and compressed-tensors'.

`packing_format` is `auto_round:KIND`, in older files with a kernel's name behind it, or called `backend`. Zeros are stored
less one by `auto_gptq`, and as they are without a kind and by `gptqmodel` (auto_round 0.16, `inference/backend.py`: GPTQ_FORMAT,
GPTQ_FORMAT_NO_ZP). A file that says nothing is `auto_gptq`'s, as its loader in transformers has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

METHODS = frozenset({"auto-round", "intel/auto-round"})
_LESS_ONE = {"quant_method": "gptq", "checkpoint_format": "gptq"}
_AS_THEY_ARE = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
_AWQ = {"quant_method": "awq", "version": "gemm"}
_COLUMNS = {
    "": _AS_THEY_ARE,
    "auto": _LESS_ONE,
    "auto_awq": _AWQ,
    "auto_gptq": _LESS_ONE,
    "awq": _AWQ,
    "gptq": _LESS_ONE,
    "gptqmodel": _AS_THEY_ARE,
}
"""Kind → the fields of GPTQ's or AWQ's table for such codes."""
_TILES = frozenset({"fake", "fp8", "fp8_static", "llm_compressor"})
"""Kinds whose tensors are called as compressed-tensors calls them, and of `fake`, which stores plain weights."""
_FLOATS = ("mx_fp", "nv_fp", "fp")
_PLAIN = 16
_NO_OVERALL_SCALE = "nvfp4-e5m3-pack-quantized"
"""What AutoRound exports for compressed-tensors, which does not know it: its scales are floats of another eight bits."""


def in_known_words(table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return AutoRound's table as one of the format that its codes are packed as; any other as it is."""
    if table.get("quant_method") not in METHODS:
        return table
    size = table.get("group_size")
    tiles = {"quant_method": "fp8", "weight_block_size": size} if isinstance(size, list) else {}
    return {**table, **_COLUMNS.get(_kind(table), tiles), "dynamic": table.get("extra_config")}


def not_read(table: Mapping[str, Any]) -> str | None:
    """Return why the weights of a table that AutoRound wrote are not read, as the end of a sentence about one of them;
    None where they are, and for other tables.
    """
    why = None
    if table.get("format") == _NO_OVERALL_SCALE:
        why = f"is packed as {_NO_OVERALL_SCALE}"
    elif table.get("quant_method") not in METHODS:
        return None
    elif table.get("rotation_config") or table.get("spinquant_config"):
        why = "is in a model whose layers rotate their inputs (`rotation_config`)"
    elif _kind(table) not in _COLUMNS.keys() | _TILES:
        why = f"is packed as {_packing(table)}"
    elif (other := _other_type(table)) is not None:
        why = f"is packed as {_packing(table)} with values of {other}"
    elif _kind(table) in _COLUMNS and type(bits := table.get("act_bits")) is int and bits < _PLAIN:
        why = f"has codes that are rounded again for inputs of {bits} bits"
    return why and f"{why}, which lora-tool does not read"


def _other_type(table: Mapping[str, Any]) -> str | None:
    """Return a `data_type` of all or some modules that codes of the table's kind do not have; None without one."""
    kind, extra = _kind(table), table.get("extra_config")
    layers = [each for each in extra.values() if isinstance(each, dict)] if isinstance(extra, dict) else []
    known = {"fake": ("int", *_FLOATS)}.get(kind, ("int",) if kind in _COLUMNS else _FLOATS)
    said = (each.get("data_type") for each in (table, *layers) if each.get("bits") != _PLAIN)
    return next((str(each) for each in said if each is not None and not str(each).startswith(known)), None)


def _packing(table: Mapping[str, Any]) -> str:
    return str(table.get("packing_format") or table.get("backend") or "auto_round:gptq")


def _kind(table: Mapping[str, Any]) -> str:
    """Return KIND of `auto_round:KIND:KERNEL`, empty where none is given. Anything else is returned whole."""
    packing = _packing(table)
    first, *rest = packing.split(":")
    if first == "auto_round":
        return rest[0] if rest else ""
    return packing
