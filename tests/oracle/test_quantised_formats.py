"""Weights as libraries quantised them, with a change merged into them: rounded once, with the kernel and without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from lora_tool.core.tensors import DType, FileStamp, StoredTensor, TensorAction, TensorSpec
from lora_tool.execution.kernels import AnyArray, round_to_odd
from lora_tool.execution.local_engine import Worker, batches_of
from lora_tool.execution.reading import Sources
from lora_tool.formats.quantised.arrays import STORED
from lora_tool.formats.quantised.encodings import dequantised
from lora_tool.formats.safetensors import scan_file
from lora_tool.formats.stored import read_part
from lora_tool.native.library import VARIABLE
from lora_tool.plans.core.operation import LoraTerm
from lora_tool.plans.core.ops import DoraDelta, LoraDelta, Precision
from lora_tool.plans.core.steps import Shard, Step
from tests.quantised_samples import KEPT
from tests.unit.test_quantised_weights import NAMES, encoding_in


def numbers(weight: StoredTensor) -> AnyArray:
    """Return what a weight stands for."""
    raw = np.frombuffer(read_part(weight, 0, weight.nbytes), STORED[weight.dtype])
    return raw.astype(np.float64).reshape(weight.shape)


def merged_values(
    weight: StoredTensor,
    b: AnyArray,
    a: AnyArray,
    folder: Path,
    *,
    scaling: float,
    precision: Precision = Precision.FLOAT32,
    magnitude: AnyArray | None = None,
) -> AnyArray:
    """Return the bfloat16 values that a worker writes of W + scaling·B·A, of DoRA where there is a magnitude."""
    save_file({"a": a, "b": b} | ({} if magnitude is None else {"m": magnitude}), folder / "factors.safetensors")
    factors = scan_file(folder / "factors.safetensors").tensors
    term = LoraTerm(a=factors["a"], b=factors["b"], scaling=scaling)
    delta: LoraDelta | DoraDelta = LoraDelta(source=weight, terms=(term,))
    if magnitude is not None:
        delta = DoraDelta(source=weight, term=term, magnitude=factors["m"])
    out = TensorSpec(name="m.weight", dtype=DType.BF16, shape=weight.shape)
    shard = Shard(filename="merged", steps=(Step(out=out, op=delta, action=TensorAction.MERGED, reason=""),))
    with Sources([FileStamp.of(path) for path in (KEPT, factors["a"].path)]) as sources:
        worker = Worker(sources, precision)
        with (folder / "merged").open("wb+") as file:
            for unit in (unit for batch in batches_of(shard, precision) for unit in batch):
                worker.write(unit, file.fileno())
            file.seek(len(shard.header))
            found = np.frombuffer(file.read(), STORED[DType.BF16])
    return np.asarray(found.astype(np.float64).reshape(weight.shape))


def ulps(found: AnyArray, exact: AnyArray) -> AnyArray:
    """Return how many bfloat16 numbers lie between values and the nearest to the exact ones."""
    nearest = round_to_odd(exact).astype(STORED[DType.BF16])
    bits = [each.astype(STORED[DType.BF16]).view(np.int16).astype(np.int32) for each in (found, nearest)]
    of_line = [np.where(each < 0, -(each & 0x7FFF), each) for each in bits]
    return np.asarray(np.abs(of_line[0] - of_line[1]))


@pytest.mark.parametrize("kernel", ["auto", "off"])
def test_a_change_of_every_librarys_weight_is_rounded_once(
    kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table has the share of values that are the nearest in bfloat16, and how far the others are, in ulp."""
    monkeypatch.setenv(VARIABLE, kernel)
    random, shares = np.random.default_rng(3), {}
    for sample in NAMES:
        weight = dequantised(encoding_in(sample))
        rows, columns = weight.shape
        b, a = (random.standard_normal(shape, np.float32) / 8 for shape in ((rows, 4), (4, columns)))
        found = merged_values(weight, b, a, tmp_path, scaling=0.3)
        apart = ulps(found, numbers(weight) + np.float64(np.float32(0.3)) * (b.astype(np.float64) @ a))
        shares[sample] = float((apart == 0).mean()), int(apart.max())
    listed = "".join(f"\n{name:<40}{share:>9.2%} nearest, {most} ulp" for name, (share, most) in shares.items())
    assert all(most <= 1 for _, most in shares.values()), listed
    assert min(share for share, _ in shares.values()) > 0.998, listed  # of a few thousand values
    assert sum(share for share, _ in shares.values()) / len(shares) > 0.9995, listed


@pytest.mark.parametrize("kernel", ["auto", "off"])
@pytest.mark.parametrize("sample", ["fp8-channel", "bnb-int8", "int4-group"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_where_w_and_its_change_cancel_what_is_left_is_rounded_as_well(
    sample: str, dora: bool, kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of W + ΔW is smaller than a float32 sum of their size is off."""
    monkeypatch.setenv(VARIABLE, kernel)
    weight = dequantised(encoding_in(sample))
    rows, columns = weight.shape
    random, base, scaling = np.random.default_rng(4), numbers(weight), 0.25
    b, a = (random.standard_normal(shape, np.float32) / 8 for shape in ((rows, 4), (4, columns)))
    gone = base[:, :8] + scaling * (b.astype(np.float64) @ a[:, :8])
    b, a = np.hstack([b, (-gone / scaling).astype(np.float32)]), np.vstack([a, np.eye(8, columns, dtype=np.float32)])
    exact = base + scaling * (b.astype(np.float64) @ a)
    sizes = np.abs(base) + scaling * (np.abs(b).astype(np.float64) @ np.abs(a))
    assert np.abs(exact[:, :8]).max() < 2**-20 * sizes.max(), "nothing cancels"
    magnitude = np.abs(random.standard_normal(rows, np.float32)) if dora else None
    if magnitude is not None:
        exact *= (magnitude / np.linalg.norm(exact, axis=1))[:, None]
    found = merged_values(weight, b, a, tmp_path, scaling=scaling, precision=Precision.FLOAT64, magnitude=magnitude)
    assert ulps(found, exact).max() <= 1
