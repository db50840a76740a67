"""LT2xx: the tensors of an adapter do not fit each other."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests import checkpoint_edits as edit
from tests.checkpoint_edits import PREFIX, fields, raw, tensors
from tests.mutations import places
from tests.mutations.registry import CAUSAL, FIXTURES, REWARD, RUN, breaks


@breaks("LT201", CAUSAL)
def _without_b(folder: Path) -> None:
    with tensors(folder) as table:
        del table[f"{places.Q_PROJ}.lora_B.weight"]


@breaks("LT201 without A", REWARD)
def _without_a(folder: Path) -> None:
    with tensors(folder) as table:
        del table[f"{places.Q_PROJ}.lora_A.weight"]


@breaks("LT201 nothing but its magnitude", CAUSAL)
def _magnitude_alone(folder: Path) -> None:
    _dora(folder)
    with tensors(folder) as table:
        for part in "AB":
            del table[f"{places.Q_PROJ}.lora_{part}.weight"]


@breaks("LT202", CAUSAL)
def _ranks_disagree(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{places.Q_PROJ}.lora_B.weight"] = raw(16, 2)


@breaks("LT202 flat", CAUSAL)
def _flattened(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{places.Q_PROJ}.lora_B.weight"] = raw(64)


def _dora(folder: Path) -> None:
    with fields(folder) as config:
        config["use_dora"] = True
    with tensors(folder) as table:
        lengths = {name: tensor.shape[0] for name, tensor in table.items() if ".lora_B." in name}
        for name, rows in lengths.items():
            table[name.replace(".lora_B.weight", ".lora_magnitude_vector")] = raw(rows)


@breaks("LT202 magnitude", CAUSAL)
def _magnitude_of_another_length(folder: Path) -> None:
    _dora(folder)
    with tensors(folder) as table:
        table[f"{places.Q_PROJ}.lora_magnitude_vector"] = raw(12)


@breaks("LT202 magnitude as a column", CAUSAL)
def _magnitude_as_a_column(folder: Path) -> None:
    _dora(folder)
    with tensors(folder) as table:
        name = f"{places.Q_PROJ}.lora_magnitude_vector"
        table[name] = raw(*table[name].shape, 1)


@breaks("LT203", CAUSAL)
def _other_r(folder: Path) -> None:
    with fields(folder) as config:
        config["r"] = 8


@breaks("LT203 by pattern", CAUSAL)
def _no_rank_pattern(folder: Path) -> None:
    with fields(folder) as config:
        config["rank_pattern"] = {}


@breaks("LT204", CAUSAL)
def _swapped(folder: Path) -> None:
    with tensors(folder) as table:
        a, b = f"{places.DOWN_PROJ}.lora_A.weight", f"{places.DOWN_PROJ}.lora_B.weight"
        table[a], table[b] = table[b], table[a]


@breaks("LT204 everywhere", REWARD)
def _swapped_everywhere(folder: Path) -> None:
    edit.renamed(folder, lambda name: name.translate(str.maketrans("AB", "BA")) if ".lora_" in name else name)


@breaks("LT206", CAUSAL)
def _zero_size(folder: Path) -> None:
    with tensors(folder) as table:
        for name in table:
            table[name] = edit.emptied(table[name])


@breaks("LT206 one pair", CAUSAL)
def _one_zero_size(folder: Path) -> None:
    with tensors(folder) as table:
        for part in "AB":
            name = f"{places.Q_PROJ}.lora_{part}.weight"
            table[name] = edit.emptied(table[name])


@breaks("LT206 one factor", CAUSAL)
def _one_zero_factor(folder: Path) -> None:
    with tensors(folder) as table:
        name = f"{places.Q_PROJ}.lora_A.weight"
        table[name] = edit.emptied(table[name])


@breaks("LT206 with the head", REWARD)
def _zero_size_head(folder: Path) -> None:
    _zero_size(folder)


@breaks("LT206 in a run", RUN)
def _zero_size_with_tag(folder: Path) -> None:
    _zero_size(folder)
    shutil.copytree(FIXTURES / "zero" / "stage3-reward" / "global_step2", folder / "global_step2")


@breaks("LT212", CAUSAL)
def _integers(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{places.Q_PROJ}.lora_A.weight"] = raw(4, 16, dtype="I8")


@breaks("LT212 head", REWARD)
def _integer_head(folder: Path) -> None:
    with tensors(folder) as table:
        table[places.SCORE] = raw(1, 16, dtype="I8")


@breaks("LT212 norm", CAUSAL)
def _integer_norm(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{PREFIX}model.norm.weight"] = raw(16, dtype="I64")
    with fields(folder) as config:
        config["modules_to_save"] = ["model.norm"]


@breaks("LT218", CAUSAL)
def _dora_without_magnitude(folder: Path) -> None:
    with fields(folder) as config:
        config["use_dora"] = True


@breaks("LT218 magnitude without DoRA", CAUSAL)
def _magnitude_without_dora(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{places.Q_PROJ}.lora_magnitude_vector"] = raw(16)


@breaks("LT218 bias without lora_bias", CAUSAL)
def _bias_without_lora_bias(folder: Path) -> None:
    with tensors(folder) as table:
        table[f"{places.Q_PROJ}.lora_B.bias"] = raw(16)


@breaks("LT218 lora_bias without bias", CAUSAL)
def _lora_bias_without_bias(folder: Path) -> None:
    with fields(folder) as config:
        config["lora_bias"] = True
