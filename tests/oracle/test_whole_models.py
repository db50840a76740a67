"""Models with an injury: we find it where transformers refuses to load them, or initialises something at random."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.utils import logging

from lora_tool.checkpoints import open_checkpoint
from lora_tool.core.report import Severity
from lora_tool.verification.validating import validate
from tests.oracle.tiny import AUTO, Task, tiny_model

Tensors = dict[str, torch.Tensor]
FAMILIES: tuple[tuple[str, Task], ...] = (
    ("llama", "seq-cls"),
    ("qwen2", "token-cls"),
    ("gpt2", "seq-cls"),
    ("opt", "causal-lm"),
    ("mamba", "causal-lm"),
    ("bert", "token-cls"),
    ("roberta", "seq-cls"),
    ("t5", "seq-2-seq-lm"),
)


def head_of(table: Tensors) -> str:
    return next(name for name in table if name.split(".")[0] in ("score", "classifier", "lm_head") and "weight" in name)


def matrices(table: Tensors) -> list[str]:
    return [name for name, tensor in table.items() if tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1]]


def lost(at: float) -> Callable[[Tensors], None]:
    def injury(table: Tensors) -> None:
        del table[sorted(table)[int(at * len(table))]]

    return injury


def short(table: Tensors) -> None:
    name = matrices(table)[len(matrices(table)) // 2]
    table[name] = table[name][: len(table[name]) // 2].clone()


def turned(table: Tensors) -> None:
    name = matrices(table)[len(matrices(table)) // 3]
    table[name] = table[name].T.contiguous()


def turned_everywhere(table: Tensors) -> None:
    of = matrices(table)[-1].rpartition(".")[0].rpartition(".")[2]
    for name in [name for name in matrices(table) if f".{of}." in name]:
        table[name] = table[name].T.contiguous()


def wide_head(table: Tensors) -> None:
    name = next(iter(name for name in table if name in ("score.weight", "classifier.weight", "lm_head.weight")), None)
    name = name or matrices(table)[0]
    table[name] = torch.zeros(table[name].shape[0], table[name].shape[1] + 8)


def flat_head(table: Tensors) -> None:
    name = next(iter(name for name in table if name in ("score.weight", "classifier.weight", "lm_head.weight")), None)
    name = name or matrices(table)[-1]
    table[name] = table[name][0].clone()


def extra(table: Tensors) -> None:
    table["v_head.summary.weight"] = torch.zeros(1, 32)


INJURIES: dict[str, Callable[[Tensors], None]] = {
    "none": lambda _: None,
    **{f"lost {at:.2f}": lost(at) for at in (0.0, 0.15, 0.35, 0.55, 0.8, 0.97)},
    "short": short,
    "turned": turned,
    "turned everywhere": turned_everywhere,
    "wide head": wide_head,
    "flat head": flat_head,
    "extra": extra,
}


def refused(folder: Path, task: Task) -> tuple[bool, bool]:
    """Return whether transformers refuses the folder or makes something up, and whether it leaves something out."""
    try:
        _, info = AUTO[task].from_pretrained(folder, output_loading_info=True)
    except RuntimeError:
        return True, False
    return bool(info["missing_keys"] or info["mismatched_keys"]), bool(info["unexpected_keys"])


@pytest.fixture
def quiet() -> Iterator[None]:
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()
    logging.set_verbosity(level)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("model_type", "task"), FAMILIES)
def test_what_transformers_refuses_or_makes_up_is_found(model_type: str, task: Task, tmp_path: Path) -> None:
    model: PreTrainedModel = tiny_model(model_type, task)
    model.save_pretrained(tmp_path)
    good = load_file(tmp_path / "model.safetensors")
    wrong = []
    for name, injury in INJURIES.items():
        table = dict(good)
        injury(table)
        save_file(table, tmp_path / "model.safetensors", {"format": "pt"})
        report = validate(open_checkpoint(tmp_path))
        found = bool(report.at_least(Severity.ERROR)), any(f.code == "LT319" for f in report.findings)
        if found != (expected := refused(tmp_path, task)):
            wrong.append(f"{name}: transformers {expected}, we {found}: {good.keys() - table.keys()} {report.findings}")
    assert not wrong, "\n".join(wrong)


def lost_in_one_layer(table: Tensors) -> None:
    del table[next(name for name in table if ".layers.1." in name and name.endswith("norm.weight"))]


def lost_layer(table: Tensors) -> None:
    for name in [name for name in table if ".layers.1." in name]:
        del table[name]


def lost_output(table: Tensors) -> None:
    del table["lm_head.weight"]


def lost_embeddings(table: Tensors) -> None:
    del table["model.embed_tokens.weight"]


def lost_last_norm(table: Tensors) -> None:
    del table["model.norm.weight"]


def lost_in_every_layer(table: Tensors) -> None:
    for name in [name for name in table if name.endswith(".v_proj.weight")]:
        del table[name]


def short_in_one_layer(table: Tensors) -> None:
    name = next(name for name in table if name.endswith(".layers.1.self_attn.o_proj.weight"))
    table[name] = table[name][:, :8].clone()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    ("injury", "code"),
    [
        (lambda _: None, None),
        (lost_in_one_layer, "LT318"),
        (lost_layer, "LT310"),
        (lost_output, "LT318"),
        (lost_embeddings, "LT318"),
        (lost_last_norm, "LT318"),
        (lost_in_every_layer, "LT318"),
        (short_in_one_layer, "LT317"),
    ],
)
def test_of_a_class_that_no_table_knows_the_layers_tell(
    model_type: str, injury: Callable[[Tensors], None], code: str | None, tmp_path: Path
) -> None:
    tiny_model(model_type, "causal-lm").save_pretrained(tmp_path)
    table = load_file(tmp_path / "model.safetensors")
    injury(table)
    save_file(table, tmp_path / "model.safetensors", {"format": "pt"})
    assert refused(tmp_path, "causal-lm") == (code is not None, False)
    report = validate(open_checkpoint(tmp_path))
    assert {found.code for found in report.at_least(Severity.ERROR)} == ({code} if code else set())
