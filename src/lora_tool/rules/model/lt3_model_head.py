"""LT306 to LT308 and LT312: the fields that a classifier's folder needs in addition to its weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from lora_tool.core.display import counted
from lora_tool.core.report import Severity
from lora_tool.formats import tokenizer
from lora_tool.models import architecture_of
from lora_tool.models.ends import CLASSIFICATION_HEADS, VALUE_HEADS, head_of
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject, ModelSubject, Subject
from lora_tool.rules.shared.heads import has_labels, head_weight, labels_of

_WHOLE = frozenset({Need.WEIGHTS, Need.CONFIG})
_DECODER_HEAD = "score"
"""The head of decoders, which read the score at the last token that is no padding."""

_NO_CLASSIFIER = re.compile(
    r"(?:For(?:CausalLM|ConditionalGeneration|MaskedLM|PreTraining)|LMHeadModel|(?<!Reward)Model)\Z"
)
"""Classes of transformers that have no head with labels. A reward model of other code may be called anything else."""


_ANSWERS = re.compile(r"ForQuestionAnswering\Z")
_ANSWERING = "qa_outputs.weight"


@rule("LT306", Severity.WARNING, on=Subject, needs=_WHOLE)
def no_pad_token(subject: Subject) -> Iterator[Fault]:
    """A reward model without a pad token.

    What it does: Looks for `pad_token_id` in the `config.json` of decoder models with a `score` head (but not of token
    classifiers, which score every token), and for `pad_token` in the tokenizer files beside a reward adapter (reported as
    info, because the base may have one).
    Why it matters: The score is read at the last token that is not padding. Without the pad token's id, transformers
    raises "Cannot handle batch sizes > 1", or reads the score of a padding token.
    Example: A Llama reward model whose `config.json` has `"pad_token_id": null`.
    What to do: Set `pad_token_id` in `config.json` to the id of the pad token that training used.

    `lora-tool validate --fix` sets it if the tokenizer beside the model names a pad token.
    """
    if isinstance(subject, ModelSubject):
        config = subject.checkpoint.config
        if config is not None and config.pad_token_id is None and _reads_the_last_token(subject):
            message = "is not set, so the model can score only one text at a time"
            yield Fault(subject="pad_token_id", message=message, path=config.path)
    elif isinstance(subject, AdapterSubject) and subject.is_reward():
        folder = subject.checkpoint.folder
        score = any(head_of(path) == _DECODER_HEAD for path in subject.view.paths.values())
        if score and tokenizer.CONFIG in folder.files and not _names_pad_token(folder.root, folder.files):
            message = "no tokenizer file in this folder names a pad token; the base's may"
            path = str(folder.root / tokenizer.CONFIG)
            hint = "set `pad_token` in tokenizer_config.json, so that the merged model gets its id"
            yield Fault(subject="pad_token", message=message, path=path, severity=Severity.INFO, hint=hint)


def _reads_the_last_token(subject: ModelSubject) -> bool:
    """Whether it is a decoder that scores a text at its last token; a token classifier scores all of them."""
    config = subject.checkpoint.config
    own = config.architectures[:1] if config is not None else ()
    each = any(name.endswith("ForTokenClassification") for name in own)
    return f"{_DECODER_HEAD}.weight" in subject.tensors and not each and has_labels(subject.checkpoint)


def _names_pad_token(root: Path, names: tuple[str, ...]) -> bool:
    """Whether a small tokenizer file names a pad token; its id would need the large ones."""
    tables = tokenizer.read_tokenizer(root, names).tables
    return any(tables.get(name, {}).get("pad_token") for name in (tokenizer.CONFIG, tokenizer.SPECIAL_MAP))


@rule("LT307", Severity.ERROR, on=ModelSubject, needs=_WHOLE)
def class_against_head(subject: ModelSubject) -> Iterator[Fault]:
    """The model's class and its head disagree.

    What it does: Compares `architectures` in `config.json` with the head tensors of the weights.
    Why it matters: If the class is a classifier and the files have no head, transformers initialises a random one on
    each load, with only a log line. If the class is a causal LM, transformers drops the head: the rewards are gone, and
    it may initialise a random `lm_head`.
    Example: `architectures` is `["LlamaForSequenceClassification"]`, but the weights have no `score.weight`.
    What to do: Set `architectures` to the trained class. If the head is missing, merge the adapter that has it.
    """
    model = subject.checkpoint
    if model.config is None or not model.config.architectures:
        return
    arch = architecture_of(model.config.model_type or "")
    named = {arch.head} if arch and arch.head else set(CLASSIFICATION_HEADS)
    found = sorted(name for name in model.tensors if any(name.startswith(f"{head}.") for head in named))
    class_name = model.config.architectures[0]
    path = str(model.config.path)
    if class_name.endswith("ForSequenceClassification") and not found and arch is not None:
        message = (
            f"is {class_name}, but the weights have no `{arch.head or 'score'}`: transformers would initialise "
            "it at random"
        )
        yield Fault(subject="architectures", message=message, path=path)
    elif class_name.endswith(("ForCausalLM", "LMHeadModel")) and found:
        message = f"is {class_name}, but the weights have `{found[0]}`: transformers would drop it"
        yield Fault(subject="architectures", message=message, path=path)


@rule("LT308", Severity.ERROR, on=ModelSubject, needs=_WHOLE)
def labels_against_head(subject: ModelSubject) -> Iterator[Fault]:
    """The config's number of labels does not match the head's rows.

    What it does: Compares `num_labels` in a classifier's `config.json`, or `id2label` if that is not set, with the rows
    of its head, and the head's bias with both. A question-answering head has two rows: the start and the end of the
    answer.
    Why it matters: Loading fails with a size mismatch or, with `ignore_mismatched_sizes`, initialises a random head. If
    the config names no labels, transformers assumes two, but a reward model has one.
    Example: `score.weight` is [1, 4096], but `config.json` has no `id2label`.
    What to do: Set `id2label` and `label2id` to as many labels as the head has rows: `{"0": "LABEL_0"}` for a reward
    model.

    `lora-tool validate --fix` sets them, unless the labels have names: it cannot know which names to keep.
    """
    model = subject.checkpoint
    weight, labels = head_weight(subject.tensors), labels_of(model)
    answers = model.config is not None and any(map(_ANSWERS.search, model.config.architectures))
    allowed = {
        2,
        max(2, (model.config.num_labels or 0) if model.config else 0),
    }  # some classes have a row for each label, and use two
    if answers and (answering := subject.tensors.get(_ANSWERING)) and not allowed & {*answering.shape[:1]}:
        message = f"is {list(answering.shape)}; expected two rows, for the start and the end of an answer"
        yield Fault(subject=answering.name, message=message, path=answering.path)
    bias = subject.tensors.get(f"{weight.name.removesuffix('weight')}bias") if weight and labels else None
    if weight and bias and bias.shape != weight.shape[:1]:
        message = f"is {list(bias.shape)}, but `{weight.name}` has {counted(weight.shape[0], 'row')}"
        yield Fault(subject=bias.name, message=message, path=bias.path)
    if weight is None or labels is None or model.config is None or labels == weight.shape[0]:
        return
    rows = f"`{weight.name}` in {weight.path.name} has {weight.shape[0]}"
    means = (
        f"means {counted(labels, 'label')}"
        if model.config.num_labels is not None
        else "is not set, which means 2 labels"
    )
    field = "num_labels" if model.config.raw.get("num_labels") is not None else "id2label"
    yield Fault(subject=field, message=f"{means}, {rows}", path=model.config.path)


@rule("LT312", Severity.ERROR, on=ModelSubject, needs=_WHOLE)
def no_head(subject: ModelSubject) -> Iterator[Fault]:
    """A model without the requested head.

    What it does: Looks for a head with labels (`score`, `classifier`) in a model that `--rm` or `--num-labels` declares
    a reward model or classifier. A model given as `--base` needs none.
    Why it matters: A causal LM loaded as a reward model gets a random head, a different one on every load. Its rewards
    mean nothing, and transformers only logs a line.
    Example: `lora-tool validate merged/ --rm`, where `config.json` has `"architectures": ["LlamaForCausalLM"]`.
    What to do: Merge the adapter that has the head into this base (`lora-tool merge ADAPTER --base MODEL --rm`). If the
    model should be a causal LM, omit `--rm` and `--num-labels`.
    """
    config = subject.checkpoint.config
    if config is None or (subject.num_labels is None and subject.task not in ("reward", "seq-cls")):
        return
    if any(head_of(name) in CLASSIFICATION_HEADS | VALUE_HEADS for name in subject.tensors):
        return
    class_name = next(iter(config.architectures), None)
    if class_name is not None and not _NO_CLASSIFIER.search(class_name):
        return  # LT307 reports a classifier that lost its head
    wanted = "a reward model" if subject.task == "reward" else "a classifier"
    message = (
        f"{wanted} was requested, but this is {class_name or 'a model without a class'} and its weights have no head"
    )
    yield Fault(subject="architectures", message=message, path=config.path)
