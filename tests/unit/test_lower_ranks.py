"""The best approximation of a sum at a lower rank, from its factors, against a dense decomposition in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from lora_tool.formats.files import opened_regular
from lora_tool.formats.open_files import OpenFiles
from lora_tool.formats.weights import read_single
from lora_tool.plans.algebra.spectrum import Reader, compressed
from lora_tool.plans.algebra.terms import Factors, Term

Matrix = NDArray[Any]
OUT, WIDTH, RANK = 60, 45, 12


def orthonormal(seed: int, height: int) -> Matrix:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((height, RANK))).Q


def of_spectrum(values: Matrix) -> list[tuple[Matrix, Matrix]]:
    return [(orthonormal(0, OUT) * np.sqrt(values), (orthonormal(1, WIDTH) * np.sqrt(values)).T)]


def drawn(*seeds: int, ranks: tuple[int, ...] = (5, 7)) -> list[tuple[Matrix, Matrix]]:
    rng = np.random.default_rng(seeds)
    return [(rng.standard_normal((OUT, rank)), rng.standard_normal((rank, WIDTH))) for rank in ranks]


def cancelling(size: float) -> list[tuple[Matrix, Matrix]]:
    """Return one term, whose second half takes all but `size` of its first half away."""
    (b, a), (other, rest) = drawn(3, ranks=(6, 6))
    return [(np.concatenate([b, b + size * other], axis=1), np.concatenate([a, -a + size * rest]))]


def with_zeros() -> list[tuple[Matrix, Matrix]]:
    terms = drawn(4)
    terms[0][0][:, 2] = 0
    terms[1][1][3] = 0
    return terms


SUMS: dict[str, list[tuple[Matrix, Matrix]]] = {
    "drawn": drawn(1),
    "ranks beyond the matrix": drawn(2, ranks=(40, 50)),
    "flat": of_spectrum(np.ones(RANK)),
    "falling": of_spectrum(0.5 ** np.arange(RANK)),
    "steep": of_spectrum(10.0 ** -np.arange(RANK)),
    "one of all": of_spectrum(np.array([1.0] + [1e-7] * (RANK - 1))),
    "columns that cancel": cancelling(1e-2),
    "columns that nearly cancel": cancelling(1e-7),
    "columns of zeros": with_zeros(),
    "the same twice": drawn(5, ranks=(6,)) * 2,
}


def stored(folder: Path, terms: list[tuple[Matrix, Matrix]]) -> Factors:
    names = {f"{part}{at}": value for at, pair in enumerate(terms) for part, value in zip("ba", pair, strict=True)}
    save_file({name: np.ascontiguousarray(value) for name, value in names.items()}, folder / "file")
    table = read_single(folder / "file").tensors
    scales = [1.5, -0.25]
    held = tuple(Term(a=table[f"a{at}"], b=table[f"b{at}"], scale=scales[at]) for at in range(len(terms)))
    return Factors(module="m", terms=held, embedding=False, inner=(terms[0][1].shape[1],), outer=())


@pytest.mark.parametrize("name", SUMS)
def test_nothing_of_the_rank_is_nearer(name: str, tmp_path: Path) -> None:
    terms = SUMS[name]
    factors = stored(tmp_path, terms)
    left = np.concatenate([b * term.scale for (b, _), term in zip(terms, factors.terms, strict=True)], axis=1)
    delta = left @ np.concatenate([a for _, a in terms])
    values = np.linalg.svd(delta, compute_uv=False)
    size = np.linalg.norm(values)
    # what a product of these factors cannot be told from
    rounding = 1e-15 * sum(
        abs(term.scale) * np.linalg.norm(b) * np.linalg.norm(a)
        for (b, a), term in zip(terms, factors.terms, strict=True)
    )
    with OpenFiles(opened_regular) as files:
        reader = Reader(files=files)
        for asked in ({"rank": 1}, {"rank": 3}, {"rank": 8}, {"rank": 12}, {"keep": 0.9}, {"keep": 1 - 1e-9}):
            found = compressed(factors, reader, **asked)
            made = np.concatenate([b for b, _ in terms], axis=1) @ found.left.values
            made = made @ (np.concatenate([a for _, a in terms]).T @ found.right.values).T
            least = float(np.linalg.norm(values[found.rank :]))
            assert np.linalg.norm(made - delta) <= least * (1 + 1e-9) + 20 * rounding + 1e-14 * size
            assert abs(found.discarded - least**2) <= 1e-8 * least**2 + 1e-13 * size**2 + rounding**2
            assert found.energy == pytest.approx(size**2, rel=1e-9)
            assert found.rank == min(asked.get("rank", found.rank), np.count_nonzero(values > 20 * rounding))
            if "keep" in asked:
                assert found.discarded <= (1 - asked["keep"]) * size**2 * (1 + 1e-4)
