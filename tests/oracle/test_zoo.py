"""Every architecture of transformers that can be built small, merged by PEFT and by us: the saved files, bit by bit.

Each model type of the causal-LM and of the sequence-classification mapping has an adapter that PEFT made, on all linear
layers and on fused experts; a causal LM that can be a classifier has a SEQ_CLS adapter besides. What is refused is in
`REFUSED`, with the reason that the error gives: the list is part of the promise, and shrinks. No rule complains about
any of them, but for those in `NOTED`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from lora_tool.core.errors import LoraToolError
from tests.judging import codes, judge
from tests.oracle.peft_merge import Table, different, layout, load_model, merge_with_ours, randomise, saved_tensors
from tests.oracle.tiny import AUTO, NUM_LABELS, Task, buildable, tiny_model

Flavour = Literal["causal-lm", "seq-cls", "reward"]
"""`reward`: the base is a causal LM, the adapter a classifier's."""

# transformers and PEFT warn of tiny configs, tied embeddings and deprecated classes: the merge is the test
pytestmark = pytest.mark.filterwarnings("ignore")

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
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


@dataclass(frozen=True, kw_only=True)
class Case:
    flavour: Flavour
    model_type: str
    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"{self.flavour}-{self.model_type}"


def cases() -> list[Case]:
    causal, classifiers = buildable("causal-lm"), buildable("seq-cls")
    named: list[tuple[Flavour, str]] = [
        *(("causal-lm", model_type) for model_type in causal),
        *(("seq-cls", model_type) for model_type in classifiers),
        *(("reward", model_type) for model_type in classifiers if model_type in causal),
    ]
    dtypes = itertools.cycle(DTYPES)
    return [
        Case(flavour=flavour, model_type=model_type, dtype=dtype)
        for (flavour, model_type), dtype in zip(named, dtypes, strict=False)
        if model_type not in _NO_LINEAR_LAYERS
    ]


CASES = cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_rules_find_nothing_else_and_the_merge_is_pefts(case: Case, tmp_path: Path) -> None:
    base, adapter = save_both(case, tmp_path)
    judged = (judge(base), judge(adapter), judge(adapter, base=base, task=_TASKS[case.flavour][1]))
    assert set().union(*map(codes, judged)) == {code for name, code in NOTED.items() if name == case.name}
    reason = REFUSED.get(case.name)
    if reason is not None:
        with pytest.raises(LoraToolError, match=reason):
            merge_with_ours(base, adapter, tmp_path / "ours", "peft")
        return
    theirs = merge_with_peft(case, base, adapter, tmp_path / "theirs")
    ours = saved_tensors(merge_with_ours(base, adapter, tmp_path / "ours", "peft"))
    assert layout(ours) == layout(theirs)
    assert not different(ours, theirs)
    before = saved_tensors(base)
    assert any(name not in before or not torch.equal(before[name], tensor) for name, tensor in theirs.items())


def save_both(case: Case, folder: Path) -> tuple[Path, Path]:
    """Write the base and an adapter on it with random factors; the adapter depends on the base's shapes alone."""
    base_task, task = _TASKS[case.flavour]
    model = tiny_model(case.model_type, base_task).to(case.dtype)
    model.config.dtype = case.dtype
    model.save_pretrained(folder / "base")
    lora = {"target_modules": "all-linear", **_LORA.get(case.model_type, {})}
    if task != base_task:
        config = AutoConfig.from_pretrained(folder / "base", num_labels=NUM_LABELS)
        classifier = AutoModelForSequenceClassification.from_config(config)
        lora["modules_to_save"] = new_modules(model, classifier)
        model = classifier
    parameters = experts(model)
    config = LoraConfig(
        r=4,
        lora_alpha=7,
        task_type=TaskType.CAUSAL_LM if task == "causal-lm" else TaskType.SEQ_CLS,
        target_parameters=parameters or None,
        **lora,
    )
    adapted = get_peft_model(model, config)
    randomise(adapted, seed=20)
    adapted.save_pretrained(str(folder / "adapter"), save_embedding_layers=False)
    return folder / "base", folder / "adapter"


def new_modules(base: PreTrainedModel, classifier: PreTrainedModel) -> list[str]:
    """Return the last names of the modules that the classifier has and the base does not, the outermost of each."""
    held = {name for name, _ in base.named_modules()}
    new = [
        name
        for name, module in classifier.named_modules()
        if name not in held and name.rpartition(".")[0] in held and any(True for _ in module.parameters())
    ]
    return sorted({name.rpartition(".")[2] for name in new})


def experts(model: PreTrainedModel) -> list[str]:
    """Return the ends of the names of all stacks of experts' matrices."""
    stacks = (name for name, parameter in model.named_parameters() if parameter.dim() == 3 and "expert" in name)
    return sorted({".".join(name.split(".")[-2:]) for name in stacks if not name.endswith("bias")})


def merge_with_peft(case: Case, base: Path, adapter: Path, out: Path) -> Table:
    PeftModel.from_pretrained(load(case, base), adapter).merge_and_unload().save_pretrained(out)
    return saved_tensors(out)


def load(case: Case, base: Path) -> PreTrainedModel:
    """Return the base as its users load it: by the auto class, or by its own where the auto class does not know it."""
    config, task = AutoConfig.from_pretrained(base), _TASKS[case.flavour][1]
    if type(config) in AUTO[task]._model_mapping:
        return load_model(base, task)
    model: PreTrainedModel = getattr(transformers, config.architectures[0]).from_pretrained(base, dtype="auto")
    return model


def test_refusals_are_of_cases_that_are_there() -> None:
    assert {case.name for case in CASES} >= REFUSED.keys() | NOTED.keys()
