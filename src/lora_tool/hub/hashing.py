"""Hashing what is pushed, several files at a time, and comparing it with what the Hub holds after the push."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils.sha import sha_fileobj
from msgspec.structs import replace

from lora_tool.core.errors import SourceChanged, VerificationFailed
from lora_tool.core.progress import Progress
from lora_tool.core.tensors import FileStamp
from lora_tool.hub.model import PushContent, PushFile, PushPlan, UploadAction

Given = TypeVar("Given")
_Made = TypeVar("_Made")

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
    work: Callable[[Given, Progress], _Made], items: Iterable[Given], progress: Progress | None = None
) -> tuple[_Made, ...]:
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


def hashes_of(content: PushContent, there: RepoFile, sha256: str | None) -> tuple[str, str]:
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
        raise SourceChanged(f"{content.source} disappeared after the push was planned: {error.strerror}") from error
    if now != content.stamp:
        raise SourceChanged(f"{content.source} changed after the push was planned", hint="push again")


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


def mismatches(plan: PushPlan, tree: Mapping[str, RepoFile]) -> list[str]:
    """Return what in a commit's tree is not as the plan wants it, one sentence per file; none means it is all there."""
    return [found for file in plan.files if (found := _mismatch(file, tree.get(file.name))) is not None]


def check_tree(plan: PushPlan, tree: Mapping[str, RepoFile], commit: str) -> None:
    """Return if the commit holds every file of the plan. Raises `VerificationFailed` naming the first that differs."""
    found = mismatches(plan, tree)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise VerificationFailed(
            f"{plan.remote.repo} at {commit[:12]}: {found[0]}{more}",
            hint="push again: the files that differ are sent again",
        )


def check_download(api: HfApi, plan: PushPlan, commit: str, folder: Path) -> None:
    """Return if every file reads back with the sha256 it has here. Raises `VerificationFailed`.

    Files are downloaded to `folder` one by one, which needs room for the largest.
    """
    for file in plan.files:
        if file.content is None:
            continue
        expected = file.sha256 or content_sha256(file.content)
        path = Path(api.hf_hub_download(plan.remote.repo, file.name, revision=commit, local_dir=folder))
        with path.open("rb") as read_back:
            found = sha_fileobj(read_back).hex()
        path.unlink()
        if found != expected:
            raise VerificationFailed(
                f"{plan.remote.repo} at {commit[:12]}: {file.name} reads back with sha256 {found[:16]}…, "
                f"expected {expected[:16]}…",
                hint="push again; if the hash still differs, report it to the Hub with the commit",
            )


def _mismatch(file: PushFile, there: RepoFile | None) -> str | None:
    if file.change is UploadAction.REMOVE or file.content is None:
        return None if there is None else f"{file.name} is still there"
    if there is None:
        return f"{file.name} is missing"
    if there.size != file.size:
        return f"{file.name} has {there.size:,} bytes, expected {file.size:,}"
    expected, found = hashes_of(file.content, there, file.sha256)
    return None if found == expected else f"{file.name} has hash {found[:16]}…, expected {expected[:16]}…"
