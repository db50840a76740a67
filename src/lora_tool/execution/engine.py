"""Executing a plan: workers copy and compute units, files are flushed while others are written, names appear last."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threadpoolctl import threadpool_limits

from lora_tool.errors import ExecutionError, OutOfSpace
from lora_tool.execution.compute import Computer, write_exactly
from lora_tool.execution.folder import check_output, check_space, new_folder, write_file
from lora_tool.execution.reading import Sources
from lora_tool.execution.units import CopyUnit, Unit, batches, units_of
from lora_tool.formats import manifest as manifest_format
from lora_tool.plan.manifest import manifest_bytes, sha256_of
from lora_tool.plan.model import Plan, Precision, Shard, SideFile

if TYPE_CHECKING:
    from lora_tool.execution.torch_compute import TorchComputer

Progress = Callable[[int], None]
"""Called with the number of bytes just written, from any worker."""

Check = Callable[[Path], Mapping[str, Any]]
"""Called with the finished folder before it gets its name: returns what the manifest is to say, or raises."""


def execute(
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    jobs: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    check: Check | None = None,
) -> Path:
    """Write the folder that `plan` describes as `out` and return its path.

    It appears under that name complete and flushed to disk, or not at all. Anonymous memory is a few blocks per
    worker; `jobs` workers, by default one per available core. `check` may look at it before it gets its name, and refuse
    it by raising. Raises `OutputExists`, `OutOfSpace`, `SourceChanged`, `ExecutionError`, and what `check` raises.
    """
    target = Path(out)
    check_output(target, overwrite=overwrite, inputs=tuple({stamp.path.parent for stamp in plan.inputs}))
    side_bytes = sum(_side_size(file) for file in plan.side_files)
    check_space(target, plan.data_bytes + sum(len(shard.header) for shard in plan.shards) + side_bytes)
    with (
        _errors_of_the_system(target),
        Sources(plan.inputs) as sources,
        new_folder(target, overwrite=overwrite) as folder,
    ):
        with _one_thread_each(plan.precision):
            hashes = _write_shards(plan, folder, sources, jobs or available_cores(), progress or (lambda _: None))
        for file in plan.side_files:
            content = file.content if file.content is not None else _bytes_of(file)
            write_file(folder / file.filename, content)
        verification = check(folder) if check is not None else None
        write_file(folder / manifest_format.FILE_NAME, manifest_bytes(plan, hashes, verification))
        sources.check_unchanged()
    return target


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _side_size(file: SideFile) -> int:
    return len(file.content) if file.content is not None else file.source.stat().st_size if file.source else 0


def _bytes_of(file: SideFile) -> bytes:
    return file.source.read_bytes() if file.source else b""


@contextlib.contextmanager
def _errors_of_the_system(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(
                f"{target}: the disk is full; nothing was kept", hint="give another disk: -o OUT"
            ) from error
        raise ExecutionError(f"{error.filename or target}: {error.strerror}") from error


def _write_shards(plan: Plan, folder: Path, sources: Sources, jobs: int, progress: Progress) -> dict[Path, str]:
    """Write all weight files, and return the hashes of `plan.hashed`, taken beside."""
    stop = threading.Event()
    local = threading.local()

    def run(batch: Sequence[Unit], out: int) -> None:
        try:
            for unit in batch:
                if stop.is_set():
                    return
                if isinstance(unit, CopyUnit):
                    _copy(unit, sources, out)
                else:
                    if not hasattr(local, "computer"):
                        local.computer = _computer(plan.precision, sources, stop)
                    local.computer.run(unit, out)
                progress(unit.nbytes)
            _start_writing_back(out, batch)
        except BaseException:
            stop.set()
            raise

    with contextlib.ExitStack() as files, ThreadPoolExecutor(jobs) as workers, ThreadPoolExecutor(1) as flusher:
        try:
            hashing = {path: workers.submit(sha256_of, path) for path in plan.hashed}
            flushes = []
            for shard in plan.shards:
                out = _new_file(folder / shard.filename, shard)
                files.callback(os.close, out)
                units = units_of(shard, whole_tensors=plan.precision is Precision.PEFT)
                written = [workers.submit(run, batch, out) for batch in batches(units)]
                flushes.append(flusher.submit(_flush, written, out))
            _all_done(flushes)
            return {path: digest.result() for path, digest in hashing.items()}
        except BaseException:
            # units see `stop` and return; cancelling them would leave a flush waiting for ever, as `wait` overlooks
            # futures that `shutdown` cancels
            stop.set()
            flusher.shutdown(wait=False, cancel_futures=True)
            raise


@contextlib.contextmanager
def _one_thread_each(precision: Precision) -> Iterator[None]:
    """Keep every library's own threads away from ours: the workers are the threads."""
    with contextlib.ExitStack() as limits:
        limits.enter_context(threadpool_limits(limits=1, user_api="blas"))
        if precision is Precision.PEFT:
            from lora_tool.execution.torch_compute import one_thread  # noqa: PLC0415 - torch only when asked for

            limits.enter_context(one_thread())
        yield


def _computer(precision: Precision, sources: Sources, stop: threading.Event) -> Computer | TorchComputer:
    if precision is Precision.PEFT:
        from lora_tool.execution.torch_compute import TorchComputer  # noqa: PLC0415 - torch only when asked for

        return TorchComputer(sources, stop.is_set)
    return Computer(sources, precision, stop.is_set)


def _new_file(path: Path, shard: Shard) -> int:
    """Return a descriptor of the new file, of its final size and with its header written."""
    out = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(out, len(shard.header) + shard.data_bytes)
        write_exactly(out, memoryview(shard.header), 0)
    except BaseException:
        os.close(out)
        raise
    return out


def _flush(written: Sequence[Future[None]], out: int) -> None:
    _all_done(written)
    os.fsync(out)


def _all_done(futures: Sequence[Future[None]]) -> None:
    """Return when all are done; raise the first error at once."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in done:
        future.result()


def _start_writing_back(out: int, batch: Sequence[Unit]) -> None:
    """Start writing neighbouring units to the disk without waiting, so that the flush at the end finds little left to do."""
    if hasattr(os, "posix_fadvise"):
        nbytes = batch[-1].begin + batch[-1].nbytes - batch[0].begin
        os.posix_fadvise(out, batch[0].begin, nbytes, os.POSIX_FADV_DONTNEED)


def _copy(unit: CopyUnit, sources: Sources, out: int) -> None:
    done = _copy_in_kernel(unit, sources.descriptor(unit.source), out)
    if done < unit.nbytes:
        rest = memoryview(bytearray(unit.nbytes - done))
        sources.read_exactly(unit.source, unit.offset + done, rest)
        write_exactly(out, rest, unit.at + done)


def _copy_in_kernel(unit: CopyUnit, source: int, out: int) -> int:
    """Copy without passing through this process, and return how many bytes the system was willing to copy so."""
    done = 0
    while hasattr(os, "copy_file_range") and done < unit.nbytes:
        try:
            count = os.copy_file_range(source, out, unit.nbytes - done, unit.offset + done, unit.at + done)
        except OSError as error:
            # other file systems, containers and old kernels refuse in various ways; real I/O errors are raised below
            if error.errno in (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF):
                break
            raise
        if count == 0:
            break
        done += count
    return done
