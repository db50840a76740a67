"""Whatever `validate` calls an error, a merge refuses by the same findings; what it does not, a merge does or names."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from lora_tool import plan_merge
from lora_tool.checkpoints import AdapterDir, open_checkpoint, open_model
from lora_tool.core.errors import FindingsFound, LoraToolError, PlanError, WrongValue
from lora_tool.core.report import Finding, Severity
from tests.checkpoint_edits import PREFIX
from tests.judging import judge
from tests.mutations import CAUSAL, FIXTURES, MUTATIONS, REWARD, Mutation, places

INJURIES = {
    name: mutation
    for name, mutation in MUTATIONS.items()
    if mutation.of in (CAUSAL, REWARD) and mutation.code[:3] in ("LT1", "LT2", "LT3", "LT5")
}


@dataclass(frozen=True, kw_only=True)
class Patient:
    """A good adapter beside its base, and which of its modules the injuries are done to."""

    model: Callable[[], PreTrainedModel] | None
    of: tuple[str, ...]
    first: str = places.Q_PROJ
    second: str = places.DOWN_PROJ
    head: str = places.SCORE
    task: str = "CAUSAL_LM"
    third: int | None = None
    """Which third of the injuries it is given, where it is not given all: rules read names and shapes on every model."""
    enough: int
    """How many of the injuries it can have that `validate` calls errors."""
    untold: frozenset[str] = frozenset()
    """The injuries that a merge finds, and `validate` cannot: headers do not tell."""


def _gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=304, n_positions=32))


def _mixtral() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_local_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model: PreTrainedModel = MixtralForCausalLM(MixtralConfig(**sizes, **heads, vocab_size=304))
    return model


def _bert() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return BertForSequenceClassification(BertConfig(**sizes, vocab_size=304, num_labels=1))


PATIENTS = {
    "llama": Patient(model=None, of=(CAUSAL,), enough=100),
    "reward": Patient(model=None, of=(REWARD,), enough=35),
    "gpt2": Patient(
        model=_gpt2,
        of=(CAUSAL, REWARD),
        first=f"{PREFIX}transformer.h.0.attn.c_attn",
        second=f"{PREFIX}transformer.h.0.mlp.c_fc",
        third=0,
        enough=30,
    ),
    "mixtral": Patient(
        model=_mixtral,
        of=(CAUSAL, REWARD),
        first=f"{PREFIX}model.layers.0.self_attn.q_proj",
        second=f"{PREFIX}model.layers.0.self_attn.v_proj",
        third=1,
        enough=30,
        # in which order PEFT wraps experts; whether what is nowhere on disk is in memory
        untold=frozenset({"LT221", "LT501", "LT501 below another name", "LT506 absent"}),
    ),
    "bert": Patient(
        model=_bert,
        of=(CAUSAL, REWARD),
        first=f"{PREFIX}bert.encoder.layer.0.attention.self.query",
        second=f"{PREFIX}bert.encoder.layer.0.attention.self.value",
        head=f"{PREFIX}classifier.weight",
        task="SEQ_CLS",
        third=2,
        enough=30,
    ),
}


@pytest.fixture(params=PATIENTS)
def patient(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Patient, Path]:
    """Return a patient, and the folder that holds its base and its adapter."""
    found = PATIENTS[request.param]
    if found.model is None:
        return found, FIXTURES / found.of[0].partition("/")[0]
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    model = found.model()
    model.save_pretrained(folder / "base")
    targets = [found.first.rpartition(".")[2], found.second.rpartition(".")[2]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type=found.task))
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.02)
        adapted.save_pretrained(str(folder / "adapter"))
    return found, folder


def _injured(patient: Patient, healthy: Path, mutation: Mutation, where: Path, patch: pytest.MonkeyPatch) -> bool:
    """Copy the patient and injure the copy; return whether it has what the injury is done to."""
    if "adapters" in mutation.options and patient.model is not None:
        return False  # the other one is for another model
    shutil.copytree(healthy, where)
    for constant, name in (("Q_PROJ", patient.first), ("DOWN_PROJ", patient.second), ("SCORE", patient.head)):
        patch.setattr(places, constant, name)
    try:
        mutation.injure(where / "adapter")
    except (KeyError, OSError, StopIteration):
        return False
    return True


def _errors(findings: tuple[Finding, ...]) -> list[Finding]:
    return [finding for finding in findings if finding.severity is Severity.ERROR]


def _refusal(folder: Path, options: dict[str, Any]) -> LoraToolError | None:
    others = options.get("adapters", [])
    asked = {name: options[name] for name in ("task", "num_labels", "average") if name in options}
    adapter = open_checkpoint(folder / "adapter")
    assert isinstance(adapter, AdapterDir)
    try:
        plan_merge(open_model(folder / "base"), [adapter, *others], **asked)
    except LoraToolError as error:
        return error
    return None


def test_a_merge_refuses_by_the_findings_of_validate(
    patient: tuple[Patient, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    who, healthy = patient
    assert _refusal(healthy, {}) is None
    refused = 0
    untold = set()
    wrong: dict[str, Any] = {}
    for at, (name, mutation) in enumerate(INJURIES.items()):
        folder = tmp_path / str(at)
        if who.third not in (None, at % 3) and name not in who.untold:
            continue
        if mutation.of not in who.of or not _injured(who, healthy, mutation, folder, monkeypatch):
            continue
        options = dict(mutation.options)
        said = _errors(judge(folder / "adapter", base=folder / "base", **options).findings)
        error = _refusal(folder, options)
        if said:
            refused += 1
            found = error.report.findings if isinstance(error, FindingsFound) and error.report else ()
            if _errors(found) != said or not str(error).startswith(said[0].code):
                wrong[name] = (said, error)
        elif isinstance(error, FindingsFound):
            untold.add(name)
        elif error is not None and not isinstance(error, PlanError | WrongValue):
            wrong[name] = (said, error)
    assert not wrong, wrong
    assert refused >= who.enough
    assert untold == who.untold
