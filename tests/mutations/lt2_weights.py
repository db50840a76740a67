"""LT2xx and LT311: the values of an adapter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests import checkpoint_edits as edit
from tests.checkpoint_edits import raw, tensors
from tests.mutations import places
from tests.mutations.registry import CAUSAL, REWARD, Edit, breaks, enter


@breaks("LT208", CAUSAL)
def _never_moved(folder: Path) -> None:
    with tensors(folder) as table:
        for name, tensor in table.items():
            if ".lora_B." in name:
                table[name] = raw(*tensor.shape, value=0.0)


@breaks("LT208 either factor", CAUSAL, ignore=("LT219",))
def _a_factor_of_each_is_zero(folder: Path) -> None:
    with tensors(folder) as table:
        for name, tensor in table.items():
            if (".lora_A." if "layers.0." in name else ".lora_B.") in name:
                table[name] = raw(*tensor.shape, value=0.0)


def _keep_rows_of(rank: int, folder: Path) -> None:
    """Leave of every lora_B the rows that one of four ranks gathered, the others zero."""
    with tensors(folder) as table:
        for name, tensor in table.items():
            if ".lora_B." in name:
                each = -(-tensor.shape[0] // 4)
                columns = len(tensor.data) // tensor.shape[0]
                kept = tensor.data[rank * each * columns : (rank + 1) * each * columns]
                before = bytes(rank * each * columns)
                table[name] = replace(tensor, data=(before + kept).ljust(len(tensor.data), b"\0"))


@breaks("LT228", CAUSAL)
def _on_a_weight_that_is_read_directly(folder: Path) -> None:
    edit.renamed(folder, lambda name: name.replace("layers.0.self_attn.q_proj", "layers.0.mixer.dt_proj"))
    with edit.fields(folder, "adapter_config.json") as config:
        config["target_modules"] = [*config["target_modules"], "dt_proj"]


@breaks("LT311", REWARD)
def _head_of_zeros(folder: Path) -> None:
    with tensors(folder) as table:
        table[places.SCORE] = raw(*table[places.SCORE].shape, value=0.0)


@breaks("LT220", CAUSAL)
def _exploded(folder: Path) -> None:
    with tensors(folder) as table:
        name = f"{places.Q_PROJ}.lora_B.weight"
        table[name] = edit.scaled(table[name], 2.0**30)


@breaks("LT220 one bit", REWARD)
def _flipped_bit(folder: Path) -> None:
    with tensors(folder) as table:
        name = f"{places.Q_PROJ}.lora_B.weight"
        data = bytearray(table[name].data)
        data[43] ^= 0x40  # the highest bit of an exponent
        table[name] = edit.Raw("F32", (16, 4), bytes(data))


@breaks("LT220 large", REWARD)
def _large(folder: Path) -> None:
    with tensors(folder) as table:
        name = f"{places.Q_PROJ}.lora_B.weight"
        table[name] = edit.scaled(table[name], 2.0**20)


EDITS = {
    "LT227": Edit(CAUSAL, by=lambda folder: _keep_rows_of(0, folder)),
    "LT227 another rank": Edit(REWARD, by=lambda folder: _keep_rows_of(2, folder)),
    "LT208 reward": Edit(REWARD, by=_never_moved),
    "LT209": Edit(CAUSAL, tensors={"{Q_PROJ}.lora_A.weight": raw(4, 16, value=float("nan"))}),
    "LT209 in the head": Edit(REWARD, tensors={"{SCORE}": raw(1, 16, dtype="BF16", value=float("inf"))}),
    "LT219": Edit(CAUSAL, tensors={"{Q_PROJ}.lora_A.weight": edit.filled(0.25, 4, 16)}),
    "LT219 zero A": Edit(REWARD, tensors={"{Q_PROJ}.lora_A.weight": edit.filled(0.0, 4, 16)}),
    "LT219 B": Edit(REWARD, tensors={"{Q_PROJ}.lora_B.weight": edit.filled(1.0, 16, 4)}),
    "LT220 in the head": Edit(REWARD, tensors={"{SCORE}": raw(1, 16, dtype="BF16", value=1024.0)}),
}
enter(__name__, EDITS)
