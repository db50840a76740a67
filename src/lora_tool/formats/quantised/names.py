"""What a quantised model is called, by its config and its name, and which 16-bit model it was made from."""

from __future__ import annotations

import re
from pathlib import Path

from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.hub_names import hub_id_of
from lora_tool.formats.model_config import ModelConfig
from lora_tool.formats.quantised.auto_round import METHODS as AUTO_ROUND

_BITS = (
    r"bnb|nf4|[2-8](?:\.\d+)?-?(?:bit|bpw)|gptq|awq|(?:nv|mx)?fp[48]|gguf|exl[23]|hqq|aqlm|int[48]|i?q[2-8](?:_\w+)?"
    r"|w[248]a(?:16|8|4)"
)
"""The parts of a name that mean quantised weights, as those who publish them write it."""
_BESIDE = r"unsloth|mlx|dynamic|static|block|i1|dwq|qat|kv|torchao|quantized|\d+g"
"""Parts that stand beside those, and say nothing alone."""
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
"""What `quant_method` may say of a model whose weights are decoded; None where the files alone say it."""
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

    It is told by the name on the Hub, by the config's `_name_or_path` and by the card in `folder`; where these say
    several, all are named.
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
