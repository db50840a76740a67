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
_ENCODER = "EncoderModel"
"""How the classes end that are the encoder of a model with a decoder."""
_OF_OPTION = {"reward": "SEQ_CLS"}


def merged_class(subject: AdapterSubject) -> str | None:
    """Return the class of transformers that base and adapter make, if the table has it.

    That is the class that the adapter's task makes, else the one that it was trained on, else the base's own.
    """
    config = None if subject.base is None else subject.base.config
    if config is None:
        return None
    known, task, trained = prefixes_of(config.model_type or ""), _task(subject), subject.config.trained_class
    own = next(iter(config.architectures), "")
    if task is None or (task == "FEATURE_EXTRACTION" and own.endswith(_ENCODER)):
        name = trained or own
        return name if name in known else None
    found = [name for name in known if _is_for(name, task)]
    return found[0] if len(found) == 1 else None


def makes_unknown_class(subject: AdapterSubject) -> bool:
    """Return whether base and adapter make another class than the base's own, and no table tells what that needs."""
    config = None if subject.base is None else subject.base.config
    if config is None or not config.architectures:
        return False
    own, task, trained = config.architectures[0], _task(subject), subject.config.trained_class
    name = merged_class(subject)
    if name is not None:
        return name != own and merged_tensors(subject) is None
    return trained not in (None, own) if task is None else not _is_for(own, task)


def _task(subject: AdapterSubject) -> str | None:
    """Return PEFT's task type of the merged model; None where the class that was trained, or the base's, says it all."""
    if subject.task is not None:
        return _OF_OPTION.get(subject.task, subject.task.replace("-", "_").upper())
    unnamed = subject.config.task_type is None and subject.config.trained_class is not None
    return None if unnamed else trained_for(subject.config)


def _is_for(class_name: str, task: str) -> bool:
    plain = task == "CAUSAL_LM" or not class_name.endswith(_WITH_OUTPUT)
    return plain and class_name.endswith(_ENDINGS.get(task, ()))


def merged_tensors(subject: AdapterSubject, *, sure: bool = False) -> ModelTensors | None:
    """Return the base's tensors compared with those of that class; None where no table tells.

    To be `sure` of what the table finds missing, transformers is asked.
    """
    name, base = merged_class(subject), subject.stored_base
    return None if name is None or base is None else base.as_class(name, sure=sure)
