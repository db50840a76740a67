"""The class that an adapter's task makes of its base, and what of that class the base has."""

from __future__ import annotations

from lora_tool.adapters.targeting import trained_for
from lora_tool.models.model_tensors import ModelTensors, prefixes_of
from lora_tool.rules.engine.subjects import AdapterSubject

_ENDINGS = {
    "CAUSAL_LM": ("ForCausalLM", "LMHeadModel"),
    "SEQ_2_SEQ_LM": ("ForConditionalGeneration",),
    "SEQ_CLS": ("ForSequenceClassification",),
    "TOKEN_CLS": ("ForTokenClassification",),
    "QUESTION_ANS": ("ForQuestionAnswering", "ForQuestionAnsweringSimple"),
    "FEATURE_EXTRACTION": ("Model",),
}
"""How the classes end that PEFT's task types are trained on."""
_WITH_OUTPUT = ("LMHeadModel", "MTModel")
_OF_OPTION = {"reward": "SEQ_CLS"}


def merged_class(subject: AdapterSubject) -> str | None:
    """Return the class of transformers that base and adapter make, if the table has it.

    That is the class that the adapter's task makes, else the one that it was trained on, else the base's own.
    """
    config = None if subject.base is None else subject.base.config
    if config is None:
        return None
    known = prefixes_of(config.model_type or "")
    asked = subject.task and _OF_OPTION.get(subject.task, subject.task.replace("-", "_").upper())
    task, trained = asked or trained_for(subject.config), subject.config.trained_class
    if asked is None and subject.config.task_type is None and trained is not None:
        return trained if trained in known else None
    if task is None:
        own = next(iter(config.architectures), None)
        return own if own in known else None
    found = [name for name in known if name.endswith(_ENDINGS.get(task, ()))]
    plain = [name for name in found if task == "CAUSAL_LM" or not name.endswith(_WITH_OUTPUT)]
    return plain[0] if len(plain) == 1 else None


def merged_tensors(subject: AdapterSubject, *, sure: bool = False) -> ModelTensors | None:
    """Return the base's tensors compared with those of that class; None where no table tells.

    To be `sure` of what the table finds missing, transformers is asked.
    """
    name, base = merged_class(subject), subject.stored_base
    return None if name is None or base is None else base.as_class(name, sure=sure)
