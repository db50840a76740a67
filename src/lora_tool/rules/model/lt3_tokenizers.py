"""LT325 and LT326: the tokenizer beside an adapter against the base's and its embeddings, and whether there is one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from lora_tool.checkpoints.folders import listed
from lora_tool.core.errors import CorruptFile
from lora_tool.core.report import Severity
from lora_tool.formats.files import same_content
from lora_tool.formats.tokenizer import FAST, FILE_NAMES, own_files, tokenizer_of
from lora_tool.models.ends import LANGUAGE_MODELS, is_input
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject, ModelSubject, Subject
from lora_tool.rules.merged.subject import MergedSubject
from lora_tool.rules.model.lt3_model_ends import TRAINING_FILES, vocabulary_rows

_TOKENIZERS = frozenset(name for name in FILE_NAMES if not name.startswith("chat_template"))
_PERCENT = 100
_SMALL = 1000
"""A model of fewer tokens is a toy, or reads bytes, and may have rows to spare."""


@rule("LT325", Severity.WARNING, on=AdapterSubject, needs={Need.NAMES})
def other_words(subject: AdapterSubject) -> Iterator[Fault]:
    """The adapter's tokenizer has other ids than the base's.

    What it does: Compares the ids of all words that both tokenizers have, in whichever files they lie, and the number of
    words with the rows of the base's embeddings. Words that only one of them has, as added tokens, and rows without a
    word are right. An adapter that has the whole embedding has its own words.
    Why it matters: The base reads a word as the row that its id means. If the adapter was trained with other ids, it was
    trained on another base; and a merge writes the adapter's tokenizer beside the base's embeddings, so that the model
    reads and writes the wrong words.
    Example: `Ġhello` has the id 24748 in the adapter's `tokenizer.json`, and 23811 in the base's.
    What to do: Give the model that the adapter was trained on: `--base MODEL`. If this is it, remove the tokenizer's files
    from the adapter's folder: the base's are used then.
    """
    if subject.base is None or _has_own_embedding(subject):
        return
    here, there = (own_files(each.root, each.folder.tokenizer_files) for each in (subject.checkpoint, subject.base))
    if _is_copy(here, there):
        return
    from lora_tool.formats.vocabulary import vocabulary_of  # for tokenizers that differ

    mine, its = vocabulary_of(tokenizer_of(here)), vocabulary_of(tokenizer_of(there))
    if mine is None:
        return
    trained = {number for tokens in subject.view.tokens.values() for number in tokens.indices}
    moved = {} if its is None else {word: ids for word, ids in mine.moved(its).items() if ids[0] not in trained}
    rows = vocabulary_rows(subject)
    if moved and its is not None:
        word, (number, other) = next(iter(moved.items()))
        words = "1 word another id" if len(moved) == 1 else f"{len(moved):,} words other ids"
        yield Fault(
            message=f"gives {words} than {its.path} does: `{word}` has {number:,}, and {other:,} there", path=mine.path
        )
    elif rows is not None:
        beyond = sum(number >= rows for word, number in mine.ids.items() if word not in mine.added)
        few = its is None and rows > _SMALL and 2 * len(mine.ids) < rows
        if few or beyond * _PERCENT > len(mine.ids):
            message = f"has {len(mine.ids):,} words, but the base's embeddings have {rows:,} rows"
            yield Fault(message=message, path=mine.path)


_OF_TEXT = (*LANGUAGE_MODELS, "ForSequenceClassification")
_NOT_TEXT = frozenset({"chronos_config", "conv_dim", "num_codebooks", "num_mel_bins"})
"""Fields of the configs of models that read and write something else, in classes with the same endings."""


@rule("LT326", Severity.INFO, on=Subject)
def no_tokenizer(subject: Subject) -> Iterator[Fault]:
    """No tokenizer is with the weights.

    What it does: Looks for a tokenizer in the folder of a language model or sequence classifier, or of an adapter that a
    run saved for one; in the run's folder; and, for an adapter, beside the base.
    Why it matters: The folder cannot be used by itself. With a tokenizer from elsewhere, whose special tokens or chat
    template are others, the model sees other inputs than it was trained on.
    Example: A `checkpoint-300` with `adapter_model.safetensors` and `trainer_state.json`, and no `tokenizer.json` there
    or in the folder above.
    What to do: Save the tokenizer that training used: `tokenizer.save_pretrained(FOLDER)`. TRL and the Trainer save it
    if they are given it as `processing_class`.
    """
    # what a merge of an adapter lacks, LT615 reports
    if not isinstance(subject, AdapterSubject | ModelSubject) or isinstance(subject, MergedSubject):
        return
    folder, base = subject.checkpoint.folder, subject.base
    names = [*folder.files, *(listed(folder.root.absolute().parent) if folder.is_numbered else ())]
    if isinstance(subject, AdapterSubject):
        expected = folder.is_numbered or not TRAINING_FILES.isdisjoint(names)
        expected = expected and subject.config.task_type in ("CAUSAL_LM", "SEQ_CLS")
        config = None if base is None else base.config
        names += base.folder.files if base is not None else ()
    else:
        config = subject.checkpoint.config
        expected = config is not None and any(name.endswith(_OF_TEXT) for name in config.architectures)
    reads_text = config is None or _NOT_TEXT.isdisjoint(config.raw)
    if expected and reads_text and _TOKENIZERS.isdisjoint(names):
        yield Fault(message="has no tokenizer", path=folder.root)


def _has_own_embedding(subject: AdapterSubject) -> bool:
    """Return whether the adapter holds the whole input embedding, with rows for its own words."""
    return any(is_input(name.rpartition(".")[0]) for name in (*subject.view.saved, *subject.view.frozen))


def _is_copy(one: Mapping[str, Path], other: Mapping[str, Path]) -> bool:
    """Return whether both have the same `tokenizer.json`: nothing of it needs to be parsed."""
    try:
        return FAST in one and FAST in other and same_content(one[FAST], other[FAST])
    except CorruptFile:  # the rules about files report it
        return False
