"""Adapters are hashed while the merge is planned: the same hashes, and no wait for those that nobody needs any more."""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from lora_tool.execution.local_engine import hash_of, hashed_meanwhile


class Nobody(Executor):
    """Workers who have no time."""

    def submit(self, *_: object, **__: object) -> Future[str]:  # type: ignore[override] # it is never asked for anything
        raise AssertionError("it is hashed already")


def test_what_was_begun_is_not_hashed_again(tmp_path: Path) -> None:
    path, other = tmp_path / "weights", tmp_path / "others"
    content = bytes(range(256)) * (1 << 16)  # more than one piece
    path.write_bytes(content)
    other.write_bytes(b"")
    expected = hashlib.sha256(content).hexdigest()
    with hashed_meanwhile([path]), ThreadPoolExecutor(1) as workers:
        assert hash_of(path, Nobody()).result() == expected
        assert hash_of(other, workers).result() == hashlib.sha256(b"").hexdigest()
    with pytest.raises(AssertionError, match="already"):
        hash_of(path, Nobody())


def test_a_refusal_does_not_wait_for_the_hash_of_a_large_file(tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(1 << 38)
    begun = time.monotonic()
    with pytest.raises(ValueError, match="refused"), hashed_meanwhile([large, large]):
        raise ValueError("refused")
    assert time.monotonic() - begun < 30, "256 GB are hashed in some minutes"


def test_a_file_that_went_away_is_told_to_who_asks(tmp_path: Path) -> None:
    with hashed_meanwhile([tmp_path / "none"]), pytest.raises(FileNotFoundError):
        hash_of(tmp_path / "none", Nobody()).result()
