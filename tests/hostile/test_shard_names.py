"""An index that names files elsewhere: traversal, absolute paths, folders, NUL."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.hostile.folders import assert_refused, copy_pair

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    "name",
    [
        f"../{SHARD}",
        f"../../outside/{SHARD}",
        f"./{SHARD}",
        f"sub/{SHARD}",
        "/etc/passwd",
        "..",
        ".",
        "",
        f"..\\{SHARD}",
        "C:model.safetensors",
        "a\0b",
        "\x1b[31mred\n::error::workflow command",
    ],
)
def test_only_bare_names_are_followed(name: str, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    index = json.loads((pair.base / INDEX).read_text())
    index["weight_map"] = {tensor: name if file == SHARD else file for tensor, file in index["weight_map"].items()}
    (pair.base / INDEX).write_text(json.dumps(index))
    assert_refused(pair, INDEX, "not a bare file name")


def test_a_shard_that_is_not_there_is_named(tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    (pair.base / SHARD).unlink()
    assert_refused(pair, INDEX, SHARD, "is missing", "tensors")
