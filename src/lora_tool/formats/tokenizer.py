"""Tokenizer files: which of them a folder has, the ids of its special tokens, and the tokens that end a turn."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from lora_tool.core.errors import CorruptFile, Problem
from lora_tool.formats.files import inside, open_regular, read_at, read_json

CONFIG = "tokenizer_config.json"
FAST = "tokenizer.json"
SPECIAL_MAP = "special_tokens_map.json"
ADDED = "added_tokens.json"
TEMPLATE = "chat_template.jinja"
PROCESSOR_TEMPLATE = "chat_template.json"

_BEGINNING = 1 << 20
_DIGITS = 18
"""No token has a longer id; Python refuses to read numbers of thousands of digits."""

_MOST_WORDS = 200
"""More special tokens than any template uses; a search for thousands would take minutes."""

_MEDIA = "(?i:image|img|video|vision|audio|patch)"
"""Names of placeholders for images and sounds in a message: these tokens never end a turn."""

_BRANCH = r"\{%-?\s*(?:if|elif|else|for)\b"
"""Where a template goes on with something else."""

_NAMES = (
    "tokenizer.model spiece.model spm.model spm_char.model sentencepiece.model sentencepiece.bpe.model source.spm "
    "target.spm vocab.json vocab.txt vocab-src.json vocab-tgt.json target_vocab.json entity_vocab.json merges.txt "
    "bpe.codes dict.txt prophetnet.tokenizer tekken.json normalizer.json emoji.json byte_maps.json word_shape.json "
    "word_pronunciation.json chat_template.jinja chat_template.json preprocessor_config.json processor_config.json "
    "video_preprocessor_config.json audio_tokenizer_config.json"
)
FILE_NAMES = frozenset((CONFIG, FAST, SPECIAL_MAP, ADDED, *_NAMES.split()))
"""Files of a tokenizer or processor that are copied byte for byte, never re-serialised."""

TEMPLATES = "additional_chat_templates"
"""Folder of the named chat templates besides the default one, a `.jinja` file for each."""


class SpecialToken(Struct, frozen=True, kw_only=True):
    """A special token as text and id, and the file that defines it."""

    token: str
    id: int
    path: Path


class Tokenizer(Struct, frozen=True, kw_only=True, eq=False, dict=True):
    """The small files of a tokenizer; `paths` gives each by name. Unreadable ones are in `problems`."""

    paths: Mapping[str, Path]
    tables: Mapping[str, Mapping[str, Any]]
    problems: list[Problem] = field(default_factory=list)

    def special(self, role: str) -> SpecialToken | None:
        """Return the token of `role` ("pad_token", "eos_token", "bos_token"), None where no file names it and its id.

        Reads `tokenizer.json`, which may be tens of MB, to its end only where the other files lack the id.
        """
        for source in (CONFIG, SPECIAL_MAP):
            token = _content(self.tables.get(source, {}).get(role))
            found = None if token is None else self.id_of(token)
            if token is not None and found is not None:
                return SpecialToken(token=token, id=found, path=self.paths[source])
        return None

    def id_of(self, token: str) -> int | None:
        """Return the id of a token, None where no file has it."""
        found: object = self.added.get(token)
        if found is None:
            found = _id_in_fast(self._fast, token)
        if found is None:
            found = self._vocabulary.get(token)
        return found if type(found) is int else None

    @cached_property
    def _fast(self) -> Mapping[str, Any]:
        return _object(self.paths[FAST], self.problems) if FAST in self.paths else {}

    @cached_property
    def _vocabulary(self) -> Mapping[str, Any]:
        name = "vocab.json"
        return _object(self.paths[name], self.problems) if name in self.paths else {}

    @cached_property
    def added(self) -> dict[str, int]:
        """The added tokens, such as special ones, which the files list apart from the vocabulary, with their ids."""
        found = {name: held for name, held in self.tables.get(ADDED, {}).items() if type(held) is int}
        return found | {text: number for text, number, _ in self._entries}

    @cached_property
    def control(self) -> dict[str, int]:
        """The added control tokens, which a template puts around a message's text, with their ids."""
        return {text: number for text, number, is_text in self._entries if not is_text}

    @cached_property
    def _entries(self) -> tuple[tuple[str, int, bool], ...]:
        """Text, id and whether it is text of each added token of `tokenizer.json` and of the config."""
        fast = _listed_first(self.paths[FAST]) if FAST in self.paths else None
        decoder = self.tables.get(CONFIG, {}).get("added_tokens_decoder")
        decoded = decoder.items() if isinstance(decoder, dict) else ()
        listed = [(entry.get("id"), entry) for entry in (fast if isinstance(fast, list) else ()) if type(entry) is dict]
        for key, entry in decoded:
            if key.isdecimal() and len(key) <= _DIGITS:
                listed.append((int(key), entry))
        entries = []
        for number, entry in listed:
            text = _content(entry)
            if text and type(number) is int:
                entries.append((text, number, isinstance(entry, dict) and entry.get("special") is False))
        return tuple(entries)

    @property
    def chat_template(self) -> str | None:
        """The default chat template; a file of its own comes before the config's entry, as in transformers."""
        if TEMPLATE in self.paths:
            return _text(self.paths[TEMPLATE], self.problems)
        stored = self.tables.get(self._template_file, {}).get("chat_template")
        for entry in stored if isinstance(stored, list) else ():
            if isinstance(entry, dict) and entry.get("name") == "default":
                stored = entry.get("template")
        return stored if isinstance(stored, str) else None

    @property
    def _template_file(self) -> str:
        of_processor = self.tables.get(PROCESSOR_TEMPLATE, {}).get("chat_template") is not None
        return TEMPLATE if TEMPLATE in self.paths else PROCESSOR_TEMPLATE if of_processor else CONFIG

    @property
    def template_path(self) -> Path | None:
        """The file that the chat template is in; None where there is none of the files that may hold one."""
        return self.paths.get(self._template_file)


def read_tokenizer(folder: Path, names: Iterable[str]) -> Tokenizer:
    """Return the tokenizer in the files among `names` in `folder`."""
    return tokenizer_of(own_files(folder, names))


def templates_among(names: Iterable[str]) -> tuple[str, ...]:
    """Return the paths of the named chat templates, of the names in `TEMPLATES`."""
    return tuple(f"{TEMPLATES}/{name}" for name in sorted(names) if name.endswith(".jinja"))


def own_files(folder: Path, names: Iterable[str]) -> dict[str, Path]:
    """Return name → path of the tokenizer files among `names` that are in `folder`, and not outside it by a link."""
    return {name: folder / name for name in names if name in FILE_NAMES and inside(folder, folder / name)}


def tokenizer_of(paths: Mapping[str, Path]) -> Tokenizer:
    """Return the tokenizer in these files, name → path, which may lie in several folders."""
    problems: list[Problem] = []
    small = (CONFIG, SPECIAL_MAP, ADDED, PROCESSOR_TEMPLATE)
    tables = {name: _object(paths[name], problems) for name in small if name in paths}
    return Tokenizer(paths=paths, tables=tables, problems=problems)


def tokens_in_use(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, SpecialToken]]:
    """Yield the tokens that every batch or chat needs, each with its role: "pad_token", "eos_token" or
    "chat_template". Of the template those count that are control tokens and stand for no image or sound.

    Reads the small files, and the beginning of `tokenizer.json`, where its added tokens are: no others are yielded.
    """
    tokenizer = read_tokenizer(folder, names)
    source = next((name for name in (FAST, CONFIG) if name in tokenizer.paths), ADDED)
    for role in ("pad_token", "eos_token"):
        token = None
        for table in (CONFIG, SPECIAL_MAP):
            token = token or _content(tokenizer.tables.get(table, {}).get(role))
        if token is not None and token in tokenizer.added:
            yield role, SpecialToken(token=token, id=tokenizer.added[token], path=folder / source)
    template = tokenizer.chat_template or ""
    for token, number in tokenizer.control.items():
        if token in template and not re.search(_MEDIA, token):
            yield "chat_template", SpecialToken(token=token, id=number, path=folder / source)


class TurnEnd(Struct, frozen=True, kw_only=True):
    """The token that ends a turn, and all that may: a model stops if one of these is among its ends."""

    token: SpecialToken
    ids: frozenset[int]


def turn_end(tokenizer: Tokenizer) -> TurnEnd | None:
    """Return the end of a turn in the tokenizer's chat template, without one its `eos_token`; None without either.

    A template is a program, and is not run: its end of turn is the last special token that stands behind a message's
    content and does not open the assistant's turn; the `eos_token` where that is one of them.
    """
    eos, template = tokenizer.special("eos_token"), tokenizer.chat_template
    known = tokenizer.control | ({eos.token: eos.id} if eos else {})
    ends = _behind_content(template, known, eos) if template else []
    path = tokenizer.template_path
    if not ends or path is None:
        return None if eos is None else TurnEnd(token=eos, ids=frozenset({eos.id}))
    last = SpecialToken(token=ends[-1], id=known[ends[-1]], path=path)
    return TurnEnd(token=eos if eos and eos.token in ends else last, ids=frozenset(known[end] for end in ends))


def _behind_content(template: str, known: Mapping[str, int], eos: SpecialToken | None) -> list[str]:
    """Return the tokens that stand behind a message's content, in the order of their last place in the template.

    Where a token that opens the next message may stand there too, only those of the same branch: GLM's turns do not
    have their own end.
    """
    first, *others = template.split("{#")
    template = first + "".join(rest.partition("#}")[2] for rest in others)  # without comments
    words = [token for token in known if token in template and not re.search(_MEDIA, token)]
    if len(words) > _MOST_WORDS:
        return []
    spelt = map(re.escape, sorted(words, key=len, reverse=True))
    found = list(re.finditer("|".join([*spelt, r"\b(?:eos_token|content|add_generation_prompt)\b"]), template))
    marks = [eos.token if eos and mark[0] == "eos_token" else mark[0] for mark in found]
    prompts = [at for at, mark in enumerate(marks) if mark == "add_generation_prompt"]
    until = prompts[-1] if prompts else len(marks)
    between = [template[mark.end() : after.start()] for mark, after in itertools.pairwise(found)]
    steps = list(zip(marks, marks[1:], between, strict=False))
    ends = {mark for before, mark, _ in steps if before == "content" and mark in known} - {*marks[until:]}
    openers = {mark for mark, after, text in steps if after == "content" and "%" not in text}
    if ends & openers:
        closing = {mark for before, mark, text in steps if before == "content" and not re.search(_BRANCH, text)}
        ends &= closing - openers
    return list(dict.fromkeys(mark for mark in reversed(marks[:until]) if mark in ends))[::-1]


_PIECE = re.compile(r"\{#.*?#\}|\{%.*?%\}|\{\{(?P<written>.*?)\}\}|(?P<plain>[^{]+|\{)", re.DOTALL)
_VALUE = re.compile(r"""'(?P<one>(?:[^'\\]|\\.)*)'|"(?P<other>(?:[^"\\]|\\.)*)"|\b(?P<role>(?:eos|pad)_token)\b""")


_END = 4096
"""Letters of a template that its last words are looked for in."""


def ends_prompts_with(tokenizer: Tokenizer, token: SpecialToken) -> bool:
    """Return whether the chat template writes this token last, where it asks for an answer or at its end.

    A template is a program, and is not run: what it writes last is the last text or token in it that it writes.
    """
    template = tokenizer.chat_template or ""
    last = ""
    for piece in _PIECE.finditer(template.rpartition("add_generation_prompt")[2][-_END:]):
        values = [*_VALUE.finditer(piece["written"] or "")]
        if values:
            same = tokenizer.special(values[-1]["role"]) if values[-1]["role"] else None
            last = same.token if same else (values[-1]["one"] or values[-1]["other"] or "")
        elif (piece["plain"] or "").strip():
            last = piece["plain"].rstrip("\n")
    return last.endswith(token.token)


def _text(path: Path, problems: list[Problem]) -> str | None:
    try:
        with open_regular(path) as fd:
            return read_at(path, fd, 0, _BEGINNING).decode(errors="replace")
    except CorruptFile as error:
        problems.append(error.problem)
        return None


def _object(path: Path, problems: list[Problem]) -> dict[str, Any]:
    try:
        loaded = read_json(path)
    except CorruptFile as error:
        problems.append(error.problem)
        return {}
    return loaded if isinstance(loaded, dict) else {}


def _listed_first(path: Path) -> object:
    """Return `added_tokens` of a `tokenizer.json`, which stands before the vocabulary of many MB."""
    _, found, rest = (_text(path, []) or "").partition('"added_tokens":')
    try:
        return json.JSONDecoder().raw_decode(rest.lstrip())[0] if found else None
    except (ValueError, RecursionError):
        return None


def _content(value: object) -> str | None:
    """Return a special token's text: it is written as a string, or as an AddedToken object with its `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _id_in_fast(fast: Mapping[str, Any], token: str) -> int | None:
    model = fast.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        token_id = vocab.get(token)
        return token_id if type(token_id) is int else None
    if isinstance(vocab, list):  # Unigram: a list of [piece, score], the position is the id
        pieces = (entry[0] if isinstance(entry, list) and entry else None for entry in vocab)
        return next((at for at, piece in enumerate(pieces) if piece == token), None)
    return None
