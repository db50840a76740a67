"""The ends of a model folder: a classifier's head and its labels, the rows of the vocabulary, the token that ends a turn."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.checkpoints.quantised import as_matrices
from lora_tool.core.display import counted, named, some
from lora_tool.core.keys import Part
from lora_tool.core.report import Severity
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats import generation_config, tokenizer
from lora_tool.formats.generation_config import ends_of, read_generation_config
from lora_tool.formats.model_config import ModelConfig
from lora_tool.formats.tokenizer import read_tokenizer, tokens_in_use, turn_end
from lora_tool.models import architecture_of
from lora_tool.models.ends import CLASSIFICATION_HEADS, INPUTS, LANGUAGE_MODELS, MATRIX, VALUE_HEADS, head_of, is_input
from lora_tool.rules.adapter.lt3_head import has_labels, head_weight, labels_of
from lora_tool.rules.engine.registry import Fault, Need, Unchecked, rule
from lora_tool.rules.engine.subjects import AdapterSubject, ModelSubject, Subject

_WHOLE = frozenset({Need.WEIGHTS, Need.CONFIG})
_DECODER_HEAD = "score"
"""The name of a decoder's head: transformers takes the score of the last token that is not padding."""

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
        score = _DECODER_HEAD in map(head_of, subject.view.paths.values())
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
        known = subject.class_tensors
        if known is not None and not any(map(head_of, known.missing)):
            return  # a head without weights
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


_FEWER_LAYERS = frozenset({"albert", "efficientnet"})
"""Model types that use the weights of one layer for several, or count the parts of a layer."""
MORE_ROWS = frozenset({"cpmant", "csm_depth_decoder_model", "mllama", "mllama_text_model", "molmo2_text", "moshi"})
"""Model types that have rows for images, prompts, codebooks or a first token, too, which `vocab_size` does not count."""
_INPUT_WEIGHTS = tuple(f"{name}.weight" for name in INPUTS)


@rule("LT309", Severity.ERROR, on=Subject, needs=_WHOLE | {Need.BASE_IN_PART})
def token_without_row(subject: Subject) -> Iterator[Fault]:
    """A special token has no row in the embeddings.

    What it does: Compares the ids of the tokenizer's pad and eos token and of the control tokens in its chat template,
    and a model's `pad_token_id`, with the rows of the embeddings: the adapter's if it has them, else the base's.
    Why it matters: Tokens were added to the tokenizer, but the embeddings were not resized, or were resized and not
    saved. The first padded batch or chat fails with an IndexError, or on a GPU with "device-side assert triggered"; most
    models cannot even be built with such a `pad_token_id`.
    Example: `tokenizer.json` gives `[PAD]` the id 32000, but `embed_tokens.weight` has 32,000 rows.
    What to do: Use an existing token as the pad token (`tokenizer.pad_token = tokenizer.eos_token`), or resize the
    embeddings (`model.resize_token_embeddings(len(tokenizer))`) and save them with the adapter. If training resized
    them and saved no row, the trained rows are lost: train again with `save_embedding_layers=True`.

    If the tokenizer's pad token has a row, `lora-tool validate --fix` writes its id into a model's config.
    """
    checkpoint = subject.checkpoint
    rows = vocabulary_rows(subject)
    if rows is None or not isinstance(checkpoint, AdapterDir | ModelDir):
        return
    lacking = [
        (role, token) for role, token in tokens_in_use(checkpoint.root, checkpoint.folder.files) if token.id >= rows
    ]
    for role, same in itertools.groupby(lacking, lambda each: each[0]):
        tokens = [token for _, token in same]
        message = f"`{tokens[0].token}` has the id {tokens[0].id:,}, but the embeddings have {rows:,} rows"
        more = f"; so it is with {named([token.token for token in tokens[1:]])}" if tokens[1:] else ""
        yield Fault(subject=role, message=f"{message}{more}", path=tokens[0].path)
    if "pad_token" not in dict(lacking) and isinstance(checkpoint, ModelDir) and checkpoint.config is not None:
        pad = checkpoint.config.pad_token_id
        if pad is not None and pad >= rows:
            message = f"is {pad:,}, but the embeddings have {rows:,} rows"
            yield Fault(subject="pad_token_id", message=message, path=checkpoint.config.path)


def vocabulary_rows(subject: Subject) -> int | None:
    """Return how many tokens the embeddings know, None where there are none to look at."""
    if isinstance(subject, AdapterSubject):
        rows = set() if subject.base is None else {*embedding_rows(as_matrices(subject.base).tensors).values()}
        for item in subject.view.parts(Part.PLAIN, Part.SAVED_MODULE, Part.BASE_LAYER):
            if is_input(item.module) and len(item.tensor.shape) == MATRIX:
                rows.add(item.tensor.shape[0])
        for layer in subject.view.kinds:
            if layer.embedding and layer.a and is_input(layer.target) and len(layer.a.shape) == MATRIX:
                rows.add(layer.a.shape[1])
        return max(rows, default=None)
    held = subject.matrices if isinstance(subject, ModelSubject) else subject.tensors
    return max(embedding_rows(held).values(), default=None)


def embedding_rows(tensors: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Return the rows of each input embedding."""
    return {
        name: tensor.shape[0]
        for name, tensor in tensors.items()
        if name.endswith(_INPUT_WEIGHTS) and is_input(name.removesuffix(".weight")) and len(tensor.shape) == MATRIX
    }


@rule("LT310", Severity.ERROR, on=ModelSubject, needs=_WHOLE)
def not_whole(subject: ModelSubject) -> Iterator[Fault | Unchecked]:
    """Weights that do not match the config.

    What it does: Compares `num_hidden_layers` in `config.json` with the layers in the weights, for encoder and decoder
    separately, and `vocab_size` with the embedding's rows.
    Why it matters: transformers initialises missing layers at random, with only a log line, and the model talks
    nonsense. Another number of rows makes loading fail. Config and weights belong to two models, or a shard was lost
    and the index rewritten.
    Example: `config.json` has `"num_hidden_layers": 32`, but the weights have only layers 0 to 15.
    What to do: Copy the config and the weights again, from one place.
    """
    config = subject.plain.config
    if config is not None and config.quantization:
        yield Unchecked(reason=f"lora-tool does not read weights quantised by {config.quantization}")
    elif config is not None and config.custom_code and architecture_of(config.model_type or "") is None:
        yield Unchecked(reason="the model has its own code, which alone says how many layers and rows it has")
    elif config is not None:
        yield from _other_than_the_config(subject, config)


def _other_than_the_config(subject: ModelSubject, config: ModelConfig) -> Iterator[Fault]:
    path = str(config.path)
    lost = [] if config.model_type in _FEWER_LAYERS else [*_lost_layers(subject, config)]
    found = None if config.model_type in MORE_ROWS else vocabulary_without_rows(subject)
    known = subject.asked if lost or found else None
    if known is None or known.missing:
        yield from lost
    if found is not None:
        name, count = found
        if known is not None and known.shapes.get(name) == subject.shapes[name]:
            return
        message = f"is {config.vocab_size:,}, but `{name}` has {count:,} rows"
        yield Fault(subject="vocab_size", message=message, path=path)


def _lost_layers(subject: ModelSubject, config: ModelConfig) -> Iterator[Fault]:
    from lora_tool.models.layers import length, stacks  # only models need it

    found = stacks(subject.shapes)
    lengths = {stack: count for stack, layers in found.items() if (count := length(config, stack, layers)) is not None}
    for stack, wanted in lengths.items():
        lost = sorted(set(range(min(wanted, 100_000))) - found[stack].keys())
        if lost:
            where = f"layer {some(lost)}" + (f" of `{stack}`" if len(lengths) > 1 else "")
            message = f"is {wanted}, but the weights have no tensor of {where}"
            yield Fault(subject="num_hidden_layers", message=message, path=config.path)


def vocabulary_without_rows(subject: ModelSubject) -> tuple[str, int] | None:
    """Return an embedding and its rows, where none has as many as the config's `vocab_size`."""
    config, rows = subject.plain.config, embedding_rows(subject.matrices)
    if not rows or config is None or config.vocab_size is None:
        return None
    said = {config.vocab_size, *_vocabularies(config.raw)}
    return next(iter(rows.items())) if said.isdisjoint(rows.values()) else None


def _vocabularies(table: Mapping[str, Any]) -> Iterator[int]:
    """Yield the sizes of the vocabularies of parts that have their own, as the decoder's."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _vocabularies(value)
        elif name.endswith("vocab_size") and type(value) is int:
            yield value


TRAINING_FILES = frozenset({"training_args.bin", "trainer_state.json"})
"""What HF's Trainer writes into each save."""


@rule("LT320", Severity.WARNING, on=ModelSubject, needs=frozenset({Need.CONFIG}))
def never_stops(subject: ModelSubject) -> Iterator[Fault]:
    """The model does not stop at the end of a turn.

    What it does: Compares the token that ends a turn in the tokenizer's chat template, or its `eos_token` if there is
    no template, with the `eos_token_id` of `generation_config.json` or `config.json`. It only checks folders that were
    evidently trained or merged, because base models are published with a chat template that they were not trained with.
    Why it matters: The model has learnt to end its answer with that token, but generation continues after it up to the
    maximum length, so the model invents further turns.
    Example: `chat_template.jinja` ends turns with `<|im_end|>` (151645), and `generation_config.json` has
    `"eos_token_id": 151643`.
    What to do: Add the id to `eos_token_id` in `generation_config.json`, which may be a list: `[151643, 151645]`.
    `lora-tool merge` does so with the tokenizer beside the adapter, or else the base's.

    `lora-tool validate --fix` adds it to an existing model.
    """
    model = subject.checkpoint
    config = model.config
    if (
        config is None
        or not _was_trained(subject)
        or not any(name.endswith(LANGUAGE_MODELS) for name in config.architectures)
    ):
        return
    if not model.folder.tokenizer_files:  # LT326 reports that
        return
    generation = read_generation_config(model.root)
    ends, end = ends_of(config, generation), turn_end(read_tokenizer(model.root, model.folder.files))
    if end is not None and ends and not end.ids & {*ends}:
        path = model.root / generation_config.FILE_NAME if generation.get("eos_token_id") is not None else config.path
        listed = ", ".join(map(str, ends))
        message = f"is {listed}, but `{end.token.token}` ({end.token.id}) ends a turn in {end.token.path.name}"
        yield Fault(subject="eos_token_id", message=message, path=path)


def _was_trained(subject: ModelSubject) -> bool:
    folder = subject.checkpoint.folder
    compared = subject.expected is not None or subject.base is not None
    return compared or folder.is_numbered or bool(TRAINING_FILES & {*folder.files})
