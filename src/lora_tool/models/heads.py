"""What heads are called: the layers of a classifier or a reward model that a language model does not have."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from lora_tool.models.table import ARCHITECTURES

_OF_ROWS = frozenset(row.head for row in ARCHITECTURES.values() if row.head)

CLASSIFICATION_HEADS = frozenset(head for head in _OF_ROWS if "." not in head) | {"logits_proj"}
"""The heads of classifiers whose rows are the labels, where they are modules of the model itself."""

PEFT_CLASSIFIERS = frozenset({"score", "classifier"})
"""Those that PEFT looks for, and vLLM takes."""

QUESTION_HEADS = frozenset({"qa_outputs"})

VALUE_HEADS = frozenset({"v_head", "value_head", "reward_head", "regression_head"})
"""The heads of PPO's value models and of other trainers' reward models."""

HEADS = CLASSIFICATION_HEADS | QUESTION_HEADS | VALUE_HEADS

NEW_MODULES = HEADS | {head.rpartition(".")[2] for head in _OF_ROWS}
"""Components of the paths of modules that a base language model does not have: new and random when training begins."""

ADDED_BY_PEFT: Mapping[str, frozenset[str]] = MappingProxyType(
    {"SEQ_CLS": PEFT_CLASSIFIERS, "TOKEN_CLS": PEFT_CLASSIFIERS, "QUESTION_ANS": QUESTION_HEADS}
)
"""`task_type` → the heads that PEFT saves whole without being asked (peft 0.21, `peft_model.py`)."""

CLASSIFICATION_TASKS = frozenset({"SEQ_CLS", "TOKEN_CLS"})

LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""How the names of classes end that write text, and have no head with labels."""

LAST_LAYERS = ("", ".out_proj", ".summary", ".linear_out")
"""Where in a head its last layer is, whose rows are the labels: RoBERTa's and BART's is `out_proj`, XLM's `summary`."""


def head_of(path: str, names: frozenset[str] = HEADS) -> str | None:
    """Return the head that a path is or lies in: ``classifier`` of ``classifier.out_proj``; None if it is in no head.

    A head is in no numbered layer: the ``classifier`` of a router of experts is none.
    """
    for part in path.split("."):
        if part in names:
            return part
        if part.isdecimal():
            return None
    return None


def head_path(path: str, names: frozenset[str] = HEADS) -> str:
    """Return the path of the head that a path is or lies in: ``classifier`` of ``classifier.dense``; else the path."""
    head = head_of(path, names)
    if head is None:
        return path
    return f"{f'.{path}.'.partition(f'.{head}.')[0]}.{head}".removeprefix(".")


def last_weights(head: str) -> tuple[str, ...]:
    """Return the names that the weight of the head's last layer may have, the likeliest first."""
    return tuple(f"{head}{last}.weight" for last in LAST_LAYERS)


_LAST_WEIGHTS = frozenset(name for head in CLASSIFICATION_HEADS for name in last_weights(head))


def is_last_layer(module: str) -> bool:
    """Return whether a module path is that of a head's last layer, which has one row per label."""
    return f"{module}.weight" in _LAST_WEIGHTS
