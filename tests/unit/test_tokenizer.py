from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from lora_tool.formats.tokenizer import SpecialToken, ends_prompts_with, read_tokenizer
from lora_tool.formats.vocabulary import WordIds, vocabulary_of

ADDED = {"id": 7, "content": "<pad>", "special": True}
VARIANTS: dict[str, dict[str, Any]] = {
    "v4, added_tokens_decoder": {
        "tokenizer_config.json": {"pad_token": "<pad>", "added_tokens_decoder": {"7": {"content": "<pad>"}}}
    },
    "v4, pad token as an object": {
        "tokenizer_config.json": {
            "pad_token": {"content": "<pad>", "__type": "AddedToken"},
            "added_tokens_decoder": {"3": {"content": "<s>"}, "7": {"content": "<pad>"}},
        }
    },
    "v5, tokenizer.json has the added tokens": {
        "tokenizer_config.json": {"pad_token": "<pad>"},
        "tokenizer.json": {"added_tokens": [{"id": 1, "content": "<s>"}, ADDED], "model": {"vocab": {"<pad>": 9}}},
    },
    "v5, in the vocabulary of a BPE": {
        "tokenizer_config.json": {"pad_token": "<pad>"},
        "tokenizer.json": {"added_tokens": [], "model": {"vocab": {"a": 0, "<pad>": 7}}},
    },
    "Unigram": {
        "tokenizer_config.json": {"pad_token": "<pad>"},
        "tokenizer.json": {"model": {"vocab": [[f"p{n}", 0.0] for n in range(7)] + [["<pad>", -1.0]]}},
    },
    "special_tokens_map, object": {
        "special_tokens_map.json": {"pad_token": {"content": "<pad>"}},
        "added_tokens.json": {"<pad>": 7},
    },
    "special_tokens_map, text": {
        "tokenizer_config.json": {"model_max_length": 4},
        "special_tokens_map.json": {"pad_token": "<pad>"},
        "vocab.json": {"<pad>": 7},
    },
}


def write(folder: Path, files: dict[str, Any]) -> list[str]:
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return list(files)


@pytest.mark.parametrize("files", VARIANTS.values(), ids=VARIANTS)
def test_the_pad_token_is_found(files: dict[str, Any], tmp_path: Path) -> None:
    names = write(tmp_path, files)
    source = "special_tokens_map.json" if "special_tokens_map.json" in files else "tokenizer_config.json"
    tokenizer = read_tokenizer(tmp_path, names)
    assert tokenizer.special("pad_token") == SpecialToken(token="<pad>", id=7, path=tmp_path / source)
    assert tokenizer.problems == []


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"tokenizer_config.json": {"pad_token": None}},
        {"tokenizer_config.json": {"eos_token": "</s>"}},
        {"tokenizer_config.json": {"pad_token": "<pad>"}},
        {"tokenizer_config.json": {"pad_token": "<pad>", "added_tokens_decoder": {"x": {"content": "<pad>"}}}},
        {"tokenizer_config.json": {"pad_token": "<pad>"}, "tokenizer.json": {"model": {"vocab": {"<pad>": "7"}}}},
        {"tokenizer_config.json": {"pad_token": "<pad>"}, "tokenizer.json": {"model": {"vocab": [["a", 0]]}}},
        {"tokenizer_config.json": {"pad_token": "<pad>"}, "tokenizer.json": {"added_tokens": [3], "model": None}},
        {"tokenizer_config.json": ["pad_token"]},
    ],
)
def test_nothing_is_guessed(files: dict[str, Any], tmp_path: Path) -> None:
    tokenizer = read_tokenizer(tmp_path, write(tmp_path, files))
    assert tokenizer.special("pad_token") is None
    assert tokenizer.problems == []


def test_a_broken_file_is_a_problem(tmp_path: Path) -> None:
    names = write(tmp_path, {"tokenizer_config.json": "{"})
    tokenizer = read_tokenizer(tmp_path, names)
    assert tokenizer.special("pad_token") is None
    assert str(tmp_path / "tokenizer_config.json") in {problem.path for problem in tokenizer.problems}


def _pieces(*words: str) -> bytes:
    texts = (b"\n" + bytes([len(word.encode())]) + word.encode() + b"\x15\0\0\0\0\x18\1" for word in words)
    return b"".join(b"\n" + bytes([len(text)]) + text for text in texts) + b"\x12\2\x08\1"


def _ranks(*words: str) -> bytes:
    lines = (base64.b64encode(word.encode()) + b" %d" % rank for rank, word in enumerate(words))
    return b"\n".join(lines)


def _tekken(*words: str) -> bytes:
    listed = [
        {"rank": rank, "token_bytes": base64.b64encode(word.encode()).decode()} for rank, word in enumerate(words)
    ]
    return json.dumps({"config": {"default_num_special_tokens": 2, "default_vocab_size": 99}, "vocab": listed}).encode()


WORDS = [f"w{number}" for number in range(40)]
FORMS: dict[str, tuple[str, Any]] = {
    "fast": (
        "tokenizer.json",
        lambda *words: json.dumps({"model": {"vocab": {w: at for at, w in enumerate(words)}}}).encode(),
    ),
    "unigram": ("tokenizer.json", lambda *words: json.dumps({"model": {"vocab": [[w, -1] for w in words]}}).encode()),
    "slow": ("vocab.json", lambda *words: json.dumps({word: at for at, word in enumerate(words)}).encode()),
    "lines": ("vocab.txt", lambda *words: "\n".join(words).encode()),
    "sentencepiece": ("tokenizer.model", _pieces),
    "tiktoken": ("tokenizer.model", _ranks),
    "tekken": ("tekken.json", _tekken),
}


def _read(folder: Path, form: str, words: list[str]) -> WordIds:
    name, write = FORMS[form]
    (folder / form).mkdir(exist_ok=True)
    (folder / form / name).write_bytes(write(*words))
    found = vocabulary_of(read_tokenizer(folder / form, [name]))
    assert found is not None
    return found


@pytest.mark.parametrize("form", FORMS)
def test_the_words_of_every_form_are_compared(form: str, tmp_path: Path) -> None:
    fast = _read(tmp_path, "fast", WORDS)
    assert fast.moved(_read(tmp_path, form, [*WORDS, "more"])) == {}
    swapped = _read(tmp_path, form, [*WORDS[:9], WORDS[10], WORDS[9], *WORDS[11:]])
    assert fast.moved(swapped).keys() == {"w9", "w10"}


def test_pieces_behind_fairseqs_own_tokens_are_the_same_words(tmp_path: Path) -> None:
    fast = _read(tmp_path, "fast", ["<s>", "<pad>", *WORDS])
    assert fast.moved(_read(tmp_path, "sentencepiece", ["<pad>", *WORDS])) == {}
    assert fast.moved(_read(tmp_path, "sentencepiece", WORDS[::-1])) != {}


@pytest.mark.parametrize("content", [b"\xff" * 99, b"[]", b'{"model":{"vocab":{"a":"b"}}}', b"\n\xff\xff", b"A b c"])
def test_a_file_that_is_no_vocabulary_has_no_words(content: bytes, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "vocab.json", "tekken.json", "tokenizer.model"):
        (tmp_path / name).write_bytes(content)
        assert vocabulary_of(read_tokenizer(tmp_path, [name])) is None


BYTES = {"yes": 1, "Ġyes": 2, "æĺ¯": 3, "<yes>": 4, "Ã©": 5, "é": 6}
PIECES = {"yes": 1, "▁yes": 2, "Ġ": 3, "是": 4}


@pytest.mark.parametrize(
    ("ids", "text", "word"),
    [
        (BYTES, "yes", "yes"),
        (BYTES, " yes", "Ġyes"),
        (BYTES, "Ġyes", "Ġyes"),
        (BYTES, "是", "æĺ¯"),
        (BYTES, "é", "Ã©"),
        (BYTES, "Yes", None),
        (BYTES, "yes yes", None),
        (BYTES, "", None),
        (PIECES, " yes", "▁yes"),
        (PIECES, "▁yes", "▁yes"),
        (PIECES, "是", "是"),
        (PIECES, "Ġ", "Ġ"),
        (PIECES, "no", None),
    ],
)
def test_a_text_is_one_word_as_the_vocabulary_spells_it(ids: dict[str, int], text: str, word: str | None) -> None:
    assert WordIds(path=Path("tokenizer.json"), ids=ids, added=frozenset({"<yes>"})).spelled(text) == word


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        ("{% for m in messages %}{{ m['content'] + eos_token }}{% endfor %}", False),
        ("{{ m }}{% if add_generation_prompt %}{{ 'A:\n' }}{% endif %}", False),
        ("{{ m }}{% if add_generation_prompt %}{{ 'A<pad>' }}{% endif %}", True),
        ('{{ m }}{%- if add_generation_prompt -%}{{- "<pad>" -}}{%- endif -%}', True),
        ("<pad>{{ m }}{% if add_generation_prompt %}A{% endif %}", False),
        ("{% for m in messages %}{{ m['content'] + pad_token }}{% endfor %}\n", True),
        ("{{ messages[0]['content'] }}<pad>", True),
        ("{{ messages[0]['content'] }}<pad>{# the end #}", True),
        ("", False),
    ],
)
def test_what_a_prompt_ends_in(template: str, ends: bool, tmp_path: Path) -> None:
    added = [ADDED, {"id": 2, "content": "</s>"}]
    files = {"tokenizer.json": {"added_tokens": added}, "chat_template.jinja": template}
    files["tokenizer_config.json"] = {"pad_token": "<pad>", "eos_token": "</s>"}
    tokenizer = read_tokenizer(tmp_path, write(tmp_path, files))
    pad = tokenizer.special("pad_token")
    assert pad is not None
    assert ends_prompts_with(tokenizer, pad) is ends
