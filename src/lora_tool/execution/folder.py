"""A folder that appears under its name only when it is complete.

Everything is written into a hidden sibling and renamed last. A lock on the sibling distinguishes a run in progress
from one that was killed; the next run to the same output removes a killed run's files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lora_tool.core.display import size
from lora_tool.core.errors import ExecutionError, OutOfSpace, OutputExists
from lora_tool.formats import manifest
from lora_tool.formats.files import open_regular

_NOT_OFFERED = frozenset({errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL})
"""The errors of file systems without locks (Lustre as most clusters mount it, NFS without its daemon), or without
flushing of folders (FUSE, SMB)."""


def check_output(out: Path, *, overwrite: bool, inputs: tuple[Path, ...] = ()) -> None:
    """Return if a folder may be written as `out`.

    Raises `OutputExists` where something exists there, other than an empty folder, and `overwrite` is not set; where
    lora-tool did not write it; where it is one of the `inputs`, or contains one, or is the working directory. Raises
    `ExecutionError` where it would lie in a file.
    """
    for source in inputs:
        for above in _with_parents(source):
            if _same_folder(above, out):
                named = f"the input {source}" if source != out else "the input itself"
                what = f"is {named}" if _same_folder(source, out) else f"contains {named}"
                raise OutputExists(f"{out} {what}", hint="give another folder: `out=OUT`")
    if _same_folder(Path(), out):
        raise OutputExists(
            f"{out} is the working directory, which a new folder cannot replace", hint="give a folder in it: `out=NAME`"
        )
    if not os.path.lexists(out):
        above = _existing_above(out)
        if not above.is_dir():
            raise ExecutionError(
                f"{out} cannot be written: {above} is not a folder", hint="give another folder: `out=OUT`"
            )
        return
    if out.is_dir() and not any(out.iterdir()):
        return
    if not (out / manifest.FILE_NAME).is_file():
        what = f"was not written by lora-tool (it has no {manifest.FILE_NAME})" if out.is_dir() else "is not a folder"
        raise OutputExists(
            f"{out} exists and {what}, so lora-tool does not replace it",
            hint="remove it yourself, or give another folder: `out=OUT`",
        )
    if not overwrite:
        raise OutputExists(f"{out} exists already", hint="`overwrite=True` replaces it, or give another folder")


def _with_parents(folder: Path) -> tuple[Path, ...]:
    real = Path(os.path.realpath(folder))  # `resolve` raises RuntimeError for a link to itself
    return real, *real.parents


def _existing_above(out: Path) -> Path:
    return next(filter(os.path.lexists, out.absolute().parents))


def _same_folder(one: Path, other: Path) -> bool:
    """Return whether both are one folder, whatever it is called: names may differ in case, and mounts be bound."""
    try:
        return other.is_dir() and one.samefile(other)
    except OSError:  # missing, or without permission
        return False


def real_place(out: Path) -> Path:
    """Return the path that is written: for a link, the folder that it leads to, also on another disk."""
    return Path(os.path.realpath(out)) if out.is_symlink() or not out.name else out


def check_space(out: Path, needed: int) -> None:
    """Return if the disk under `out` has `needed` bytes free, or does not report its free space. Raises `OutOfSpace`."""
    disk = shutil.disk_usage(_existing_above(out))
    if disk.total and disk.free < needed:  # one of no size at all is in memory or on a network, and does not tell
        raise OutOfSpace(
            f"{out} needs {size(needed)}, the disk has {size(disk.free)} free",
            hint="give a folder on another disk: `out=OUT`",
        )


@contextlib.contextmanager
def new_folder(out: Path, *, overwrite: bool, resume: bool = False) -> Iterator[Path]:
    """Yield an empty hidden folder next to `out`; on success rename it to `out`, on any failure remove it.

    With `overwrite` an existing `out` is replaced, after success only. With `resume` the folder of an earlier run is
    yielded as it was left, and stays after a failure. Raises `OutputExists` where another run is
    writing the same output, `ExecutionError` where the place cannot be written.
    """
    partial = _hidden(out)
    with _only_run(partial, out) as locked:
        if not locked and not resume:
            partial = out.parent / f".{out.name}.{os.getpid()}.lora-tool-partial"
        if not resume:
            shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(exist_ok=resume)
            yield partial
            sync_folder(partial)
            _publish(partial, out, overwrite=overwrite)
        except BaseException:
            if not resume:
                shutil.rmtree(partial, ignore_errors=True)
            raise


@contextlib.contextmanager
def shared_folder(out: Path) -> Iterator[Path]:
    """Yield the hidden folder of `new_folder`, which others write to at the same time. It stays, whatever happens.

    Raises `OutputExists` where a run that does not share it is writing the same output, else as `new_folder`.
    """
    partial = _hidden(out)
    with _only_run(partial, out, shared=True):
        partial.mkdir(exist_ok=True)
        yield partial


@contextlib.contextmanager
def staging_folder(out: Path) -> Iterator[Path]:
    """Yield an empty hidden folder next to `out` for another program to write to; it is always removed.

    Raises as `new_folder`.
    """
    folder = out.parent / f".{out.name}.lora-tool-in-memory"
    with _only_run(folder, out):
        try:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _hidden(out: Path) -> Path:
    return out.parent / f".{out.name}.lora-tool-partial"


@contextlib.contextmanager
def _only_run(hidden: Path, out: Path, *, shared: bool = False) -> Iterator[bool]:
    """Hold the lock of `out`'s sibling `hidden`, and yield whether there is one: not where the file system has none.

    A `shared` one keeps away only those who do not share it.

    Raises `OutputExists` where another run is writing `out`, `ExecutionError` where the place cannot be written.
    """
    path = Path(f"{hidden}.lock")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock, locked = _lock(path, out, shared=shared)
    except OSError as error:
        raise ExecutionError(
            f"{out} cannot be written: {error.strerror}", hint="give another folder: `out=OUT`"
        ) from error
    try:
        yield locked
    finally:
        with contextlib.suppress(OSError):  # others may still hold it: then the last of them removes it
            if shared:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
        os.close(lock)


def _lock(path: Path, out: Path, *, shared: bool) -> tuple[int, bool]:
    """Return a descriptor of the lock file `path`, and whether it is locked: not where the file system has no locks.

    Raises `OutputExists` where another run holds it.
    """
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            # the run before us may have removed the file between our opening and locking it: then nobody sees our lock
            if path.exists() and os.fstat(lock).st_ino == path.stat().st_ino:
                return lock, True
        except BlockingIOError as error:
            os.close(lock)
            hint = "wait for it, or give another folder"
            raise OutputExists(f"another run is writing {out}", hint=hint) from error
        except OSError as error:
            if error.errno in _NOT_OFFERED:
                return lock, False
            os.close(lock)
            raise
        os.close(lock)


def _publish(partial: Path, out: Path, *, overwrite: bool) -> None:
    old = out.parent / f".{out.name}.lora-tool-replaced"
    if out.is_dir() and any(out.iterdir()):
        if not overwrite:
            raise OutputExists(
                f"another program created {out} while it was being written", hint="give another folder: `out=OUT`"
            )
        shutil.rmtree(old, ignore_errors=True)
        if not set_aside(out, old):
            shutil.rmtree(out)
        try:
            partial.rename(out)
        except BaseException:
            if old.exists():
                old.rename(out)
            raise
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(out)
    sync_folder(out.parent)


def set_aside(folder: Path, hidden: Path) -> bool:
    """Rename `folder` to its sibling `hidden`; return False where it lies in a lower layer of a container's image.

    An overlay file system can remove such a folder, and not rename it.
    """
    try:
        folder.rename(hidden)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        return False
    return True


def sync_folder(folder: Path) -> None:
    """Return when the names in the folder are on the disk, where its file system can wait for that."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_OFFERED:
            raise
    finally:
        os.close(descriptor)


def write_file(path: Path, content: bytes) -> None:
    """Write `content` to the new file `path` and wait until it is on the disk."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def copy_file(path: Path, source: Path) -> None:
    """Copy the regular file `source` to the new file `path`, some at a time, and wait until it is on the disk."""
    with open_regular(source) as descriptor, open(descriptor, "rb", closefd=False) as old, path.open("xb") as new:
        shutil.copyfileobj(old, new)
        new.flush()
        os.fsync(new.fileno())


def replace_file(path: Path, content: bytes) -> None:
    """Write `content` as the file `path`, whole or not at all.

    Raises `OutOfSpace`, `ExecutionError`.
    """
    partial = path.parent / f".{path.name}.{os.getpid()}.lora-tool-partial"
    with errors_of_the_system(f"{path} cannot be written", path):
        try:
            write_file(partial, content)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def errors_of_the_system(what: str | None, target: Path) -> Iterator[None]:
    """Raise an OSError inside as `OutOfSpace` or `ExecutionError`: `what` failed, else the file that it names."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(
                f"{target}: the disk is full; nothing was kept", hint="give another disk: `out=OUT`"
            ) from error
        raise ExecutionError(f"{what or error.filename or target}: {error.strerror}") from error


def remove(folder: Path, *, trash: Path | None = None) -> None:
    """Remove `folder`, or move it into `trash`, which is made if it is not there.

    It leaves its name at once, by a rename to a hidden sibling, and is removed from there. Raises `OutputExists` where
    `trash` has something of that name, `ExecutionError` where it cannot be moved or removed.
    """
    hidden = folder.with_name(f".{folder.name}.{os.getpid()}.lora-tool-removed")
    try:
        for left in folder.parent.glob(".*.lora-tool-removed"):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        if trash is None:
            shutil.rmtree(hidden if set_aside(folder, hidden) else folder)
            return
        require_room(folder, trash)
        trash.mkdir(parents=True, exist_ok=True)
        # on another disk it is copied: until all of it is there, it does not have its name
        partial = trash / hidden.name
        shutil.move(folder, partial)
        partial.rename(trash / folder.name)
    except OSError as error:
        raise ExecutionError(f"{error.filename or folder} cannot be removed: {error.strerror or error}") from error


def require_room(folder: Path, trash: Path) -> None:
    """Return if `folder` can be moved into `trash` under its name. Raises `OutputExists`."""
    target = trash / folder.name
    if os.path.lexists(target):
        raise OutputExists(f"{target} exists already", hint="give another folder: `trash=DIR`")
