"""Small models, quantised, with their adapters: each made once for all the tests of a file, and merged by PEFT."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lora_tool.checkpoints import open_model
from lora_tool.formats.quantised.encodings import dequantised
from lora_tool.formats.quantised.layouts import read_quantised
from lora_tool.formats.safetensors import scan_file
from lora_tool.formats.stored import read_part
from tests.oracle.peft_merge import Table, save_adapter, save_base, saved_tensors
from tests.quantised_models import quantise

BF16 = torch.bfloat16
ATTENTION: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"]}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
    "qwen3-one": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 16},
    "qwen3-ragged": {"hidden_size": 64, "intermediate_size": 88, "num_hidden_layers": 1, "head_dim": 16},
    "gpt_oss": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_local_experts": 4,
        "num_hidden_layers": 2,
        "head_dim": 16,
    },
    "llama4_text": {"hidden_size": 32, "intermediate_size": 48, "intermediate_size_mlp": 48, "head_dim": 16},
    "qwen3_moe": {"hidden_size": 64, "head_dim": 16},
}
Chosen = Callable[[str], bool]


class Made:
    """Makes bases, their quantised forms and adapters, and keeps them."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._kept: dict[Any, Any] = {}

    def once(self, key: Any, make: Callable[[Path], Any]) -> Any:
        """Return what was made under this key, in a folder of its own."""
        if key not in self._kept:
            self._kept[key] = make(self._factory.mktemp("made"))
        return self._kept[key]

    def plain(self, kind: str) -> Path:
        model_type = kind.partition("-")[0]
        found: Path = self.once(kind, lambda at: save_base(at / "base", model_type, "causal-lm", BF16, **KINDS[kind]))
        return found

    def adapter(self, kind: str, lora: dict[str, Any]) -> Path:
        key = kind, json.dumps(lora)
        found: Path = self.once(key, lambda at: save_adapter(at / "adapter", self.plain(kind), "causal-lm", lora))
        return found

    def base(self, kind: str, form: str, chosen: Chosen) -> tuple[Path, Path, Table]:
        """Return the plain base, the base with the chosen weights in this form, and the numbers of those."""
        key = kind, form, chosen
        base, values = self.once(key, lambda at: quantise(self.plain(kind), at / "base", form, chosen))
        return self.plain(kind), base, values

    def merged_by_peft(
        self, kind: str, form: str, chosen: Chosen, loras: tuple[dict[str, Any], ...]
    ) -> tuple[Table, Table]:
        """Return the weights of the base in float64, and what PEFT makes of them."""
        plain, _, values = self.base(kind, form, chosen)
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float64)
        start = {**model.state_dict(), **{name: weight.double() for name, weight in values.items()}}
        model.load_state_dict(start)
        start = {name: weight.clone() for name, weight in start.items()}
        for lora in loras:
            model = PeftModel.from_pretrained(model, self.adapter(kind, lora)).merge_and_unload()
        return start, model.state_dict()


def numbers_of(folder: Path, name: str) -> torch.Tensor:
    """Return what a quantised weight stands for; that we decode as libraries do is shown elsewhere."""
    said = {key: text for file in folder.glob("*.safetensors") for key, text in scan_file(file).metadata.items()}
    table = json.loads((folder / "config.json").read_text())["quantization_config"]
    weight = dequantised(read_quantised(open_model(folder).tensors, table, said).weights[name])
    dtype = {"F32": torch.float32, "BF16": BF16, "F16": torch.float16}[weight.dtype.name]
    return torch.frombuffer(bytearray(read_part(weight, 0, weight.nbytes)), dtype=dtype).reshape(weight.shape)


def edit(path: Path, **fields: Any) -> None:
    """Set fields of a JSON file, or take out those that are None."""
    table = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in table.items() if value is not None}))


def delta(adapter: Path, module: str) -> torch.Tensor:
    """Return scaling·(B·A) of a module in float64."""
    table, config = saved_tensors(adapter), json.loads((adapter / "adapter_config.json").read_text())
    b, a = (table[f"base_model.model.{module}.lora_{part}.weight"].double() for part in "BA")
    return torch.mul(b @ a, config["lora_alpha"] / config["r"])


def assert_rounded(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Assert that bfloat16 values are the nearest to the exact ones: one in a thousand may be the next.

    Where a weight and its change cancel, float32 has less of what is left.
    """
    apart = (found.view(torch.int16).int() - exact.float().to(BF16).view(torch.int16).int()).abs()
    apart[(found.double() - exact).abs() < exact.abs().max() * 2**-24] = 0
    assert int(apart.max()) <= 1
    assert float((apart > 0).float().mean()) <= 0.001 + 1 / apart.numel()
