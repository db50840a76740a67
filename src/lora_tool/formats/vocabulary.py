"""The words of a tokenizer and their ids, from the files of any of its forms."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from msgspec import DecodeError, Struct, field
from msgspec.json import decode

from lora_tool.core.errors import CorruptFile
from lora_tool.formats.files import MAX_JSON_BYTES, read_all
from lora_tool.formats.tokenizer import FAST, Tokenizer

_USUAL_SHIFT = 10
"""Of so many words that two forms share, all but one must be moved by the same number, or none is taken to be."""


class WordIds(Struct, frozen=True, kw_only=True):
    """The words of one tokenizer, byte-level ones in GPT-2's letters, with their ids."""

    path: Path
    ids: Mapping[str, int]
    added: frozenset[str] = frozenset()
    """Those that were added to the vocabulary, as special tokens are."""

    def spelled(self, text: str) -> str | None:
        """Return the one word that a text is, as the vocabulary spells it; None where it is none, or several.

        Byte-level vocabularies have a letter for each byte, `Ġ` for a blank, SentencePiece has `▁` for a blank. A word
        may be given in that spelling, too.
        """
        pieces = any(word.startswith(_PIECE_BLANK) for word in self.ids)
        by_bytes = not pieces and any(word.startswith(_BYTE_BLANK) for word in self.ids)
        inside = _letters(text.encode()) if by_bytes and text not in self.added else text.replace(" ", _PIECE_BLANK)
        return next((word for word in (inside, text) if word in self.ids), None)

    def moved(self, other: WordIds) -> dict[str, tuple[int, int]]:
        """Return the words that both have under different ids, with both ids.

        fairseq's models keep their own special tokens before the pieces of a SentencePiece file: between files of two
        forms a shift of all words by one number, and the special tokens, do not count.
        """
        found = {
            word: (number, there)
            for word, number in self.ids.items()
            if (there := other.ids.get(word)) is not None and there != number
        }
        if not found or self.path.name == other.path.name:
            return found
        shift, count = Counter(number - there for number, there in found.values()).most_common(1)[0]
        common = sum(word in other.ids for word in self.ids)
        if _USUAL_SHIFT * (common - count) > common:
            shift = 0
        return {
            word: ids for word, ids in found.items() if ids[0] - ids[1] != shift and not word.startswith(("<", "["))
        }


def vocabulary_of(tokenizer: Tokenizer) -> WordIds | None:
    """Return the words of a tokenizer by the first of its files that holds them; None where none can be read."""
    for name, read in _FORMS.items():
        path = tokenizer.paths.get(name)
        if path is None:
            continue
        try:
            ids = dict(read(read_all(path, limit=MAX_JSON_BYTES)))
        except (CorruptFile, DecodeError, ValueError, IndexError):  # the rules about files report it
            continue
        if ids:
            added = tokenizer.added
            return WordIds(path=path, ids=ids | added, added=frozenset(added))
    return None


class _Model(Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = field(default_factory=dict)


class _Fast(Struct):
    """The part of `tokenizer.json` that has the words: the merges are half of the file, and are passed over."""

    model: _Model


def _fast(content: bytes) -> Iterator[tuple[str, int]]:
    vocab = decode(content, type=_Fast).model.vocab
    if isinstance(vocab, dict):
        yield from vocab.items()
    else:  # Unigram: the position is the id
        yield from ((entry[0], number) for number, entry in enumerate(vocab))


def _table(content: bytes) -> Iterator[tuple[str, int]]:
    yield from decode(content, type=dict[str, int]).items()


def _lines(content: bytes) -> Iterator[tuple[str, int]]:
    yield from ((word, number) for number, word in enumerate(content.decode().split("\n")) if word)


class _TekkenWord(Struct):
    rank: int
    token_bytes: str


class _TekkenConfig(Struct):
    default_num_special_tokens: int
    default_vocab_size: int


class _Tekken(Struct):
    config: _TekkenConfig
    vocab: list[_TekkenWord]


def _tekken(content: bytes) -> Iterator[tuple[str, int]]:
    """Read Mistral's file: the special tokens come before the words."""
    table = decode(content, type=_Tekken)
    first = table.config.default_num_special_tokens
    for word in table.vocab[: table.config.default_vocab_size - first]:
        yield _letters(base64.b64decode(word.token_bytes)), word.rank + first


def _model(content: bytes) -> Iterator[tuple[str, int]]:
    """Read SentencePiece's file, or tiktoken's, which goes by the same name."""
    return _tiktoken(content) if content[:1].isalnum() else _pieces(content)


def _tiktoken(content: bytes) -> Iterator[tuple[str, int]]:
    for line in content.splitlines():
        word, rank = line.split()
        yield _letters(base64.b64decode(word)), int(rank)


def _pieces(content: bytes) -> Iterator[tuple[str, int]]:
    """Yield the pieces of SentencePiece's `ModelProto`: each is its first field, and the text is the first of that."""
    number = 0
    for tag, piece in _fields(content):
        if tag == 1:
            text = next((value for inner, value in _fields(piece) if inner == 1), b"")
            yield text.decode(), number
            number += 1


_LENGTH_DELIMITED = 2
_NUMBER_BITS = 63
_FIXED = {1: 8, 5: 4}
"""Bytes of protobuf's wire types of one size."""


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of a protobuf message's fields that have a length."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == _LENGTH_DELIMITED:
            size, at = _varint(message, at)
            yield key >> 3, message[at : at + size]
            at += size
        elif kind == 0:
            _, at = _varint(message, at)
        elif kind in _FIXED:
            at += _FIXED[kind]
        else:
            raise ValueError(f"wire type {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte <= 0x7F:  # noqa: PLR2004 - the last byte of a number
            return value, at
        if shift > _NUMBER_BITS:
            raise ValueError("a number of more than 64 bits")


def _letters(word: bytes) -> str:
    """Return the bytes as byte-level tokenizers write them: each is a letter (GPT-2's `bytes_to_unicode`)."""
    return word.decode("latin-1").translate(_BYTE_LETTERS)


_PRINTED = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_BYTE_LETTERS = {byte: 0x100 + at for at, byte in enumerate(sorted(set(range(0x100)) - set(_PRINTED)))}

_BYTE_BLANK, _PIECE_BLANK = _letters(b" "), "▁"

_FORMS = {
    FAST: _fast,
    "vocab.json": _table,
    "vocab.txt": _lines,
    "tekken.json": _tekken,
    "tokenizer.model": _model,
    "sentencepiece.bpe.model": _model,
    "spiece.model": _model,
    "spm.model": _model,
}
"""Files with a whole vocabulary, and how each is read; the first that a folder has decides."""
