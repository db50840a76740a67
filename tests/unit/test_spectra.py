"""Spectra of ΔW against numpy's SVD of the formed product."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from lora_tool.checkpoints import AdapterDir, ModelDir, open_checkpoint
from lora_tool.core.tensors import DType
from lora_tool.formats.stored_numbers import STORED, widened
from lora_tool.workflows.inspection.spectra import Spectrum, spectra

FIXTURES = Path(__file__).parents[2] / "fixtures"


def opened() -> tuple[AdapterDir, ModelDir]:
    adapter = open_checkpoint(FIXTURES / "reward-qwen2" / "adapter")
    base = open_checkpoint(FIXTURES / "reward-qwen2" / "base")
    assert isinstance(adapter, AdapterDir)
    assert isinstance(base, ModelDir)
    return adapter, base


def test_are_the_singular_values_of_the_formed_product() -> None:
    adapter, base = opened()
    stored = load_file(FIXTURES / "reward-qwen2" / "adapter" / "adapter_model.safetensors")
    found = {item.module: item for item in spectra(adapter, base)}
    assert len(found) == sum(name.endswith("lora_A.weight") for name in stored)
    for module, item in found.items():
        prefix = f"base_model.model.{module}"
        assert adapter.config is not None
        delta = (stored[f"{prefix}.lora_B.weight"].double() @ stored[f"{prefix}.lora_A.weight"].double()).numpy()
        delta *= adapter.config.scaling(module)
        expected = np.linalg.svd(delta, compute_uv=False)[: item.rank]
        np.testing.assert_allclose(item.singular_values, expected, rtol=1e-9, atol=1e-12 * expected[0])
        assert item.norm == pytest.approx(np.linalg.norm(delta), rel=1e-12)
        assert item.energy(item.rank) == pytest.approx(1)
        assert item.energy(1) == pytest.approx(expected[0] ** 2 / (expected**2).sum())
        assert 1 <= item.effective_rank <= item.rank


def test_a_weight_of_the_base_gives_the_relative_norm() -> None:
    adapter, base = opened()
    without = next(spectra(adapter))
    item = next(spectra(adapter, base))
    assert without.relative_norm is None
    assert item.base_norm is not None
    assert item.relative_norm == item.norm / item.base_norm


@pytest.mark.parametrize(
    ("values", "effective", "energy"), [((1.0, 1.0), 2, 0.5), ((2.0, 0.0), 1, 1), ((0.0, 0.0), 0, math.nan)]
)
def test_effective_rank_and_energy(values: tuple[float, ...], effective: float, energy: float) -> None:
    item = Spectrum(module="m", target="m", layer=None, rank=2, singular_values=values, base_norm=None)
    assert item.effective_rank == pytest.approx(effective)
    assert item.energy(1) == pytest.approx(energy, nan_ok=True)


def test_what_rounding_leaves_is_what_a_merge_leaves() -> None:
    adapter, base = opened()
    stored = load_file(FIXTURES / "reward-qwen2" / "adapter" / "adapter_model.safetensors")
    weights = {
        name: t
        for path in (FIXTURES / "reward-qwen2" / "base").glob("*.safetensors")
        for name, t in load_file(path).items()
    }
    assert adapter.config is not None
    for item in spectra(adapter, base):
        prefix = f"base_model.model.{item.module}"
        delta = stored[f"{prefix}.lora_B.weight"].double() @ stored[f"{prefix}.lora_A.weight"].double()
        delta *= adapter.config.scaling(item.module)
        before = weights[f"{item.module}.weight"]
        change = (before.double() + delta).to(before.dtype).double() - before.double()
        assert item.kept == pytest.approx(float((delta * change).sum() / delta.norm() / change.norm()), rel=1e-9)
    assert next(spectra(adapter)).kept is None


@pytest.mark.parametrize(("dtype", "bits"), [(DType.F32, 0x7F800001), (DType.BF16, 0x7F81), (DType.F16, 0x7C01)])
def test_a_signalling_nan_is_widened_without_a_warning(dtype: DType, bits: int) -> None:
    stored = np.array([bits], f"<u{dtype.bits // 8}").view(STORED[dtype])
    assert np.isnan(widened(stored, dtype)).all()
