"""`verify` of computed adapters: accidents that are too small for a norm, or lie in the config, are found in real ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_tool import combine, extract, merge, prepare, resize, verify
from tests.oracle.test_combine import QV, adapters_of
from tests.oracle.tiny import tiny_model

Injure = Callable[[torch.Tensor], torch.Tensor]
KINDS = ("combined", "in 16 bits", "prepared", "resized", "extracted")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("written")
    base, (one, other) = adapters_of(folder / "one", "llama", QV, QV | {"r": 3})
    _, small = adapters_of(folder / "small", "llama", QV, QV | {"lora_alpha": 6}, dtype=torch.bfloat16)
    model = merge(one, out=folder / "model").path
    return {
        "combined": combine([one, other], weights=[0.7, -0.3], out=folder / "combined").path,
        "in 16 bits": combine(small[1:], out=folder / "in 16 bits").path,
        "prepared": prepare(other, "vllm", out=folder / "prepared").path,
        "resized": resize(one, rank=2, out=folder / "resized").path,
        "extracted": extract(model, base, rank=2, out=folder / "extracted").path,
    }


def injured(folder: Path, copy: Path, injure: Injure, part: str = "lora_B.weight") -> Path:
    shutil.copytree(folder, copy)
    weights = copy / "adapter_model.safetensors"
    table = load_file(weights)
    name = next(name for name in sorted(table) if name.endswith(part))
    table[name] = injure(table[name])
    save_file(table, weights, metadata={"format": "pt"})
    return copy


def next_number(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with one bit changed, of its largest value."""
    bits = tensor.clone().reshape(-1).view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)
    bits[tensor.abs().argmax()] += 1
    return bits.view(tensor.dtype).reshape(tensor.shape)


@pytest.mark.parametrize("part", ["lora_A.weight", "lora_B.weight"])
@pytest.mark.parametrize("kind", KINDS[:3])
def test_one_bit_of_what_only_stands_beside_another_is_found(
    kind: str, part: str, written: dict[str, Path], tmp_path: Path
) -> None:
    assert not verify(written[kind]).report.findings
    found = verify(injured(written[kind], tmp_path / "copy", next_number, part)).report.findings
    assert {finding.code for finding in found} <= {"LT605", "LT626"}
    assert found


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_pair_is_a_tensor_that_is_missing(kind: str, written: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(written[kind], tmp_path / "copy")
    table = load_file(weights := copy / "adapter_model.safetensors")
    lost = min(name for name in table if name.endswith("lora_A.weight"))
    save_file({name: table[name] for name in table if name != lost}, weights, metadata={"format": "pt"})
    assert [(each.code, each.subject) for each in verify(copy).report.findings] == [("LT602", lost)]


@pytest.mark.parametrize("kind", KINDS[3:])
def test_a_small_error_in_what_is_kept_is_found_though_more_is_left_out(
    kind: str, written: dict[str, Path], tmp_path: Path
) -> None:
    """It changes the distance from the inputs in its square alone: not enough for that to show."""
    assert not verify(written[kind]).report.findings
    found = verify(injured(written[kind], tmp_path / "copy", lambda tensor: tensor * (1 + 1e-5))).report.findings
    assert [finding.code for finding in found] == ["LT626"]
    assert "directions" in found[0].message


FIELDS: dict[str, Any] = {
    "target_modules": ["v_proj"],
    "layers_to_transform": [0],
    "init_lora_weights": "pissa",
    "fan_in_fan_out": True,
    "modules_to_save": ["lm_head"],
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("kind", ["resized", "extracted"])
def test_a_config_that_says_something_else_is_found(
    kind: str, field: str, written: dict[str, Path], tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(written[kind], tmp_path / "copy"))
    path = copy / "adapter_config.json"
    config = json.loads(path.read_text())
    moved = {"base_model_name_or_path": "elsewhere/base", "target_modules": config["target_modules"][::-1]}
    path.write_text(json.dumps(config | moved))
    assert not verify(copy).report.findings
    path.write_text(json.dumps(config | {field: FIELDS[field]}))
    found = verify(copy).report.findings
    assert any(field in finding.message and finding.subject == "adapter_config.json" for finding in found)


def test_a_difference_of_another_shape_is_told(tmp_path: Path) -> None:
    model = tiny_model("llama", "causal-lm")
    model.save_pretrained(tmp_path / "base")
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.down_proj.weight").mul_(1.1)
    model.save_pretrained(tmp_path / "tuned")
    out = extract(tmp_path / "tuned", tmp_path / "base", rank=4, out=tmp_path / "out").path
    path = out / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"fan_in_fan_out": True}))
    assert any("but the difference is [" in finding.message for finding in verify(out).report.findings)
