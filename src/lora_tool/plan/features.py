"""What an adapter's config asks for that a merge refuses by name, each with its way out."""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.errors import UnsupportedAdapter
from lora_tool.formats.adapter_config import INITS_THAT_KEEP_THE_BASE, AdapterConfig

_IN_MEMORY = "merge it with PEFT: PeftModel.from_pretrained(model, adapter).merge_and_unload()"
_REFUSED_FIELDS = {
    "megatron_config": "layers split by Megatron",
    "velora_config": "VeLoRA",
    "alora_invocation_tokens": "activated LoRA (aLoRA), which acts on some tokens only and cannot be merged",
    "use_qalora": "QALoRA, whose delta lives on a quantised base",
    "monteclora_config": "MonteCLoRA",
    "layer_replication": "layer replication: the adapted model has layers that the base does not",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow routing, which picks experts per token and cannot be merged",
    "kasa_config": "KaSA, which truncates the base weights first",
}


def refusals(config: AdapterConfig) -> Iterator[str]:
    """Yield a name for every feature of the adapter that cannot be merged exactly here."""
    if config.peft_type != "LORA":
        yield f"peft_type {config.peft_type}: not LoRA"
    for name in config.refused:
        yield f"`{name}`: {_REFUSED_FIELDS[name]}"
    if config.init_lora_weights not in INITS_THAT_KEEP_THE_BASE:
        yield (
            f"`init_lora_weights` {config.init_lora_weights}: PEFT changes the base weights when it builds the layers, "
            "so the delta does not belong to the base on disk"
        )
    if config.target_parameters and (config.use_dora or config.lora_bias or config.fan_in_fan_out):
        yield "`target_parameters` with DoRA, `lora_bias` or `fan_in_fan_out`, which PEFT does not have"


def require_mergeable(config: AdapterConfig) -> None:
    """Return if a merge can be exact. Raises `UnsupportedAdapter` naming every feature in the way."""
    found = tuple(refusals(config))
    if found:
        raise UnsupportedAdapter(f"{config.path}: cannot be merged exactly: " + "; ".join(found), hint=_IN_MEMORY)
