"""The task of the merged model: a causal language model, a sequence classifier with its head, or another class."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from lora_tool.adapters.targeting import trained_for
from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core.choices import Choice
from lora_tool.core.display import some
from lora_tool.core.keys import Part
from lora_tool.core.progress import decided
from lora_tool.models import architecture_of
from lora_tool.models.ends import CLASSIFICATION_HEADS, head_of


@enum.unique
class Task(Choice):
    """The values of `--task`. REWARD is SEQ_CLS with one label; AUTO follows the adapter and the base.

    AS_TRAINED is the class that the adapter was trained on, which PEFT records without a task type, else the class
    of the base.
    """

    AUTO = "auto"
    CAUSAL_LM = "causal-lm"
    SEQ_CLS = "seq-cls"
    REWARD = "reward"
    TOKEN_CLS = "token-cls"  # noqa: S105 - no password
    QUESTION_ANS = "question-ans"
    SEQ_2_SEQ_LM = "seq-2-seq-lm"
    FEATURE_EXTRACTION = "feature-extraction"
    AS_TRAINED = "as-trained"

    @classmethod
    def _missing_(cls, value: object) -> Choice:
        return cls.AS_TRAINED if value == "own-class" else super()._missing_(value)  # the old value, in manifests

    @property
    def expected(self) -> str | None:
        """The task that the rules expect of the merged model; None where adapter and base decide it."""
        return None if self in (Task.AUTO, Task.AS_TRAINED) else self.value

    @property
    def auto_class(self) -> str | None:
        """The class of transformers that loads such a model; None where only the class that the model names does."""
        return _AUTO_CLASSES.get(self)


CLASSIFIERS = frozenset({Task.SEQ_CLS, Task.REWARD})
"""The tasks whose model is a sequence classifier."""
_THE_TWO = CLASSIFIERS | {Task.CAUSAL_LM}
_AUTO_CLASSES = {
    Task.CAUSAL_LM: "AutoModelForCausalLM",
    Task.SEQ_CLS: "AutoModelForSequenceClassification",
    Task.REWARD: "AutoModelForSequenceClassification",
    Task.TOKEN_CLS: "AutoModelForTokenClassification",
    Task.QUESTION_ANS: "AutoModelForQuestionAnswering",
    Task.SEQ_2_SEQ_LM: "AutoModelForSeq2SeqLM",
    Task.FEATURE_EXTRACTION: "AutoModel",
}
_TASK_TYPES = {
    "CAUSAL_LM": Task.CAUSAL_LM,
    "SEQ_CLS": Task.SEQ_CLS,
    "TOKEN_CLS": Task.TOKEN_CLS,
    "QUESTION_ANS": Task.QUESTION_ANS,
    "SEQ_2_SEQ_LM": Task.SEQ_2_SEQ_LM,
    "FEATURE_EXTRACTION": Task.FEATURE_EXTRACTION,
}
_CLASSIFIER = "ForSequenceClassification"
_CAUSAL = ("ForCausalLM", "LMHeadModel")


def auto_class_for(task_type: str | None) -> str:
    """Return the class of transformers that loads what PEFT trains as this task type; None means a causal LM."""
    return _AUTO_CLASSES[_TASK_TYPES.get(task_type or "", Task.CAUSAL_LM)]


def names_classifier(class_names: tuple[str, ...]) -> bool:
    """Return whether `architectures` of a config names a sequence classifier."""
    return any(name.endswith(_CLASSIFIER) for name in class_names)


def trained_class(adapters: Sequence[AdapterDir], base: ModelDir) -> str | None:
    """Return the class that AS_TRAINED means: of the first adapter that names one, else of the base."""
    named = [adapter.config.trained_class for adapter in adapters if adapter.config]
    return next(filter(None, (*named, *base.whole_config.architectures)), None)


def declared_types(adapters: Sequence[AdapterDir]) -> frozenset[str | None]:
    """Return the task types that the adapters' configs name; None for one that names none."""
    return frozenset(adapter.config.task_type for adapter in adapters if adapter.config)


def other_task(task: Task, adapters: Sequence[AdapterDir], base: ModelDir) -> Task | None:
    """Return the merged model's task if it is neither a causal LM nor a sequence classifier.

    None where it is, or may be, one of the two: `decide_task` chooses. The rules let no adapters pass whose classes
    contradict each other.
    """
    if task is not Task.AUTO:
        return None if task in _THE_TWO else task
    declared = _declared(adapters)
    if declared is not None:
        return None if declared in _THE_TWO else declared
    own = next(iter(base.whole_config.architectures), None)
    # the head that an adapter brings is a sequence classifier's, if the base does not say that it has one of its own
    brought = not ("Classification" in (own or "") or "Answering" in (own or "")) and any(map(_carries_head, adapters))
    return Task.AS_TRAINED if own is not None and not brought and not _is_of_the_two(own, base) else None


def _declared(adapters: Sequence[AdapterDir]) -> Task | None:
    """Return the task in the adapters' configs: by task type, else by the trained class; None to go by the tensors."""
    said = [(each.config.task_type, trained_for(each.config)) for each in adapters if each.config]
    named = next((task_type or for_class for task_type, for_class in said if task_type or for_class == "SEQ_CLS"), None)
    if named is not None:
        return _TASK_TYPES[named]
    return Task.AS_TRAINED if any(for_class for _, for_class in said) else None


def _is_of_the_two(class_name: str, base: ModelDir) -> bool:
    row = architecture_of(base.whole_config.model_type or "")
    known = (row.causal_lm, row.sequence_classification) if row else ()
    return class_name.endswith((*_CAUSAL, _CLASSIFIER)) or class_name in known


def _carries_head(adapter: AdapterDir) -> bool:
    keys = (key for key in adapter.keys.values() if key.part in (Part.PLAIN, Part.SAVED_MODULE))
    return any(head_of(key.module, CLASSIFICATION_HEADS) for key in keys)


def decide_task(requested: Task, adapters: Sequence[AdapterDir], base: ModelDir, head: str | None) -> Task:
    """Return CAUSAL_LM, SEQ_CLS or REWARD: as requested, else by an adapter's config, else by whether one has a head,
    else by the base's own class. The rules have compared each adapter with the request and with the others.

    `head` is the path of the model's classification head, None where its class has none.
    """
    said = requested if requested is not Task.AUTO else _declared(adapters)
    if said is not None:
        why = "as requested" if requested is not Task.AUTO else "as the adapter's config says"
        decided(f"task: {said}, {why}")
        return said
    modules = {f"{key.module}." for adapter in adapters for key in adapter.keys.values()}
    has_head = head is not None and any(module.startswith(f"{head}.") for module in modules)
    if has_head:
        decided(f"task: {Task.SEQ_CLS}, because the adapter holds a head, `{head}`")
        return Task.SEQ_CLS
    task = Task.SEQ_CLS if names_classifier(base.whole_config.architectures) else Task.CAUSAL_LM
    decided(
        f"task: {task}, because the adapter names none and the base is {some(base.whole_config.architectures) or 'of no class'}"
    )
    return task
