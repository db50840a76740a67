from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_tool.formats.tokenizer import SpecialToken, read_tokenizer

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
