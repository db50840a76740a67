"""LT2xx and LT311: the values of an adapter."""

from __future__ import annotations

from dataclasses import replace

from tests import checkpoint_edits as edit
from tests.checkpoint_edits import Raw, raw
from tests.mutations.registry import CAUSAL, REWARD, Edit, enter


def _zero(tensor: Raw) -> Raw:
    return raw(*tensor.shape, dtype=tensor.dtype, value=0.0)


def _rows_of(rank: int, tensor: Raw) -> Raw:
    """Leave the rows that one of four ranks gathered, the others zero."""
    each, columns = -(-tensor.shape[0] // 4), len(tensor.data) // tensor.shape[0]
    first, last = (each * columns * at for at in (rank, rank + 1))
    return replace(tensor, data=(bytes(first) + tensor.data[first:last]).ljust(len(tensor.data), b"\0"))


def _one_bit(tensor: Raw) -> Raw:
    data = bytearray(tensor.data)
    data[43] ^= 0x40  # the highest bit of an exponent
    return replace(tensor, data=bytes(data))


EDITS = {
    "LT208": Edit(CAUSAL, changed={"*.lora_B.*": _zero}),
    "LT208 reward": Edit(REWARD, changed={"*.lora_B.*": _zero}),
    "LT208 either factor": Edit(
        CAUSAL, changed={"*.layers.0.*.lora_A.*": _zero, "*.layers.1.*.lora_B.*": _zero}, options={"ignore": ("LT219",)}
    ),
    "LT208 most": Edit(CAUSAL, changed={"*.layers.0.*.lora_B.*": _zero}),
    "LT208 some": Edit(CAUSAL, changed={"*.layers.0.*.q_proj.lora_B.*": _zero}, quiet=True),
    "LT228 with a short path": Edit(
        CAUSAL,
        renamed=lambda name: name.replace("model.layers.0.self_attn.q_proj", "head.attention.out_proj"),
        target="out_proj",
    ),
    "LT227": Edit(CAUSAL, changed={"*.lora_B.*": lambda tensor: _rows_of(0, tensor)}),
    "LT227 another rank": Edit(REWARD, changed={"*.lora_B.*": lambda tensor: _rows_of(2, tensor)}),
    "LT228": Edit(
        CAUSAL,
        renamed=lambda name: name.replace("layers.0.self_attn.q_proj", "layers.0.mixer.dt_proj"),
        target="dt_proj",
    ),
    "LT311": Edit(REWARD, changed={"{SCORE}": _zero}),
    "LT220": Edit(CAUSAL, changed={"{Q_PROJ}.lora_B.weight": lambda tensor: edit.scaled(tensor, 2.0**30)}),
    "LT220 large": Edit(REWARD, changed={"{Q_PROJ}.lora_B.weight": lambda tensor: edit.scaled(tensor, 2.0**20)}),
    "LT220 one bit": Edit(REWARD, changed={"{Q_PROJ}.lora_B.weight": _one_bit}),
    "LT209": Edit(CAUSAL, tensors={"{Q_PROJ}.lora_A.weight": raw(4, 16, value=float("nan"))}),
    "LT209 in the head": Edit(REWARD, tensors={"{SCORE}": raw(1, 16, dtype="BF16", value=float("inf"))}),
    "LT219": Edit(CAUSAL, tensors={"{Q_PROJ}.lora_A.weight": edit.filled(0.25, 4, 16)}),
    "LT219 zero A": Edit(REWARD, tensors={"{Q_PROJ}.lora_A.weight": edit.filled(0.0, 4, 16)}),
    "LT219 B": Edit(REWARD, tensors={"{Q_PROJ}.lora_B.weight": edit.filled(1.0, 16, 4)}),
    "LT220 in the head": Edit(REWARD, tensors={"{SCORE}": raw(1, 16, dtype="BF16", value=1024.0)}),
}
enter(__name__, EDITS)
