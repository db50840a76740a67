"""Hashing what is pushed: several files at a time, seen by a progress bar, ended at once by Ctrl-C."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from huggingface_hub.hf_api import RepoFile

from lora_tool.errors import SourceChanged
from lora_tool.hub.model import PushContent, PushFile, PushPlan
from lora_tool.progress import Progress
from lora_tool.tensors import FileStamp

Job = TypeVar("Job")
Made = TypeVar("Made")

_CHUNK = 1 << 20
_READERS = 4


def with_hashes(plan: PushPlan, progress: Progress | None = None) -> PushPlan:
    """Return the plan with the sha256 of every file that is pushed; `progress` is called with the bytes.

    Raises `SourceChanged` where a file is not as it was when planning.
    """

    def hashed(file: PushFile, progressed: Progress) -> PushFile:
        if file.content is None or file.sha256 is not None:
            return file
        return replace(file, sha256=content_sha256(file.content, progressed))

    return replace(plan, files=in_parallel(hashed, plan.files, progress))


def in_parallel(
    work: Callable[[Job, Progress], Made], items: Iterable[Job], progress: Progress | None = None
) -> tuple[Made, ...]:
    """Return what `work` makes of each item, in order; it calls its second argument with the bytes it has read.

    An interrupt of the caller ends the readers at their next chunk instead of their last.
    """
    stop = threading.Event()

    def progressed(nbytes: int) -> None:
        if stop.is_set():
            raise SourceChanged("interrupted")  # nobody sees it: the caller has left
        if progress is not None:
            progress(nbytes)

    readers = ThreadPoolExecutor(max_workers=_READERS)
    try:
        return tuple(readers.map(lambda item: work(item, progressed), items))
    finally:
        stop.set()
        readers.shutdown(cancel_futures=True)


def content_sha256(content: PushContent, progress: Progress | None = None) -> str:
    """Return the sha256 of what will be pushed. Raises `SourceChanged` where the file is not as it was planned."""
    return _hashed(content, hashlib.sha256(), progress)


def hashes_of(content: PushContent, there: RepoFile, sha256: str | None = None) -> tuple[str, str]:
    """Return the hash that the Hub would list if the file `there` held the content, and the hash that it lists.

    The sha256 of files outside of git, for those inside git's own: sha1 of a header and the bytes.
    """
    if there.lfs is not None:
        return sha256 or content_sha256(content), there.lfs.sha256
    blob = hashlib.sha1(f"blob {content.size}\0".encode(), usedforsecurity=False)
    return _hashed(content, blob, None), there.blob_id


def require_unchanged(content: PushContent) -> None:
    """Return if the file is as it was when planning. Raises `SourceChanged`."""
    if content.source is None:
        return
    try:
        now = FileStamp.of(content.source)
    except OSError as error:
        raise SourceChanged(f"{content.source}: gone since the push was planned: {error.strerror}") from error
    if now != content.stamp:
        raise SourceChanged(f"{content.source}: changed since the push was planned", hint="push again")


def _hashed(content: PushContent, digest: Any, progress: Progress | None) -> str:  # noqa: ANN401 - hashlib has no name for it
    if content.source is None:
        digest.update(content.data or b"")
        return str(digest.hexdigest())
    require_unchanged(content)
    with content.source.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            if progress is not None:
                progress(len(chunk))
    require_unchanged(content)
    return str(digest.hexdigest())
