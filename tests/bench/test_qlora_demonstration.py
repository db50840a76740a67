"""Which base a QLoRA adapter is merged into, measured: loss of the trained model and of each merged form.

    pytest -m bench -s tests/bench/test_qlora_demonstration.py

A small Llama learns the bytes of Python's own modules; it is quantised to NF4 with nested scales, and an adapter learns
prose on it (the topics of `help()`). One run on a CPU, two minutes: directions, not constants.
"""

from __future__ import annotations

import json
import pydoc_data.topics
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.oracle.peft_merge import merge_with_ours, saved_tensors
from tests.quantised_models import quantise

pytestmark = [pytest.mark.bench, pytest.mark.filterwarnings("default")]

LENGTH, BATCH = 64, 16
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def code() -> torch.Tensor:
    """Return the bytes of Python's modules, the same in the same Python."""
    library = Path(json.__file__).parents[1]
    return as_bytes("".join(path.read_text(errors="replace") for path in sorted(library.glob("*.py"))))


def prose() -> torch.Tensor:
    return as_bytes("".join(text for _, text in sorted(pydoc_data.topics.topics.items())))


def as_bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode("ascii", "replace")), dtype=torch.long)


def learn(model: Any, text: torch.Tensor, steps: int, rate: float) -> None:
    """Train on random pieces of the text."""
    chosen = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=rate)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * (1 - step / steps)
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=chosen)
        rows = torch.stack([text[start : start + LENGTH] for start in starts.tolist()])
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@torch.no_grad()
def loss_on(model: Any, text: torch.Tensor) -> float:
    """Return the loss per byte in nats."""
    rows = text[: len(text) // LENGTH * LENGTH].reshape(-1, LENGTH)[:128]
    return float(torch.stack([model(input_ids=part, labels=part).loss for part in torch.split(rows, BATCH)]).mean())


def is_linear(module: str) -> bool:
    return module.endswith("_proj")


def with_values(folder: Path, values: dict[str, torch.Tensor]) -> Any:
    """Return the model in float32, with these weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict({**model.state_dict(), **{name: value.float() for name, value in values.items()}})
    return model.eval()


def test_what_each_merged_form_is_worth(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))
    learn(model, code(), steps=400, rate=3e-3)
    plain = tmp_path / "plain"
    model.to(torch.bfloat16).save_pretrained(plain)
    text = prose()
    trained_on, held_out = text[: len(text) * 4 // 5], text[len(text) * 4 // 5 :]

    def again(name: str, form: str, folder: Path) -> dict[str, torch.Tensor]:
        return quantise(folder, tmp_path / name, form, is_linear)[1]

    found: dict[str, float] = {}
    for form in ("nf4-double", "fp8-block"):
        base, values = quantise(plain, tmp_path / form, form, is_linear)
        tuned = get_peft_model(
            with_values(plain, values),
            LoraConfig(r=8, lora_alpha=16, target_modules=PROJECTIONS, task_type="CAUSAL_LM"),
        )
        found[f"{form}: the base alone"] = loss_on(tuned, held_out)
        learn(tuned, trained_on, steps=60, rate=1e-3)
        adapter = tmp_path / f"adapter-{form}"
        tuned.save_pretrained(str(adapter))
        found[f"{form}: trained"] = loss_on(tuned.eval(), held_out)
        merged = merge_with_ours(base, adapter, tmp_path / f"merged-{form}", "float32")
        found[f"{form}: dequantised base + ΔW, bfloat16"] = loss_on(with_values(merged, {}), held_out)
        other = merge_with_ours(plain, adapter, tmp_path / f"other-{form}", "float32")
        found[f"{form}: 16-bit original + ΔW, bfloat16"] = loss_on(with_values(other, {}), held_out)
        back = again(f"back-{form}", form, merged)
        found[f"{form}: dequantised base + ΔW, quantised anew"] = loss_on(with_values(merged, back), held_out)
        if form == "fp8-block":
            kept = merge_with_ours(base, adapter, tmp_path / "as-base", "float32", store="as-base", allow_loss=True)
            print(form, json.loads((kept / "lora_tool.json").read_text())["requantised"])
            none = _nothing(adapter, tmp_path / "none")
            widened = merge_with_ours(kept, none, tmp_path / "wide", "float32", store="all-16bit")
            found[f"{form}: as-base"] = loss_on(with_values(widened, {}), held_out)
    for name, loss in found.items():
        print(f"{name:<60} {loss:.4f}")
    gain = found["nf4-double: the base alone"] - found["nf4-double: trained"]
    assert abs(found["nf4-double: dequantised base + ΔW, bfloat16"] - found["nf4-double: trained"]) < 0.02 * gain


def _nothing(adapter: Path, out: Path) -> Path:
    """Return an adapter whose ΔW is next to zero."""
    from safetensors.torch import save_file

    out.mkdir()
    table = {name: tensor * 1e-12 for name, tensor in saved_tensors(adapter).items()}
    save_file(table, out / "adapter_model.safetensors", {"format": "pt"})
    (out / "adapter_config.json").write_text((adapter / "adapter_config.json").read_text())
    return out
