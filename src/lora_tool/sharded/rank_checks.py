"""What can be wrong with one file for each rank, found in names, shapes and checksums alone: generators of findings."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from lora_tool.display import counted, some
from lora_tool.formats.distributed_tensors import DistributedTensor
from lora_tool.formats.rank_files import CutTensor, RankFile, RankFolder, gap_in
from lora_tool.report import Finding, Severity
from lora_tool.sharded.faults import (
    COPY,
    adapter_left_out,
    fault,
    moved_files,
    odd_ones_out,
    repeated_files,
    unreadable_files,
)


def rank_faults(found: RankFolder, *, ranks: int, there: Collection[int], alone: bool) -> Iterator[Finding]:
    """Yield what is wrong with the rank files of one save without reading tensors: LT401 to LT408, LT416.

    `ranks` is the number of processes that saved, `there` are those whose files are there, readable or not. `alone` is
    a file that should hold everything.
    """
    gaps = {name: gap for name, tensor in found.tensors.items() if (gap := gap_in(tensor))}
    lost = [] if alone else [rank for rank in range(ranks) if rank not in there]
    if alone and gaps and ranks > 1:
        yield from _one_ranks_part(found, ranks)
        gaps = {}
    if lost:
        # under HSDP the others may hold everything that it held
        all_there = found.files and not gaps and not any(tensor.flat for tensor in found.tensors.values())
        severity = Severity.WARNING if all_there else Severity.ERROR
        one = f"file of rank {lost[0]} is missing" if len(lost) == 1 else f"files of ranks {some(lost)} are missing"
        rest = "" if severity is Severity.ERROR else "; the other ranks hold all of its content"
        message = f"the {one} ({counted(ranks, 'rank')}: 0-{ranks - 1}){rest}"
        yield fault("LT401", found.folder, message, hint=COPY, severity=severity)
    yield from unreadable_files(found.problems)
    yield from () if alone else _of_other_ranks(found, ranks)
    yield from repeated_files((file.path, _content(file)) for file in found.files.values() if _is_of_one_rank(file))
    yield from _other_runs(found)
    if not lost and not found.problems:
        for name, gap in gaps.items():
            hint = "copy the rank files again, or use another step"
            yield fault("LT408", found.folder, gap, subject=name, hint=hint)
    if not found.problems and not lost:
        yield from adapter_left_out(found.folder, found.tensors)


def _one_ranks_part(found: RankFolder, ranks: int) -> Iterator[Finding]:
    """LT401: yield the file that should hold everything, and holds what one rank had."""
    for file in found.files.values():
        message = f"holds what rank {file.saved_by or 0} of {ranks} had of each tensor: the ranks' parts were not gathered before saving"
        hint = "the parts of the other ranks were never saved: use an adapter beside it, or another step"
        yield fault("LT401", file.path, message, hint=hint)


def _of_other_ranks(found: RankFolder, ranks: int) -> Iterator[Finding]:
    """LT403 and LT404: yield files of another number of ranks, and those that were saved under another name."""
    moved = list(moved_files(file.file for file in found.files.values()))
    yield from moved
    told = {finding.path for finding in moved}
    for rank, file in found.files.items():
        if rank >= ranks:
            message = f"is from rank {rank}, but the run had {counted(ranks, 'rank')}"
            hint = "a run with more ranks was saved into the same folder: move its files away"
            yield fault("LT403", file.path, message, hint=hint)
        elif file.saved_by not in (rank, None) and str(file.path) not in told:
            message = f"was saved by rank {file.saved_by}: rank files were swapped or copied"
            yield fault("LT404", file.path, message, hint="give the files their names back, or copy them again")


def _content(file: RankFile) -> tuple[object, ...]:
    records = tuple((key, record.crc) for key, record in file.file.records.items())
    return file.file.serialization_id, file.saved_by, records


def _is_of_one_rank(file: RankFile) -> bool:
    """Return whether no other rank should have the same: where nothing is cut, all may hold the whole."""
    is_cut = any(isinstance(tensor, DistributedTensor) for tensor in file.tensors.values())
    return is_cut and any(record.nbytes for record in file.file.records.values())


def _other_runs(found: RankFolder) -> Iterator[Finding]:
    """LT407: yield files with other tensors than the other ranks', and those that differ where they should be replicas."""
    hint = "files from another run or step were mixed in: copy this run's again"
    names = {file.path: tuple(file.tensors) for file in found.files.values()}
    for path, _, _ in odd_ones_out(names):
        yield fault("LT407", path, "holds other tensors than the other ranks' files, or in another order", hint=hint)
    shapes = {
        file.path: tuple((name, tensor.shape) for name, tensor in sorted(file.tensors.items()))
        for file in found.files.values()
    }
    if len(set(names.values())) == 1 and not any(tensor.flat for tensor in found.tensors.values()):
        for path, _, _ in odd_ones_out(shapes):
            yield fault("LT407", path, "holds tensors of other shapes than the other ranks' files", hint=hint)
    told: set[Path] = set()
    for name, tensor in found.tensors.items():
        types = {part.holder.path: part.local.dtype for part in tensor.parts}
        for path, dtype, usual in odd_ones_out(types):
            if path not in told:
                told.add(path)
                yield fault(
                    "LT407", path, f"holds {dtype}, but the other ranks' files hold {usual}", subject=name, hint=hint
                )
        for first, replica in tensor.replicas if _is_one_for_all(name, tensor) else ():
            if first.crc() != replica.crc() and replica.holder.path not in told:
                told.add(replica.holder.path)
                message = f"is a replica of {first.holder.path.name}, but holds other values"
                yield fault("LT407", replica.holder.path, message, subject=name, hint=hint)


def _is_one_for_all(name: str, tensor: CutTensor) -> bool:
    """Return whether all ranks have the same values where they have the same elements; a plain buffer is each one's own."""
    held = (replica.holder.tensors[name] for _, replica in tensor.replicas)
    return ".lora_" in name or any(isinstance(of, DistributedTensor) for of in held)
