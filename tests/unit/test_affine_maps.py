"""What AutoTP cut, by DeepSpeed's own maps: slices whose elements end anywhere in a file come back as the whole."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_tool.core.tensors import DType, Span, StoredTensor, TensorSpec
from lora_tool.formats.affine_maps import cut_pieces, read_cuts
from lora_tool.formats.pieces import assembled
from lora_tool.formats.stored import read_part

affine = pytest.importorskip("deepspeed.checkpoint.affine")
SHAPE = (24, 10)
MAPS = {
    "rows": lambda: affine.contiguous_split_map(SHAPE, [7, 17], 0),
    "columns": lambda: affine.contiguous_split_map(SHAPE, [3, 7], 1),
    "whole": lambda: affine.replicated_map(SHAPE, 2),
    "q, k and v": lambda: affine.sub_param_map(SHAPE, [12, 6, 6], [[5, 7], [3, 3], [2, 4]], 0),
    "columns of two": lambda: affine.sub_param_map(SHAPE, [4, 6], [[1, 3], [2, 4]], 1),
    "q cut, k and v on all": lambda: affine.segmented_map(SHAPE, [(12, False), (12, True)], 0, 2, [[4, 8]]),
    "chosen blocks": lambda: affine.block_gather_map(SHAPE, {0: [0, 3, 4], 1: [1, 2, 5]}, 4, 0),
}


def info(made: Any) -> dict[str, Any]:
    return {"affine_map": {"version": 1, "params": {r"^model\.qkv\.weight$": made.to_dict()}}}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("seed", range(3))
def test_the_slices_make_the_whole(name: str, seed: int, tmp_path: Path) -> None:
    import torch

    chance, made = random.Random(seed), MAPS[name]()
    whole = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE)
    ((parameter, cut),) = (read_cuts(info(made)) or {}).items()
    assert (parameter, cut.shape) == ("model.qkv.weight", SHAPE)
    pieces = []
    for rank in range(2):
        part = made.extract(whole, rank).contiguous()
        path = tmp_path / f"{rank}.bin"
        path.write_bytes(part.numpy().tobytes())
        ends = sorted(chance.sample(range(1, part.numel()), 3))  # ZeRO cuts a slice anywhere
        cuts = zip((0, *ends), (*ends, part.numel()), strict=True)
        spans = tuple(Span(path=path, offset=4 * start, nbytes=4 * (stop - start)) for start, stop in cuts)
        held = StoredTensor(spec=TensorSpec(name=parameter, dtype=DType.F32, shape=tuple(part.shape)), spans=spans)
        pieces += [piece for block in cut.blocks[rank] if block.owner == rank for piece in cut_pieces(block, held)]
    found = assembled(TensorSpec(name=parameter, dtype=DType.F32, shape=SHAPE), pieces)
    assert np.array_equal(np.frombuffer(read_part(found, 0, found.nbytes), "<f4").reshape(SHAPE), whole.numpy())


@pytest.mark.parametrize(
    "broken",
    [
        {"logical_shape": [-1, 10]},
        {"logical_shape": "ab"},
        {"logical_shape": [24]},
        {"ranks": []},
        {"ranks": {"0": {}}},
        {"ranks": {0: {"shard_shape": [7, 10], "pieces": [{"shape": [7, 10], "source": [0, [1, 10]]}]}}},
    ],
)
def test_a_map_that_is_not_understood_gives_no_cut(broken: dict[str, Any]) -> None:
    table = info(MAPS["rows"]())
    (entry,) = table["affine_map"]["params"].values()
    entry.update(broken)
    assert not any(cut.blocks for cut in (read_cuts(table) or {}).values())


def test_any_change_of_a_number_is_read_or_left_out() -> None:
    chance = random.Random(0)
    text = json.dumps(info(MAPS["q, k and v"]()))
    numbers = list(re.finditer(r"\d+", text))
    for _ in range(500):
        number, other = chance.choice(numbers), chance.choice(["0", "9", "-1", "99", "1e9", "null", "[]"])
        table = json.loads(text[: number.start()] + other + text[number.end() :])
        for entry in table["affine_map"]["params"].values():
            entry["ranks"] = {int(rank) if rank.isdecimal() else rank: of for rank, of in entry["ranks"].items()}
        for cut in (read_cuts(table) or {}).values():
            for rank, blocks in cut.blocks.items():
                for block in blocks:
                    inside = zip(block.held, block.sizes, cut.slices[rank], strict=True)
                    assert all(start >= 0 and start + size <= most for start, size, most in inside)
