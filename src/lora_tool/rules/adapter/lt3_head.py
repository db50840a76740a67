"""LT301 to LT304: the head of a classification or reward model, and how many labels a config means."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from lora_tool.adapters.targeting import is_of_base_model, trained_for
from lora_tool.checkpoints import ModelDir
from lora_tool.checkpoints.nearby import consolidate_command
from lora_tool.core.display import counted
from lora_tool.core.keys import Part
from lora_tool.core.report import Severity
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.model_config import TRANSFORMERS_LABELS
from lora_tool.models import architecture_of
from lora_tool.models.ends import (
    CLASSIFICATION_HEADS,
    CLASSIFICATION_TASKS,
    MATRIX,
    PEFT_CLASSIFIERS,
    VALUE_HEADS,
    head_of,
    is_end,
    is_last_layer,
    last_weights,
)
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject, ModelSubject, Subject

CLASSIFYING = ("ForSequenceClassification", "ForTokenClassification")
"""How the names of the classes end whose heads have one row per label."""


def saved_heads(subject: AdapterSubject) -> Mapping[str, StoredTensor]:
    """Return the head tensors that the adapter carries whole, by the model's own names."""
    heads: dict[str, StoredTensor] = {}
    for item in subject.view.parts(Part.PLAIN, Part.SAVED_MODULE):
        if head_of(item.module):
            heads[item.name] = item.tensor
    return heads


def carries_head(subject: AdapterSubject) -> bool:
    """Return whether a head is saved: one of the known names, or a top-level module outside the adapted trunk."""
    if not CLASSIFICATION_HEADS.isdisjoint(map(head_of, saved_heads(subject))):
        return True
    trunks = {layer.target.partition(".")[0] for layer in subject.layers}
    tops = {item.module.partition(".")[0] for item in subject.view.parts(Part.PLAIN) if not is_end(item.module)}
    return bool(tops - trunks - VALUE_HEADS)


def head_weight(tensors: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """Return the matrix among `tensors` that has one row per label, None where there is none."""
    for head in sorted(CLASSIFICATION_HEADS):
        for name in last_weights(head):
            tensor = tensors.get(name)
            if tensor is not None and len(tensor.shape) == MATRIX and tensor.spec.numel:
                return tensor
    return None


def lora_heads(subject: AdapterSubject) -> Mapping[str, StoredTensor]:
    """Return the lora_B of each head that has LoRA on it, by module path."""
    return dict(
        subject.view.found(lambda layer: [(layer.target, layer.b)] if layer.b and head_of(layer.target) else [])
    )


def lora_head_rows(subject: AdapterSubject) -> StoredTensor | None:
    """Return the lora_B that has one row per label, None where no head is known to end in its module.

    That is the base's head where it has one: XLNet has its labels behind what XLM's head is called.
    """
    own = head_weight(subject.base.tensors) if subject.base is not None else None
    for module, lora_b in lora_heads(subject).items():
        if lora_b.shape and (is_last_layer(module) if own is None else own.name == f"{module}.weight"):
            return lora_b
    return None


def has_labels(model: ModelDir) -> bool:
    """Return whether the model's config names a sequence or token classifier."""
    return model.config is not None and any(name.endswith(CLASSIFYING) for name in model.config.architectures)


def labels_of(model: ModelDir) -> int | None:
    """Return how many labels a classifier's config means; None for a model that is none."""
    if model.config is None or not has_labels(model):
        return None
    return TRANSFORMERS_LABELS if model.config.num_labels is None else model.config.num_labels


_WHOLE = frozenset({Need.WEIGHTS, Need.CONFIG})
_IMAGE_OR_TEXT = 'this is right for an image classifier; a text classifier needs "task_type": "SEQ_CLS"'


@rule("LT301", Severity.ERROR, on=AdapterSubject, needs=_WHOLE, unmergeable=True)
def head_missing(subject: AdapterSubject) -> Iterator[Fault]:
    """The trained head is not in the adapter.

    What it does: Looks for the head of adapters whose `task_type` is SEQ_CLS or TOKEN_CLS, that were trained on a
    classifier class without a task type, or that `--rm` declares reward models. PEFT lists both `classifier` and
    `score` in `modules_to_save`; the file must have one of them.
    Why it matters: A reward model without its head has no rewards: PEFT fails with a bare KeyError, and other tools add
    a random head, a different one on every load.
    Example: A SEQ_CLS adapter with 224 LoRA tensors and no `base_model.model.score.weight`.
    What to do: Take `score.weight` from the training checkpoint, if the run saved one: `lora-tool consolidate
    CHECKPOINT`. Otherwise train again with `task_type="SEQ_CLS"`.

    If the base is itself a trained reward model, its head is used, so this is only a warning. It is also a warning if
    `task_type` is not set and the base is unknown, because PEFT then uses the base's head.
    """
    config = subject.config
    classifies = (config.trained_class or "").endswith(CLASSIFYING)
    unsaid = config.task_type is None and not subject.is_reward() and classifies
    expected = config.task_type in CLASSIFICATION_TASKS or subject.is_reward() or unsaid
    if not expected or config.task_type == "CAUSAL_LM" or not subject.layers:
        return
    if carries_head(subject) or lora_heads(subject):
        return
    lost = "the file has no trained head (`score.weight` or `classifier.weight`)"
    base_head = _head_of_base(subject)
    if base_head is None and not (unsaid and subject.base is None):
        yield Fault(message=f"{lost}: the trained rewards are lost", hint=_where_the_head_is(subject))
    elif base_head is None:
        message = (
            f"{lost}, and the adapter was trained on a {config.trained_class} without a task type; the base "
            "must have the head"
        )
        yield Fault(message=message, severity=Severity.WARNING, hint=_without_base(subject))
    elif not unsaid and head_of(base_head.name) in PEFT_CLASSIFIERS:  # PEFT keeps any other head
        message = f"the file has no trained head; the base has one, `{base_head.name}`, but PEFT would not use it"
        yield Fault(message=message, severity=Severity.WARNING)


def _head_of_base(subject: AdapterSubject) -> StoredTensor | None:
    """Return a tensor of the base's head: one row per label, or whatever lies in its architecture's."""
    if subject.base is None:
        return None
    tensors, config = subject.base.tensors, subject.base.config
    arch = architecture_of(config.model_type or "") if config else None
    inside = (tensor for name, tensor in tensors.items() if arch and arch.head and name.startswith(f"{arch.head}."))
    return head_weight(tensors) or next(inside, None)


def _where_the_head_is(subject: AdapterSubject) -> str | None:
    command = consolidate_command(subject.checkpoint.root)
    return f"recover it from the training checkpoint: {command}" if command else None


def _without_base(subject: AdapterSubject) -> str:
    """Return where the head is, or how to see whether the base has it."""
    validate = f"lora-tool validate {shlex.quote(str(subject.checkpoint.root))} --base MODEL"
    return _where_the_head_is(subject) or f"look whether the base has it: {validate}"


@rule("LT302", Severity.ERROR, on=AdapterSubject, needs=_WHOLE, unmergeable=True)
def head_base_lost(subject: AdapterSubject) -> Iterator[Fault]:
    """LoRA on a head whose frozen weight was never saved.

    What it does: Looks for LoRA on `score` or `classifier` if neither adapter nor base has the head's own weight.
    Why it matters: The head of a fresh reward model is random. LoRA on it trains a difference to random numbers that
    were not saved, so the rewards are lost. `target_modules="all-linear"` does this in some trainers.
    Example: The adapter has `score.lora_A` and `score.lora_B`, and the base is a causal LM.
    What to do: Take the frozen `score.weight` from the training checkpoint (`global_stepN/`): `lora-tool consolidate
    CHECKPOINT`. Next time, keep the head out of `target_modules` and let `task_type="SEQ_CLS"` save it.
    """
    for module, lora_b in _lost_heads(subject).items():
        if subject.base is None:
            message = f"LoRA on `{module}`, whose frozen weight is not in the file; the base must have it"
            yield Fault(subject=lora_b.name, message=message, severity=Severity.WARNING, hint=_without_base(subject))
        else:
            message = f"LoRA on `{module}`, but its frozen weight is neither in the file nor in {subject.base.root}"
            yield Fault(subject=lora_b.name, message=message, hint=_where_the_head_is(subject))


def _lost_heads(subject: AdapterSubject) -> dict[str, StoredTensor]:
    """Return the lora_B of each head under LoRA whose own weight is neither in the adapter nor in the base."""
    heads = lora_heads(subject)
    if not heads:
        return {}
    kept = {item.module for item in subject.view.parts(Part.BASE_LAYER)}
    kept |= {name.rpartition(".")[0] for name in saved_heads(subject)}
    if subject.base is not None:
        kept |= {name.removesuffix(".weight") for name in subject.base.tensors}
    return {module: lora_b for module, lora_b in heads.items() if module not in kept}


@rule("LT303", Severity.ERROR, on=Subject, needs=_WHOLE | {Need.BASE_IN_PART}, unmergeable=True)
def labels_disagree(subject: Subject) -> Iterator[Fault]:
    """The head's rows do not match the number of labels.

    What it does: Compares the rows of the head with `--num-labels` (`--rm` means one), and an adapter's head also with
    the labels of a base that is a classifier. LT308 compares a model's head with its own config.
    Why it matters: Loading fails with a size mismatch. A reward model with two rows gives two numbers, of which tools
    use the first. transformers assumes two labels if the config names none.
    Example: `score.weight` is [2, 4096] in what should be a reward model.
    What to do: Give the number of labels that was trained (`--num-labels N`), or correct `id2label` in `config.json`.

    A head that the adapter carries whole replaces the base's, so a base with another number of labels is only a
    warning.
    """
    if isinstance(subject, AdapterSubject):
        weight = head_weight(saved_heads(subject)) or lora_head_rows(subject)
        base = subject.base
        in_config = labels_of(base) if base else None
    elif isinstance(subject, ModelSubject):
        weight = head_weight(subject.tensors)
        base, in_config = None, None
    else:
        return
    if weight is None or not weight.shape:
        return
    rows, given = f"has {counted(weight.shape[0], 'row')}", subject.num_labels
    if given is not None and given != weight.shape[0]:
        yield Fault(
            subject=weight.name,
            message=f"{rows}, but {counted(given, 'label')} {'is' if given == 1 else 'are'} requested",
            path=weight.path,
        )
    elif in_config is not None and in_config != weight.shape[0] and base is not None:
        message = f"{rows}, but {base.root / 'config.json'} has {counted(in_config, 'label')}"
        replaced = weight in saved_heads(subject).values() if isinstance(subject, AdapterSubject) else False
        if replaced:
            message += f"; a merge uses this head, and PEFT needs num_labels={weight.shape[0]} to load the base"
        severity = Severity.WARNING if replaced else None
        yield Fault(subject=weight.name, message=message, path=weight.path, severity=severity)


@rule("LT304", Severity.ERROR, on=AdapterSubject, needs=_WHOLE | {Need.BASE_IN_PART}, unmergeable=True)
def wrong_task(subject: AdapterSubject) -> Iterator[Fault]:
    """The task type contradicts the head.

    What it does: Looks for a head (`score`, `classifier`, `v_head`) in adapters whose `task_type` is CAUSAL_LM or not
    set, for a requested task (`--rm`, `--task`) that is not the adapter's, and for a causal LM's adapter with a base
    that is a classifier.
    Why it matters: PEFT builds the model that `task_type` names. Loaded as a causal LM, a reward adapter silently loses
    its head and answers with text logits instead of rewards.
    Example: `task_type` is `"CAUSAL_LM"`, but `base_model.model.score.weight` is in the file.
    What to do: Set `"task_type": "SEQ_CLS"` if this is a reward model or classifier; otherwise omit `--rm`.

    `lora-tool validate --fix` sets it for a head of one row, if `--rm` is given, or if `auto_mapping` names the trained
    class.

    PEFT has no task type for image classifiers, so a `classifier` in `modules_to_save` is reported as info. Without a
    task type, the class that the adapter was trained on (`auto_mapping`) decides instead.
    """
    task = subject.config.task_type
    heads = _heads_present(subject)
    wrong = _contradicted_task(subject, has_head=bool(heads))
    if wrong is not None:
        message, hint = wrong
        yield Fault(subject="task_type", message=message, path=subject.config_path, hint=hint)
    trained = trained_for(subject.config)  # a class with a head, maybe: a BertForMultipleChoice
    if task not in ("CAUSAL_LM", None) or (task is None and trained is not None and not is_of_base_model(trained)):
        return
    for head, tensor in heads.items():
        message = f"is a `{head}` head, but task_type is {task or 'not set'}: PEFT would load a model without this head"
        severity = None if task or subject.task == "causal-lm" else _without_task(subject, head)
        hint = _IMAGE_OR_TEXT if severity is Severity.INFO else None
        yield Fault(subject=tensor.name, message=message, severity=severity, hint=hint)


_TASK_TYPES = {
    "causal-lm": "CAUSAL_LM",
    "seq-cls": "SEQ_CLS",
    "reward": "SEQ_CLS",
    "token-cls": "TOKEN_CLS",
    "question-ans": "QUESTION_ANS",
    "seq-2-seq-lm": "SEQ_2_SEQ_LM",
    "feature-extraction": "FEATURE_EXTRACTION",
}
"""What may be asked for → PEFT's word for it."""


_AS_IT_IS = "leave out --task, or --rm: the adapter says what it is"


def _contradicted_task(subject: AdapterSubject, *, has_head: bool) -> tuple[str, str | None] | None:
    """Return how `task_type` contradicts the requested task or the base's class, and the way out; None if it does not.
    The page's hint is for the base's class.
    """
    task, wanted = subject.config.task_type, _TASK_TYPES.get(subject.task or "")
    if task == "CAUSAL_LM" and subject.is_reward():
        way = _where_the_head_is(subject) or 'train again with task_type="SEQ_CLS"'
        hint = f"judge it as a causal LM; if a reward model was trained, its head was not saved: {way}"
        message = "a reward model was requested, but this is the adapter of a causal LM and has no head"
        return None if has_head else (message, hint)
    if task == "SEQ_CLS" and subject.task == "causal-lm":
        return "a causal LM was requested, but this is the adapter of a sequence classifier", _AS_IT_IS
    if task is not None and wanted not in (None, task):
        return f"is {task}, but {subject.task} was requested", _AS_IT_IS
    trained = trained_for(subject.config)
    if task is None and trained in CLASSIFICATION_TASKS and wanted not in (None, trained):
        name = subject.config.trained_class
        return f"is not set, but the adapter was trained on a {name}, and {subject.task} was requested", _AS_IT_IS
    base = subject.base.config if subject.base else None
    classifier = next((name for name in base.architectures if name.endswith(CLASSIFYING[0])), None) if base else None
    if classifier and "CAUSAL_LM" in (task, wanted if task is None else None):
        return f"{'is CAUSAL_LM' if task else 'a causal LM was requested'}, but the base is a {classifier}", None
    return None


def _heads_present(subject: AdapterSubject) -> dict[str, StoredTensor]:
    """Return one tensor of each head, saved whole or under LoRA; a head that LT302 calls lost is not there."""
    lost = _lost_heads(subject)
    heads: dict[str, StoredTensor] = {}
    for path, tensor in (*saved_heads(subject).items(), *lora_heads(subject).items()):
        head = head_of(path)
        if path not in lost and head in CLASSIFICATION_HEADS | VALUE_HEADS:
            heads.setdefault(head, tensor)
    return heads


def _without_task(subject: AdapterSubject, head: str) -> Severity:
    return Severity.INFO if head == "classifier" and subject.config.saves(head) else Severity.WARNING
