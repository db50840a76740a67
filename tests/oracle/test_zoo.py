"""Every architecture of transformers that can be built small, merged by PEFT and by us: the saved files, bit by bit.

Each model type of the causal-LM and of the sequence-classification mapping has an adapter that PEFT made, on all linear
layers and on fused experts: as a causal LM, as a classifier, or as a classifier made of a causal LM, in turn, and with
one of `OPTIONS`. What is refused is in `REFUSED`, with the reason that the error gives: the list is part of the promise,
and shrinks. No rule complains about any of them, but for those in `NOTED`; what is in one of the two is always tried.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import transformers
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from lora_tool.core.errors import LoraToolError
from tests.judging import codes, judge
from tests.oracle.adapter_cases import TASK_TYPES, Case, experts
from tests.oracle.peft_merge import BF16, FP16, FP32, load_model, merge_with_ours, require_pefts, save_model, train
from tests.oracle.tiny import AUTO, NUM_LABELS, Task, buildable

Flavour = Literal["causal-lm", "seq-cls", "reward"]
"""`reward`: the base is a causal LM, the adapter a classifier's."""

# transformers and PEFT warn of tiny configs, tied embeddings and deprecated classes: the merge is the test
pytestmark = pytest.mark.filterwarnings("ignore")

DTYPES = (BF16, FP16, FP32)
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"use_rslora": True})
_TASKS: Mapping[Flavour, tuple[Task, Task]] = {
    "causal-lm": ("causal-lm", "causal-lm"),
    "seq-cls": ("seq-cls", "seq-cls"),
    "reward": ("causal-lm", "seq-cls"),
}
"""Flavour → the task of the base and of the adapter."""

_SHARED = "is one layer in several places"
REFUSED: Mapping[str, str] = {
    # PEFT 0.21 translates the names of today's adapter as if it were an old one, and drops part of it
    "causal-lm-laguna": "would leave them out with a warning",
    # the causal LM is the decoder alone: a classifier made of it has a random encoder
    **dict.fromkeys(
        (f"reward-{name}" for name in ("bart", "bigbird_pegasus", "mbart", "mvp", "plbart")), "which .* does not have"
    ),
    # transformer blocks that several layers share
    "causal-lm-zamba": _SHARED,
    "causal-lm-zamba2": _SHARED,
    "seq-cls-zamba": _SHARED,
    "seq-cls-zamba2": _SHARED,
    "reward-zamba": _SHARED,
    "reward-zamba2": _SHARED,
}
NOTED: Mapping[str, str] = {
    name: code
    for code, names in {
        # kernels of Mamba, torch's own attention and the router of longcat_flash read a weight past its LoRA
        "LT228": """causal-lm-falcon_mamba causal-lm-gemma3 causal-lm-jamba causal-lm-longcat_flash causal-lm-mamba
            causal-lm-phi4_multimodal seq-cls-gemma3 seq-cls-jamba seq-cls-modernvbert seq-cls-t5gemma2
            seq-cls-ultravbert reward-gemma3 reward-jamba""",
        # LoRA on a head of several layers, or of another name, that only the base has
        "LT301": "seq-cls-perceiver",
        "LT302": """seq-cls-bart seq-cls-bigbird_pegasus seq-cls-flaubert seq-cls-mbart seq-cls-mt5 seq-cls-mvp
            seq-cls-plbart seq-cls-t5 seq-cls-umt5 seq-cls-xlm seq-cls-xlnet""",
        "LT306": "seq-cls-qwen3_5",  # its config takes no pad token
        "LT506": "reward-bart reward-bigbird_pegasus reward-mbart reward-mvp reward-plbart",
    }.items()
    for name in names.split()
}
"""What the rules find in base and adapter, where that is anything."""
_NO_LINEAR_LAYERS = frozenset({"ibert"})
"""Models whose every layer is of a class of their own, which PEFT cannot adapt."""
_MAMBA = {"exclude_modules": ["out_proj", "conv1d"]}
"""The fused kernels of Mamba read these weights past LoRA, so PEFT refuses them."""
_LORA: Mapping[str, Mapping[str, Any]] = {
    "bamba": _MAMBA,
    "falcon_h1": _MAMBA,
    "falcon_mamba": _MAMBA,
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "nemotron_h": _MAMBA,
    # `all-linear` has the classifier, which PEFT saves whole too
    "distilbert": {"target_modules": ["q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2"]},
}


def cases() -> dict[str, Case]:
    causal, classifiers = set(buildable("causal-lm")), set(buildable("seq-cls"))
    found: dict[str, Case] = {}
    for number, model in enumerate(sorted((causal | classifiers) - _NO_LINEAR_LAYERS)):
        possible: list[Flavour] = ["causal-lm"] if model in causal else []
        if model in classifiers:
            possible += ["seq-cls", "reward"] if model in causal else ["seq-cls"]
        for at, flavour in enumerate(possible):
            name = f"{flavour}-{model}"
            if at == number % len(possible) or name in REFUSED or name in NOTED:
                base_task, task = _TASKS[flavour]
                lora = {**OPTIONS[number // 3 % 2], **_LORA.get(model, {})}
                dtype = DTYPES[number // 2 % 3]
                found[name] = Case(model=model, task=task, base_task=base_task, dtype=dtype, lora=lora)
    return found


CASES = cases()


@pytest.mark.parametrize("name", CASES)
def test_the_rules_find_nothing_else_and_the_merge_is_pefts(name: str, tmp_path: Path) -> None:
    one = CASES[name]
    base, adapter = save_both(one, tmp_path)
    judged = (judge(base), judge(adapter), judge(adapter, base=base, task=one.task))
    assert set().union(*map(codes, judged)) == ({NOTED[name]} if name in NOTED else set())
    if name in REFUSED:
        with pytest.raises(LoraToolError, match=REFUSED[name]):
            merge_with_ours(base, adapter, tmp_path / "ours", "peft")
        return
    require_pefts(base, adapter, lambda: load(one, base))


def save_both(one: Case, folder: Path) -> tuple[Path, Path]:
    """Write the base and an adapter on it with random factors; the adapter depends on the base's shapes alone."""
    model = one.make()
    base = save_model(model, folder / "base", one.dtype)
    lora = {"target_modules": "all-linear", **one.lora}
    if one.task != one.base_task:
        config = AutoConfig.from_pretrained(base, num_labels=NUM_LABELS)
        classifier = AutoModelForSequenceClassification.from_config(config)
        lora["modules_to_save"] = new_modules(model, classifier)
        model = classifier
    train(
        model,
        folder / "adapter",
        save=False,
        task_type=TASK_TYPES[one.task],
        target_parameters=experts(model) or None,
        **lora,
    )
    return base, folder / "adapter"


def new_modules(base: PreTrainedModel, classifier: PreTrainedModel) -> list[str]:
    """Return the last names of the modules that the classifier has and the base does not, the outermost of each."""
    held = {name for name, _ in base.named_modules()}
    new = [
        name
        for name, module in classifier.named_modules()
        if name not in held and name.rpartition(".")[0] in held and any(True for _ in module.parameters())
    ]
    return sorted({name.rpartition(".")[2] for name in new})


def load(one: Case, base: Path) -> PreTrainedModel:
    """Return the base as its users load it: by the auto class, or by its own where the auto class does not know it."""
    config = AutoConfig.from_pretrained(base)
    if type(config) in AUTO[one.task]._model_mapping:
        return load_model(base, one.task)
    model: PreTrainedModel = getattr(transformers, config.architectures[0]).from_pretrained(base, dtype="auto")
    return model


def test_refusals_are_of_cases_that_are_there() -> None:
    assert CASES.keys() >= REFUSED.keys() | NOTED.keys()
