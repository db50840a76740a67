from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lora_tool.adapters.view import view_of
from lora_tool.checkpoints import AdapterDir, open_checkpoint
from lora_tool.core.tensors import DType, TensorSpec
from lora_tool.formats.safetensors import build_header
from lora_tool.workflows.inspection.factors import layer_norms
from lora_tool.workflows.inspection.folders import inspect_checkpoint
from lora_tool.workflows.inspection.model import (
    AdapterInspection,
    Inspection,
    ModelInspection,
    RunInspection,
    ShardedInspection,
)
from lora_tool.workflows.inspection.targets import short_names, spread
from tests.tiny_plans import numbers, save_base

FIXTURES = Path(__file__).parents[2] / "fixtures"
PREFIX = "base_model.model.model.layers"
Array = npt.NDArray[Any]


def stored(values: Array, dtype: DType) -> tuple[bytes, Array]:
    """Return the values' bytes in `dtype`, and what those bytes mean."""
    if dtype is DType.BF16:
        bits = (values.astype("<f4").view("<u4") >> 16).astype("<u2")
        return bits.tobytes(), (bits.astype("<u4") << 16).view("<f4").astype(np.float64)
    kind = {DType.F16: "<f2", DType.F32: "<f4", DType.F64: "<f8"}[dtype]
    return values.astype(kind).tobytes(), values.astype(kind).astype(np.float64)


def write_adapter(root: Path, tensors: dict[str, tuple[Array, DType]], **config: object) -> dict[str, Array]:
    specs, data, meant = [], b"", {}
    for name, (values, dtype) in tensors.items():
        raw, meant[name] = stored(values, dtype)
        specs.append(TensorSpec(name=name, dtype=dtype, shape=values.shape))
        data += raw
    root.mkdir(exist_ok=True)
    (root / "adapter_model.safetensors").write_bytes(build_header(specs, {}) + data)
    fields = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **config}
    (root / "adapter_config.json").write_text(json.dumps(fields))
    return meant


def inspect_adapter(root: Path, *, norms: bool | None = None) -> AdapterInspection:
    inspection = inspect_checkpoint(open_checkpoint(root), norms=norms)
    assert isinstance(inspection, AdapterInspection)
    return inspection


def opened(root: Path) -> AdapterDir:
    adapter = open_checkpoint(root)
    assert isinstance(adapter, AdapterDir)
    return adapter


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F16, DType.F32, DType.F64])
def test_norms_are_those_of_the_formed_product(tmp_path: Path, dtype: DType) -> None:
    names = f"{PREFIX}.0.self_attn.q_proj.lora_A.weight", f"{PREFIX}.0.self_attn.q_proj.lora_B.weight"
    tensors = {names[0]: (normal(4, 300), dtype), names[1]: (normal(200, 4, seed=1), dtype)}
    meant = write_adapter(tmp_path / "a", tensors)
    layers = view_of(opened(tmp_path / "a")).layers
    (norms,) = layer_norms(layers)
    a, b = (meant[name] for name in names)
    assert layers[0].scaling == 2
    assert norms == pytest.approx((np.linalg.norm(a), np.linalg.norm(b), np.linalg.norm(2 * b @ a)), rel=1e-12)


def test_a_product_that_nearly_vanishes_is_not_lost(tmp_path: Path) -> None:
    a, b = normal(2, 50), normal(40, 2, seed=1)
    a[1], b[:, 1] = a[0] * (1 + 1e-4), -b[:, 0]
    names = f"{PREFIX}.0.q_proj.lora_A.weight", f"{PREFIX}.0.q_proj.lora_B.weight"
    meant = write_adapter(tmp_path / "a", {names[0]: (a, DType.F32), names[1]: (b, DType.F32)}, r=2, lora_alpha=2)
    (norms,) = layer_norms(view_of(opened(tmp_path / "a")).layers)
    assert norms is not None
    delta = norms[2]
    assert delta == pytest.approx(np.linalg.norm(meant[names[1]] @ meant[names[0]]), rel=1e-6)


def test_blocks_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(FIXTURES / "reward-qwen2" / "adapter", tmp_path / "a")
    whole = layer_norms(view_of(opened(tmp_path / "a")).layers)
    monkeypatch.setattr("lora_tool.workflows.inspection.factors.BLOCK", 12)
    blocks = layer_norms(view_of(opened(tmp_path / "a")).layers)
    assert blocks == [pytest.approx(values, rel=1e-12) for values in whole]


def test_nan_is_shown_and_not_hidden(tmp_path: Path) -> None:
    a = normal(4, 8)
    a[2, 3] = math.nan
    tensors = {
        f"{PREFIX}.0.q_proj.lora_A.weight": (a, DType.F32),
        f"{PREFIX}.0.q_proj.lora_B.weight": (normal(8, 4), DType.F32),
    }
    write_adapter(tmp_path / "a", tensors)
    (target,) = inspect_adapter(tmp_path / "a").targets
    assert target.norms is not None
    assert target.norms.delta is not None
    assert math.isnan(target.norms.a.most)
    assert math.isnan(target.norms.delta.most)


def test_the_reward_adapter() -> None:
    adapter = inspect_adapter(FIXTURES / "reward-qwen2" / "adapter")
    assert (adapter.kind, adapter.task_type, adapter.base_model) == ("adapter", "SEQ_CLS", "../base")
    assert {target.name for target in adapter.targets} == {
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    }
    assert all(target.layers == (0, 1) and target.rank == 4 and target.scaling == 2 for target in adapter.targets)
    assert [(tensor.name, tensor.shape) for tensor in adapter.head] == [("base_model.model.score.weight", (1, 16))]
    assert adapter.saved == adapter.others == ()
    assert sum(adapter.dtypes.values()) == adapter.parameters


def test_ranks_and_scalings_that_differ_are_rows_of_their_own(tmp_path: Path) -> None:
    ranks = {0: 4, 1: 4, 2: 8}
    tensors = {}
    for layer, rank in ranks.items():
        tensors[f"{PREFIX}.{layer}.q_proj.lora_A.weight"] = (normal(rank, 8), DType.F32)
        tensors[f"{PREFIX}.{layer}.q_proj.lora_B.weight"] = (normal(8, rank), DType.F32)
    write_adapter(tmp_path / "a", tensors, rank_pattern={"layers.2.q_proj": 8}, use_rslora=True)
    adapter = inspect_adapter(tmp_path / "a")
    rows = [(target.name, target.layers, target.rank, target.scaling) for target in adapter.targets]
    assert rows == [("q_proj", (0, 1), 4, 4.0), ("q_proj", (2,), 8, pytest.approx(8 / math.sqrt(8)))]
    assert adapter.variants == ("rsLoRA",)


def test_embeddings_and_named_adapters(tmp_path: Path) -> None:
    tensors = {
        "base_model.model.model.embed_tokens.lora_embedding_A": (normal(4, 30), DType.F32),
        "base_model.model.model.embed_tokens.lora_embedding_B": (normal(8, 4), DType.F32),
        f"{PREFIX}.0.q_proj.lora_A.default.weight": (normal(4, 8), DType.F32),
        f"{PREFIX}.0.q_proj.lora_B.default.weight": (normal(8, 4), DType.F32),
        f"{PREFIX}.0.q_proj.lora_A.reference.weight": (normal(4, 8), DType.F32),
        f"{PREFIX}.0.q_proj.lora_B.reference.weight": (normal(8, 4) * 2, DType.F32),
    }
    write_adapter(tmp_path / "a", tensors)
    targets = {target.name: target for target in inspect_adapter(tmp_path / "a").targets}
    assert list(targets) == ["embed_tokens", "q_proj (default)", "q_proj (reference)"]
    one, other = targets["q_proj (default)"].norms, targets["q_proj (reference)"].norms
    assert one is not None
    assert other is not None
    assert other.b.most == pytest.approx(2 * one.b.most)


def test_a_broken_pair_has_no_rank_and_no_norms(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", {f"{PREFIX}.0.q_proj.lora_A.weight": (normal(4, 8), DType.F32)})
    (target,) = inspect_adapter(tmp_path / "a").targets
    assert (target.rank, target.b_shape, target.norms) == (None, None, None)


def test_norms_only_where_asked_for() -> None:
    adapter = inspect_adapter(FIXTURES / "reward-qwen2" / "adapter", norms=False)
    assert all(target.norms is None for target in adapter.targets)


def test_a_model() -> None:
    model = inspect_checkpoint(open_checkpoint(FIXTURES / "causal-llama" / "base"))
    assert isinstance(model, ModelInspection)
    assert (model.model_type, model.layers, model.tied) == ("llama", 2, False)
    assert [tensor.name for tensor in model.head] == ["lm_head.weight"]
    assert [name for name, _ in model.files] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]


EXPERTS = "model.layers.0.mlp.experts."
LAYOUTS: dict[str, tuple[str, str, tuple[int, ...], str]] = {
    "singly": ("mixtral", "0.w1.weight", (24, 32), "one matrix per expert (experts.0.w1.weight [24, 32])"),
    "as-published": ("qwen3_vl_moe", "down_proj", (4, 24, 32), "[experts, in, out] (experts.down_proj [4, 24, 32])"),
    "as-saved": ("qwen3_vl_moe", "gate_up_proj", (4, 48, 32), "[experts, out, in] (experts.gate_up_proj [4, 48, 32])"),
    "square": ("qwen3_vl_moe", "down_proj", (4, 32, 32), "all experts (experts.down_proj [4, 32, 32])"),
    "gpt-oss": ("gpt_oss", "gate_up_proj", (4, 32, 48), "[experts, in, out] (experts.gate_up_proj [4, 32, 48])"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_experts_are_said_as_they_lie(name: str, tmp_path: Path) -> None:
    model_type, matrix, shape, said = LAYOUTS[name]
    base = save_base(tmp_path / "base", {EXPERTS + matrix: numbers(*shape)}, model_type=model_type, hidden_size=32)
    inspected = inspect_checkpoint(base)
    assert isinstance(inspected, ModelInspection)
    on_disk, in_memory = (inspected.experts or "").split("\n")
    assert on_disk.startswith("on disk: ")
    assert said in on_disk
    assert in_memory.endswith("[experts, in, out]" if model_type == "gpt_oss" else "[experts, out, in]")


def test_a_run_folder() -> None:
    run = inspect_checkpoint(open_checkpoint(FIXTURES / "reward-run"))
    assert isinstance(run, RunInspection)
    assert [(row.name, row.kind, row.training and row.training.step) for row in run.checkpoints] == [
        ("checkpoint-2", "adapter", 2),
        ("checkpoint-4", "adapter", 4),
    ]


def test_a_checkpoint_that_cannot_be_opened_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    (row,) = inspect_checkpoint(open_checkpoint(tmp_path)).checkpoints
    assert row.kind == "unreadable"
    assert row.note


def test_sharded_training_checkpoints(tmp_path: Path) -> None:
    tag = tmp_path / "zero" / "global_step7"
    tag.mkdir(parents=True)
    (tag / "mp_rank_00_model_states.pt").write_bytes(b"x" * 10)
    (tag / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"x" * 5)
    (tmp_path / "zero" / "latest").write_text("global_step7")
    dcp = tmp_path / "dcp" / "pytorch_model_fsdp_0"
    dcp.mkdir(parents=True)
    (dcp / ".metadata").write_bytes(b"")
    (dcp / "__0_0.distcp").write_bytes(b"x" * 3)

    def tags(inspection: Inspection) -> list[tuple[str, int, int, bool]]:
        assert isinstance(inspection, ShardedInspection)
        return [(row.tag, row.files, row.nbytes, row.latest) for row in inspection.tags]

    assert tags(inspect_checkpoint(open_checkpoint(tmp_path / "zero"))) == [("global_step7", 2, 15, True)]
    assert tags(inspect_checkpoint(open_checkpoint(tmp_path / "dcp"))) == [("pytorch_model_fsdp_0", 1, 3, False)]


def test_short_names_are_unique_and_keep_experts() -> None:
    paths = ["encoder.*.q_proj", "decoder.*.q_proj", "encoder.*.fc", "layers.*.mlp.experts.*.up"]
    names = short_names(paths)
    assert names["encoder.*.fc"] == "fc"
    assert names["encoder.*.q_proj"] == "encoder.*.q_proj"
    assert names["layers.*.mlp.experts.*.up"] == "experts.*.up"


def test_spread() -> None:
    assert spread([3.0, 1.0, 2.0, 10.0]).median == 2.5
    assert math.isnan(spread([1.0, math.nan]).most)


def test_a_parameter_has_the_alpha_of_its_own_pattern(tmp_path: Path) -> None:
    prefix = "base_model.model.layers.0.experts"
    tensors = {
        f"{prefix}.{form}_{factor}.weight": (normal(4, 8) if factor == "A" else normal(8, 4), DType.F32)
        for form in ("base_layer.lora", "lora")
        for factor in "AB"
    }
    patterns = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    write_adapter(tmp_path / "a", tensors, **patterns, alpha_pattern={"experts.down_proj": 2})
    told = {round(module.scaling or 0, 3): module.alpha for module in inspect_adapter(tmp_path / "a").modules}
    assert told == {2.0: 8, 0.5: 2}
