"""What `convert` wrote, verified again: right as it is, and wrong where bits, columns, names or scalings are."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_tool import verify
from lora_tool.core.errors import NotACheckpoint
from lora_tool.formats.files import read_json
from tests.cli.calling import Caller
from tests.oracle.test_combine import QV, adapters_of
from tests.oracle.test_convert_experts import FUSED

pytestmark = pytest.mark.filterwarnings("ignore:The following .* keys did not match")

Table = dict[str, torch.Tensor]
Mutant = Callable[[Table, dict[str, Any]], object]


def swapped(one: str, other: str) -> Mutant:
    """Exchange the tensors of two modules."""

    def injure(table: Table, _config: dict[str, Any]) -> None:
        for name in [name for name in table if one in name]:
            twin = name.replace(one, other)
            table[name], table[twin] = table[twin].clone(), table[name].clone()

    return injure


def one_bit(part: str) -> Mutant:
    def injure(table: Table, _config: dict[str, Any]) -> None:
        name = next(name for name in sorted(table) if part in name)
        table[name].view(-1).view(torch.int32)[1] ^= 1

    return injure


def without(part: str) -> Mutant:
    """Leave half a pair."""
    return lambda table, _config: table.pop(next(name for name in sorted(table) if part in name))


def field(**fields: Any) -> Mutant:
    return lambda _table, config: config.update(fields)


def in_other_order(table: Table, _config: dict[str, Any]) -> None:
    """Put the columns of each expert beside one another, as Unsloth did, not in turn."""
    name = next(name for name in table if "experts" in name and "lora_B" in name)
    rank = 2
    table[name] = table[name].reshape(len(table[name]), rank, -1).transpose(1, 2).reshape(len(table[name]), -1)


MUTANTS: dict[str, list[tuple[str, Mutant]]] = {
    "peft": [
        ("", swapped("layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj")),
        ("scales B·A by", field(lora_alpha=9)),
        ("scales B·A by", field(alpha_pattern={"v_proj": 9})),
        ("`use_dora` is True", field(use_dora=True)),
        ("`exclude_modules` is ['v_proj']", field(exclude_modules=["v_proj"])),
        ("", one_bit("lora_A")),
    ],
    "peft-experts": [
        ("", swapped("experts.0.w1", "experts.1.w1")),
        ("", swapped("layers.0.block_sparse_moe.experts.0.w1", "layers.0.block_sparse_moe.experts.0.w3")),
        ("ΔW of `", field(alpha_pattern={r"experts\.\d+\.w2": 7})),
        ("ΔW of `", field(use_rslora=True)),
        ("", one_bit("experts.1.w2.lora_B")),
        ("", without("experts.1.w2.lora_A")),
        ("", without("experts.0.w1.lora_B")),
    ],
    "peft-fused": [
        ("", in_other_order),
        ("ΔW of `", field(lora_B_layout="grouped_by_expert")),
        ("ΔW of `", field(alpha_pattern={"experts.gate_up_proj": 5})),
        ("scales B·A by", field(alpha_pattern={"q_proj": 5})),
        ("", one_bit("experts.lora_A")),
        ("", without("experts.lora_A")),
    ],
}


def converted(call: Caller, adapter: Path, form: str, out: Path, *base: str | Path) -> Path:
    called = call("convert", adapter, "--to", form, *base, "-o", out)
    assert called.code == 0, called.err
    return out


@pytest.fixture
def wrapped(tmp_path: Path) -> Path:
    """An adapter with names that torch.compile gives."""
    _, (adapter,) = adapters_of(tmp_path, "llama", QV)
    path = adapter / "adapter_model.safetensors"
    renamed = {name.replace(".layers.", "._orig_mod.layers."): tensor for name, tensor in load_file(path).items()}
    save_file(renamed, path, metadata={"format": "pt"})
    return adapter


@pytest.mark.parametrize("form", MUTANTS)
def test_what_was_converted_is_right_and_every_mutant_is_found(
    form: str, call: Caller, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if form == "peft":
        right = converted(call, request.getfixturevalue("wrapped"), form, tmp_path / "right")
    else:
        base, (adapter,) = adapters_of(tmp_path, "mixtral", FUSED)
        right = converted(call, adapter, "peft-experts", tmp_path / "single", "--base", base)
        right = right if form == "peft-experts" else converted(call, right, form, tmp_path / "fused")
    assert verify(right).report.findings == ()
    assert call("verify", right).code == 0
    assert call("verify", right, "--logits").code == 2
    path = right / "adapter_model.safetensors"
    table, config = load_file(path), read_json(right / "adapter_config.json")
    for said, mutant in MUTANTS[form]:
        wrong, fields = {name: tensor.clone() for name, tensor in table.items()}, dict(config)
        mutant(wrong, fields)
        save_file({name: tensor.contiguous() for name, tensor in wrong.items()}, path, metadata={"format": "pt"})
        (right / "adapter_config.json").write_text(json.dumps(fields))
        found = verify(right).report.findings
        assert found, mutant
        assert {finding.code for finding in found} <= {"LT602", "LT605", "LT626"}
        assert any(said in finding.message for finding in found), [finding.message for finding in found]
        assert call("verify", right).code == 5


def test_both_ways_of_mlx_are_verified(call: Caller, tmp_path: Path) -> None:
    _, (adapter,) = adapters_of(tmp_path, "llama", QV)
    mlx = converted(call, adapter, "mlx", tmp_path / "mlx")
    back = converted(call, mlx, "peft", tmp_path / "back")
    assert [verify(each).report.findings for each in (mlx, back)] == [(), ()]
    path = back / "adapter_model.safetensors"
    table = load_file(path)
    one_bit("lora_B")(table, {})
    save_file(table, path, metadata={"format": "pt"})
    assert verify(back).report.findings


def test_stacked_experts_of_mlx_are_verified(call: Caller, tmp_path: Path) -> None:
    base, (adapter,) = adapters_of(tmp_path, "mixtral", FUSED)
    single = converted(call, adapter, "peft-experts", tmp_path / "single", "--base", base)
    mlx = converted(call, single, "mlx", tmp_path / "mlx")
    assert verify(mlx).report.findings == ()
    back = converted(call, mlx, "peft", tmp_path / "back", "--base", base)
    assert verify(back).report.findings == ()


def test_an_input_that_is_gone_is_named_and_can_be_given(wrapped: Path, call: Caller, tmp_path: Path) -> None:
    out = converted(call, wrapped, "peft", tmp_path / "out")
    moved = Path(shutil.move(wrapped, tmp_path / "moved"))
    with pytest.raises(NotACheckpoint, match="no longer exists") as gone:
        verify(out)
    assert "--adapter ADAPTER" in str(gone.value.hint)
    assert verify(out, adapters=[moved]).report.findings == ()
