"""Tokenizer files: which of them a folder has, and which id its pad token has."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_tool.errors import CorruptFile, Problem
from lora_tool.formats.files import inside, open_regular, read_at, read_json

CONFIG = "tokenizer_config.json"
FAST = "tokenizer.json"
SPECIAL_MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"

_BEGINNING = 1 << 20
_DIGITS = 18
"""No token has a longer id; Python refuses to read numbers of thousands of digits."""

FILE_NAMES = frozenset(
    {
        CONFIG,
        FAST,
        SPECIAL_MAP,
        ADDED,
        *("tokenizer.model", "spiece.model", "spm.model", "spm_char.model"),
        *("sentencepiece.model", "sentencepiece.bpe.model", "source.spm", "target.spm"),
        *("vocab.json", "vocab.txt", "vocab-src.json", "vocab-tgt.json", "target_vocab.json", "entity_vocab.json"),
        *("merges.txt", "bpe.codes", "dict.txt", "prophetnet.tokenizer", "tekken.json"),
        *("normalizer.json", "emoji.json", "byte_maps.json", "word_shape.json", "word_pronunciation.json"),
        "chat_template.jinja",
        "chat_template.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
        "audio_tokenizer_config.json",
    }
)
"""Files of a tokenizer or processor that are copied byte for byte, never re-serialised."""

TEMPLATES = "additional_chat_templates"
"""Folder of the named chat templates beside the default one, a `.jinja` file for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PadToken:
    """The pad token as text and id, and the file that says so."""

    token: str
    id: int
    path: Path


def read_pad_token(folder: Path, names: Iterable[str]) -> tuple[PadToken | None, tuple[Problem, ...]]:
    """Return the pad token of the tokenizer files `names` in `folder`, or None where they name none.

    Reads `tokenizer.json`, which may be tens of MB, only where the small files do not tell the id.
    """
    problems: list[Problem] = []
    load = _reader(folder, frozenset(names), problems)
    for source in (CONFIG, SPECIAL_MAP):
        token = _content(load(source).get("pad_token"))
        token_id = None if token is None else next((found for found in _ids(load, token) if found is not None), None)
        if token is not None and type(token_id) is int:
            return PadToken(token=token, id=token_id, path=folder / source), tuple(problems)
    return None, tuple(problems)


def _reader(folder: Path, names: frozenset[str], problems: list[Problem]) -> Callable[[str], dict[str, Any]]:
    """Return what reads one of the files `names` once, {} for another; what is wrong with it is put into `problems`."""

    @functools.cache
    def load(name: str) -> dict[str, Any]:
        try:
            loaded = read_json(folder / name) if name in names else {}
        except CorruptFile as error:
            problems.append(error.problem)
            return {}
        return loaded if isinstance(loaded, dict) else {}

    return load


def _ids(load: Callable[[str], dict[str, Any]], token: str) -> Iterator[object]:
    """Yield the token's id as each file has it, the small files first, None where it has none."""
    yield _id_in_config(load(CONFIG), token)
    yield load(ADDED).get(token)
    yield _id_in_fast(load(FAST), token)
    yield load("vocab.json").get(token)


def added_pad_token(folder: Path, names: Iterable[str]) -> PadToken | None:
    """Return the pad token if it is among the tokens that the tokenizer lists by themselves, as special ones are.

    Reads the small files, and of `tokenizer.json` the beginning, where the list is. None where they do not tell.
    """
    present = {name for name in (CONFIG, SPECIAL_MAP, FAST) if name in names and inside(folder, folder / name)}
    load = _reader(folder, frozenset(present), [])
    tokens = (_content(load(name).get("pad_token")) for name in (CONFIG, SPECIAL_MAP))
    token = next((text for text in tokens if text is not None), None)
    if token is None:
        return None
    found, path = _id_in_config(load(CONFIG), token), folder / CONFIG
    if found is None and FAST in present:
        path = folder / FAST
        found = _id_among(_listed_first(path), token)
    return None if found is None else PadToken(token=token, id=found, path=path)


def _listed_first(path: Path) -> object:
    """Return `added_tokens` of a `tokenizer.json`, which stands before the vocabulary of many MB."""
    try:
        with open_regular(path) as fd:
            text = read_at(path, fd, 0, _BEGINNING).decode(errors="replace")
    except CorruptFile:
        return None
    _, found, rest = text.partition('"added_tokens":')
    try:
        return json.JSONDecoder().raw_decode(rest.lstrip())[0] if found else None
    except (ValueError, RecursionError):
        return None


def _id_among(added: object, token: str) -> int | None:
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict) and entry.get("content") == token and type(entry.get("id")) is int:
            return int(entry["id"])
    return None


def _content(value: object) -> str | None:
    """Return a special token's text: it is written as a string, or as an AddedToken object with its `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _id_in_config(config: dict[str, Any], token: str) -> int | None:
    added = config.get("added_tokens_decoder")
    for token_id, entry in added.items() if isinstance(added, dict) else ():
        if _content(entry) == token and token_id.isdecimal() and len(token_id) <= _DIGITS:
            return int(token_id)
    return None


def _id_in_fast(fast: dict[str, Any], token: str) -> int | None:
    listed = _id_among(fast.get("added_tokens"), token)
    if listed is not None:
        return listed
    model = fast.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        token_id = vocab.get(token)
        return token_id if type(token_id) is int else None
    if isinstance(vocab, list):  # Unigram: a list of [piece, score], the position is the id
        pieces = (entry[0] if isinstance(entry, list) and entry else None for entry in vocab)
        return next((at for at, piece in enumerate(pieces) if piece == token), None)
    return None
