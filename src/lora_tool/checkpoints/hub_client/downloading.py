"""Downloading a repository's files into huggingface_hub's cache: reported at once, ended within a bounded time."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from lora_tool.checkpoints.hub_client.failures import GaveUp, as_ours, downloading, translated
from lora_tool.checkpoints.hub_client.hooks import hooked, require_wait
from lora_tool.core.errors import HubUnreachable, NotACheckpoint
from lora_tool.core.progress import told

PATIENCE = 60
"""Seconds without a good answer after which no further request is sent."""

_OVERLOAD = (408, 425, 429)
_SERVER_FAULT = 500
_UNWANTED = ["original/*", "onnx/*", "consolidated*", "*/*"]


def _left_out(patterns: Sequence[str]) -> list[str]:
    """Return what is not downloaded whatever it is called, unless everything is wanted."""
    return [] if "*" in patterns else _UNWANTED


class _Answers:
    """Watches the Hub's answers: whether a good one ever came, and since when none has."""

    def __init__(self) -> None:
        self.sent = self.answered = False
        self._lock = threading.Lock()
        self._since: float | None = None

    def before(self, _request: Any) -> None:  # noqa: ANN401 - the HTTP library's, whichever it is
        with self._lock:
            self.sent = True
            self._since = self._since or time.monotonic()
            if self._left() < 0:
                raise GaveUp(f"the Hub gave no valid answer for {PATIENCE} s")

    def after(self, response: Any) -> None:  # noqa: ANN401
        status = int(response.status_code)
        with self._lock:
            if status < _SERVER_FAULT and status not in _OVERLOAD:
                self.answered, self._since = True, None
            else:
                require_wait(response, self._left())

    def _left(self) -> float:
        return PATIENCE if self._since is None else PATIENCE - (time.monotonic() - self._since)


def in_cache(repo: str, revision: str | None, patterns: Sequence[str]) -> Path | None:
    """Return the folder of `repo` at `revision` in the cache, None where the cache knows that files of it are missing.

    Raises `NotACheckpoint` where `repo` cannot be a repository's name.
    """
    try:
        wanted: dict[str, Any] = {"allow_patterns": list(patterns), "ignore_patterns": _left_out(patterns)}
        return Path(snapshot_download(repo, revision=revision, local_files_only=True, **wanted))
    except HFValidationError as error:
        raise NotACheckpoint(f"{repo}: neither a folder nor a Hub id") from error
    except LocalEntryNotFoundError:
        return None


def download(
    repo: str,
    revision: str | None,
    *,
    absent: str,
    beside: Sequence[str],
    weights: Sequence[str],
    look: Callable[[Path], object] | None,
) -> Path:
    """Return the folder in the cache with `repo` at `revision` (None for main), downloaded as far as it is not there.

    The small files, of the patterns `beside`, come first. Then `look` gets their folder, and the weights follow: the
    first pattern of `weights` that matches. Where the Hub does not answer, the cache is used, and that is reported.
    `absent` describes the repository in an error: where else it was searched. Raises `HubRefused`, `HubUnreachable`,
    `NotACheckpoint`, and the errors of `look`.
    """
    answers, fetch = _Answers(), partial(snapshot_download, repo, ignore_patterns=_left_out(weights))
    in_words = partial(_in_our_words, repo, revision, absent)
    if constants.HF_HUB_OFFLINE:
        cached = _cached(repo, revision, beside, weights)
        if cached is None:
            with in_words():
                raise OfflineModeIsEnabled
        return cached
    told(f"asking the Hub for {repo}{f'@{revision}' if revision else ''} …")
    with hooked(answers.before, answers.after, bars=sys.stderr.isatty()), _without_misses():
        try:
            with in_words():
                path = Path(fetch(revision=revision, allow_patterns=list(beside)))
        except HubUnreachable:
            cached = _cached(repo, revision, beside, weights)
            if cached is None:
                raise
        else:  # without an answer the client silently returns the cached files
            silent = answers.sent and not answers.answered
            cached = _cached(repo, revision, beside, weights) if silent else None
        if cached is not None:
            told(f"the Hub does not answer, so {repo} is taken from the cache, commit {cached.name[:12]}")
            return cached
        if look is not None and not any(any(path.glob(pattern)) for pattern in weights):
            look(path)
        with in_words():
            for pattern in weights:
                fetch(revision=path.name, allow_patterns=[pattern])
                if any(path.glob(pattern)):
                    break
    return path


@contextlib.contextmanager
def _without_misses() -> Iterator[None]:
    """Keep the client from saying that a pattern has no files: we ask for one after the other."""
    log = logging.getLogger("huggingface_hub._snapshot_download")
    log.addFilter(_is_news)
    try:
        yield
    finally:
        log.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("No files matched")


@contextlib.contextmanager
def _in_our_words(repo: str, revision: str | None, absent: str) -> Iterator[None]:
    """Raise the client's errors as ours; errors of this machine and mistakes of ours pass unchanged."""
    try:
        yield
    except HFValidationError as error:
        raise NotACheckpoint(f"{repo}: neither a folder nor a Hub id") from error
    except Exception as error:
        failure = as_ours(error, repo, downloading(repo, revision))
        if failure is error:
            raise
        places = ", ".join(filter(None, [absent, "not in the Hub cache" * isinstance(failure, HubUnreachable)]))
        called = f"{repo}@{revision}" if revision else repo
        named = f"{called} ({places})" if places else called
        raise translated(error, repo, downloading(repo, revision), named=named) from error


def _cached(repo: str, revision: str | None, beside: Sequence[str], weights: Sequence[str]) -> Path | None:
    """Return the folder in the cache that has weights, None without."""
    for pattern in weights:
        path = in_cache(repo, revision, [*beside, pattern])
        if path is not None and any(path.glob(pattern)):
            return path
    return None
