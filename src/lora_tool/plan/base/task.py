"""What the merged model is for: a causal language model, a sequence classifier with its head, or another class."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from lora_tool.architectures import architecture_of
from lora_tool.architectures.heads import CLASSIFICATION_HEADS, head_of
from lora_tool.checkpoint import AdapterDir, ModelDir
from lora_tool.choices import Choice
from lora_tool.errors import UnsupportedAdapter
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.keys import Part


@enum.unique
class Task(Choice):
    """What `--task` takes. REWARD is SEQ_CLS with one label; AUTO is what adapter and base say.

    AS_TRAINED is the class that the adapter was trained on, which PEFT writes where there is no task type, or else the
    base's own.
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
        return cls.AS_TRAINED if value == "own-class" else super()._missing_(value)  # what manifests may still say

    @property
    def expected(self) -> str | None:
        """What the rules expect the merged model to be; None where adapter and base say it."""
        return None if self in (Task.AUTO, Task.AS_TRAINED) else self.value

    @property
    def auto_class(self) -> str | None:
        """The class of transformers that loads such a model; None where the model's own has to be named."""
        return _AUTO_CLASSES.get(self)


CLASSIFIERS = frozenset({Task.SEQ_CLS, Task.REWARD})
"""The tasks whose model is a sequence classifier."""
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
GENERATING_CLASSES = (*_CAUSAL, "ForConditionalGeneration")
"""How the names of classes that write text end."""


def is_classifier(class_names: tuple[str, ...]) -> bool:
    """Return whether `architectures` of a config names a sequence classifier."""
    return any(name.endswith(_CLASSIFIER) for name in class_names)


def trained_class(adapters: Sequence[AdapterDir], base: ModelDir) -> str | None:
    """Return the class that AS_TRAINED means: of the first adapter that names one, else of the base."""
    named = [adapter.config.trained_class for adapter in adapters if adapter.config]
    own = base.config.architectures if base.config else ()
    return next(filter(None, (*named, *own)), None)


def declared_types(adapters: Sequence[AdapterDir]) -> frozenset[str | None]:
    """Return the task types that the adapters' configs name; None for one that names none."""
    return frozenset(adapter.config.task_type for adapter in adapters if adapter.config)


def other_task(task: Task, adapters: Sequence[AdapterDir], base: ModelDir) -> Task | None:
    """Return what the merged model is where that is neither a causal LM nor a sequence classifier.

    None where it is, or may be, one of the two: `decide_task` tells which. Raises `UnsupportedAdapter` where the
    adapters' classes contradict each other.
    """
    if task is not Task.AUTO:
        return None if task in {Task.CAUSAL_LM, *CLASSIFIERS} else task
    declared = {adapter.root: _declared(adapter.config, base) for adapter in adapters if adapter.config}
    heard = set(declared.values()) - {None}
    if len(heard) > 1:
        tasks = ", ".join(f"{root}: {each or 'not set'}" for root, each in declared.items())
        raise UnsupportedAdapter(f"the adapters are for different tasks ({tasks}), so one model cannot hold them")
    if heard:
        return next(iter(heard - {Task.CAUSAL_LM, *CLASSIFIERS}), None)
    own = next(iter(base.config.architectures), None) if base.config else None
    # the head that an adapter brings is a sequence classifier's, if the base does not say that it has one of its own
    brought = not ("Classification" in (own or "") or "Answering" in (own or "")) and any(map(_carries_head, adapters))
    return Task.AS_TRAINED if own is not None and not brought and not _is_of_the_two(own, base) else None


def _declared(config: AdapterConfig | None, base: ModelDir) -> Task | None:
    """Return what the config of an adapter says: its task type, else the class that it was trained on."""
    if config is None:
        return None
    if config.task_type:
        return _TASK_TYPES[config.task_type]
    name = config.trained_class
    if name is None or (_is_of_the_two(name, base) and not name.endswith(_CLASSIFIER)):
        return None  # which of the two, its tensors tell
    return Task.SEQ_CLS if name.endswith(_CLASSIFIER) else Task.AS_TRAINED


def _is_of_the_two(class_name: str, base: ModelDir) -> bool:
    row = architecture_of(base.config.model_type or "") if base.config else None
    known = (row.causal_lm, row.sequence_classification) if row else ()
    return class_name.endswith((*_CAUSAL, _CLASSIFIER)) or class_name in known


def _carries_head(adapter: AdapterDir) -> bool:
    keys = (key for key in adapter.keys.values() if key.part in (Part.PLAIN, Part.SAVED_MODULE))
    return any(head_of(key.module, CLASSIFICATION_HEADS) for key in keys)


def decide_task(asked: Task, adapters: Sequence[AdapterDir], base: ModelDir, head: str | None) -> Task:
    """Return CAUSAL_LM, SEQ_CLS or REWARD: what all adapters say; one that says nothing follows the others.

    `head` is the path of the model's classification head, None where its class has none. The rules have compared each
    adapter with what was asked for. Raises `UnsupportedAdapter` where the adapters contradict each other.
    """
    if asked is not Task.AUTO:
        return asked
    configs = [(adapter, adapter.config) for adapter in adapters if adapter.config]
    votes = {adapter.root: _vote(adapter, config, base, head) for adapter, config in configs}
    heard = {votes[each.root] for each, config in configs if config.task_type or votes[each.root] is not Task.CAUSAL_LM}
    heard = heard or set(votes.values())
    if len(heard) > 1:
        tasks = ", ".join(f"{root}: {vote}" for root, vote in votes.items())
        raise UnsupportedAdapter(f"the adapters are for different tasks ({tasks}), so one model cannot hold them")
    return heard.pop()


def _vote(adapter: AdapterDir, config: AdapterConfig, base: ModelDir, head: str | None) -> Task:
    """Return the adapter's task: its `task_type`, else the class that it was trained on or a head among its tensors,
    else the base's own class.
    """
    classifier_base = base.config is not None and is_classifier(base.config.architectures)
    has_head = head is not None and any(
        key.module == head or key.module.startswith(f"{head}.") for key in adapter.keys.values()
    )
    return _declared(config, base) or (Task.SEQ_CLS if has_head or classifier_base else Task.CAUSAL_LM)
