"""Which rows of a layer a new head has, as the user asks for them: tokens of a judge, or labels of a classifier."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.checkpoints import ModelDir
from lora_tool.core.choices import suggestion
from lora_tool.core.errors import UnsupportedAdapter, WrongValue
from lora_tool.formats.fields import is_strings
from lora_tool.formats.sentence_transformers import score_tokens
from lora_tool.formats.vocabulary import WordIds

ONE = "LABEL_0"
"""What transformers calls the one label of a reward model."""


def finite(value: object) -> float:
    """Return a finite number. Raises `WrongValue` for everything else."""
    try:
        found = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise WrongValue(f"number: expected a number, found {value!r}")
    return found


def factor(value: object) -> float:
    """Return a finite number other than 0. Raises `WrongValue` for everything else."""
    found = finite(value)
    if found == 0:
        raise WrongValue("number: expected a number other than 0, with which every score would be 0")
    return found


class Asked(Struct, frozen=True, kw_only=True):
    """The head that is asked for: one score, the difference of `yes` and `no`, or a row for each of the `labels`."""

    yes: str | None = None
    no: str | None = None
    labels: tuple[str, ...] = ()
    """Each as NAME=T, or T for both."""
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.no is not None and self.yes is None:
            raise WrongValue("`no=T` needs `yes=T`: the score is the logit of one token, or the difference of two")
        if self.labels and self.yes is not None:
            raise WrongValue("`yes=T` makes one score, `label=T` a row for each label: give one of the two")
        if self.yes is not None and self.yes == self.no:
            raise WrongValue(f"`yes` and `no` are both {self.yes!r}: every score would be 0")


class Label(Struct, frozen=True, kw_only=True):
    """A row of the new head: rows of the layer it is made of, each with the words for it and its coefficient."""

    name: str
    terms: tuple[tuple[str, int, float], ...]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON data, for the manifest."""
        rows = [{"of": what, "row": row, "coefficient": coefficient} for what, row, coefficient in self.terms]
        return {"label": self.name, "rows": rows}

    def __str__(self) -> str:
        words = [f"{_sign(coefficient)}`{word}` ({row})" for word, row, coefficient in self.terms]
        return " ".join(words).removeprefix("+ ")


def _sign(coefficient: float) -> str:
    """Return what stands before a term of a sum."""
    size = "" if abs(coefficient) == 1 else f"{abs(coefficient):g}·"
    return f"{'-' if coefficient < 0 else '+'} {size}"


def labels_asked(asked: Asked, row_of: Callable[[str, str], int]) -> tuple[Label, ...]:
    """Return the rows that are asked for; `row_of` finds the row of a word, and is given the option that names it.

    Raises `WrongValue` for a name that two labels have, `UnsupportedAdapter` for two words that are one.
    """
    if asked.yes is not None:
        terms = [(asked.yes, row_of(asked.yes, "yes"), asked.scale)]
        if asked.no is not None:
            terms.append((asked.no, row_of(asked.no, "no"), -asked.scale))
            if terms[0][1] == terms[1][1]:
                raise UnsupportedAdapter(
                    f"{asked.yes!r} and {asked.no!r} are the same row, {terms[0][1]}: every score would be 0",
                    hint="give two different answers of the model: `yes=T`, `no=T`",
                )
        return (Label(name=ONE, terms=tuple(terms)),)
    found: dict[str, Label] = {}
    for each in asked.labels:
        name, given, word = each.partition("=")
        word = word if given else name
        if name in found:
            raise WrongValue(f"label: two labels are called {name!r}", hint="give each its own name: `label=NAME=T`")
        found[name] = Label(name=name, terms=((word, row_of(word, "label"), asked.scale),))
    return tuple(found.values())


def token_rows(words: WordIds, rows: int) -> Callable[[str, str], int]:
    """Return what finds the row of a token in an output layer of so many rows.

    It raises `UnsupportedAdapter` for what is not exactly one token of the vocabulary.
    """

    def row_of(text: str, option: str) -> int:
        word = words.spelled(text)
        if word is None:
            meant = [each for each in _alike(text) if words.spelled(each) is not None]
            hint = f"as the model writes it: `{option}={shlex.quote(meant[0])}`" if meant else None
            raise UnsupportedAdapter(
                f"{words.path}: {text!r} is not one token of the tokenizer"
                + (
                    f"; {' and '.join(map(repr, meant))} are"
                    if len(meant) > 1
                    else f"; {meant[0]!r} is"
                    if meant
                    else ""
                ),
                hint=hint or "give an answer that is one token, as the model writes it",
            )
        if words.ids[word] >= rows:
            raise UnsupportedAdapter(
                f"{words.path}: {text!r} is token {words.ids[word]}, but the output layer has {rows} rows",
                hint="give the tokenizer and the model of one training",
            )
        return words.ids[word]

    return row_of


def other_spellings(words: WordIds, labels: Sequence[Label]) -> Iterator[str]:
    """Yield a note for each token that is another with a blank before it, which models often write."""
    for text, row, _ in (term for label in labels for term in label.terms):
        other = text[1:] if text.startswith(" ") else f" {text}"
        word = words.spelled(other)
        if word is not None and words.ids[word] != row:
            yield f"{text!r} is token {row}; {other!r} is another, {words.ids[word]}: check which of them the model answers with"


def _alike(text: str) -> Iterator[str]:
    """Yield other texts that may be meant: in lower or upper case, with a blank before it or without one."""
    bare = text.strip()
    forms = dict.fromkeys((bare, bare.lower(), bare.capitalize(), bare.upper()))
    blanks = (" ", "") if text.startswith(" ") else ("", " ")
    yield from (each for blank in blanks for form in forms if form and (each := f"{blank}{form}") != text)


def label_rows(names: Sequence[str], root: Path) -> Callable[[str, str], int]:
    """Return what finds the row of a label of a classifier. It raises `UnsupportedAdapter` for any other word."""

    def row_of(word: str, _: str) -> int:
        if names.count(word) != 1:
            which = "the name of several of its labels" if word in names else "none of its labels"
            raise UnsupportedAdapter(f"{root}: {word!r} is {which}", hint=suggestion(word, names))
        return names.index(word)

    return row_of


# The tokens that a folder names itself.


_DIFFERENCE, _EACH = "from_2_way_softmax", "no_post_processing"
VLLM_FIELDS = ("classifier_from_token", "method", "is_original_qwen3_reranker")
"""Fields of a judge's config.json by which vLLM makes a classifier of it when it loads it."""


def tokens_named(model: ModelDir, words: WordIds, asked: Asked) -> Asked:
    """Return the request; one without tokens gets those that the judge's folder names.

    sentence-transformers' `LogitScore` has one or two ids, vLLM's `classifier_from_token` the false token first, or one
    for each label. Raises `WrongValue` where the folder names none.
    """
    if asked.yes is not None or asked.labels:
        return asked
    texts = {number: text for text, number in words.ids.items()}
    score, raw = score_tokens(model.root), model.whole_config.raw
    if score is not None:
        no = None if score.no is None else texts.get(score.no, "")
        return replace(asked, yes=texts.get(score.yes, ""), no=no)
    tokens = ["no", "yes"] if raw.get("is_original_qwen3_reranker") is True else raw.get("classifier_from_token")
    method = raw.get("method", _DIFFERENCE)
    if is_strings(tokens) and len(tokens) == 2 and method == _DIFFERENCE:  # noqa: PLR2004 - two ways
        return replace(asked, yes=tokens[1], no=tokens[0])
    if is_strings(tokens) and tokens and method == _EACH:
        return replace(asked, labels=tuple(f"{token}={token}" for token in tokens))
    raise WrongValue(
        f"{model.root} does not say which tokens it answers with",
        hint="name them: `yes=T`, `no=T`, or a `label=NAME=T` for each answer",
    )
