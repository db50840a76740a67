"""LoRA of which one factor of a pair is missing: PEFT loads the other, and initialises what is not there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from lora_tool.adapters.view import LoraLayer
from lora_tool.core.keys import AdapterKey, Part

_ZEROS, _NOISE = "zeros", "noise"
_HALF_SAVED = "use another step: a save that was interrupted, or of one pipeline stage, has a part of the tensors"
_OTHER_HALF = {
    Part.LORA_A: (Part.LORA_B, _ZEROS),
    Part.LORA_B: (Part.LORA_A, _NOISE),
    Part.EMBEDDING_A: (Part.EMBEDDING_B, _NOISE),
    Part.EMBEDDING_B: (Part.EMBEDDING_A, _ZEROS),
}
"""Factor → the other of its pair, and what PEFT puts there where it is missing."""


class HalfPair(NamedTuple):
    """A pair that is not whole."""

    name: str
    """A tensor of it that is there."""
    lacking: tuple[str, ...]
    """What is not there: one factor, or both where only a magnitude is."""
    instead: str
    """What PEFT puts in its place."""
    hint: str | None = None
    """What to do, where that depends on the folder."""

    @property
    def message(self) -> str:
        """What is wrong, as a finding says it of the tensor."""
        are = "are" if self.lacking[1:] else "is"
        return f"its {' and '.join(self.lacking)} {are} missing, and PEFT would put {self.instead} there"


def half_pair_in(layer: LoraLayer) -> Iterator[HalfPair]:
    """Yield the pair of the layer if it is not whole."""
    lacking = tuple(part for part, factor in (("lora_A", layer.a), ("lora_B", layer.b)) if factor is None)
    if lacking:
        name = (layer.a or layer.b or layer.any_tensor).name
        yield HalfPair(name, lacking, _ZEROS if layer.zero_initialised is None else _NOISE)


def half_pairs_among(parsed: Mapping[str, AdapterKey]) -> Iterator[HalfPair]:
    """Yield the pairs of which a checkpoint, whose names are `parsed`, has one factor."""
    held = {(key.adapter_name, key.module, key.part) for key in parsed.values()}
    for name, key in parsed.items():
        other, instead = _OTHER_HALF.get(key.part, (key.part, ""))
        if (key.adapter_name, key.module, other) not in held:
            yield HalfPair(name, (other.value,), instead, _HALF_SAVED)
