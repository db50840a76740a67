"""What is read back of a factor of a lower rank: some columns of all of its rows."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lora_tool import plan_resize
from lora_tool.execution.engine import execute
from lora_tool.rules.merged.evidence import Verdict
from lora_tool.verification.checking import check_written

MODULE = "base_model.model.model.layers.0.self_attn.q_proj"


def adapter(folder: Path) -> Path:
    rng = np.random.default_rng(0)
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 24, "lora_alpha": 24, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    sizes = {"lora_A": (24, 2048), "lora_B": (32, 24)}
    factors = {f"{MODULE}.{name}.weight": rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    save_file(factors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("row", [None, 0, 7, 15])
def test_a_row_that_is_wrong_is_found_where_it_is(row: int | None, tmp_path: Path) -> None:
    plan = plan_resize(adapter(tmp_path / "adapter"), rank=16)
    out = execute(plan, tmp_path / "out")
    name = f"{MODULE}.lora_A.weight"
    table = load_file(out / "adapter_model.safetensors")
    if row is not None:
        table[name][row] *= np.float32(1.001)
        (path := out / "adapter_model.safetensors").write_bytes(
            path.read_bytes()[: -sum(each.nbytes for each in table.values())]
            + b"".join(table[step.out.name].tobytes() for step in plan.steps)
        )
    seen = check_written(plan, out).evidence[name]
    assert seen.compared >= 16 * 2048 // 64
    if row is None:
        assert seen.verdict is Verdict.RIGHT
    else:
        assert (seen.verdict, seen.first) == (Verdict.DIFFERENT, row * 2048)
        assert seen.wrong == seen.compared // 16
