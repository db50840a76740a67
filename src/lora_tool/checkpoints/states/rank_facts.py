"""Facts from one file for each rank, about itself and the others: names, shapes and checksums."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path

from lora_tool.checkpoints.states.file_facts import FileFacts, Replica
from lora_tool.core.tensors import DType
from lora_tool.formats.distributed_tensors import DistributedTensor
from lora_tool.formats.rank_files import CutTensor, RankFile, RankFolder, gap_in


def gaps_in(found: RankFolder) -> dict[str, str]:
    """Return the tensors that are not whole, each with its gap."""
    return {name: gap for name, tensor in found.tensors.items() if (gap := gap_in(tensor))}


def is_flat(found: RankFolder) -> bool:
    """Return whether the files hold slices of tensors' elements, whose shapes they do not know."""
    return any(tensor.flat for tensor in found.tensors.values())


def file_facts(found: RankFolder, *, ranks: int, alone: bool) -> Iterator[FileFacts]:
    """Yield each file's facts about itself and the run; only names if one file should hold everything (`alone`)."""
    flat = is_flat(found)
    for rank, file in found.files.items():
        shapes = None if flat else tuple((name, tensor.shape) for name, tensor in sorted(file.tensors.items()))
        yield FileFacts(
            path=file.path,
            archive=None if alone else file.file.root,
            rank=None if alone else rank,
            saved_by=None if alone else file.saved_by,
            all_ranks=ranks,
            names=tuple(file.tensors),
            shapes=shapes,
        )


def contents(found: RankFolder) -> Iterator[tuple[Path, Hashable]]:
    """Yield the files whose values no other rank should have, each with a key of its values."""
    for file in found.files.values():
        if _is_of_one_rank(file):
            records = tuple((key, record.crc) for key, record in file.file.records.items())
            yield file.path, (file.file.serialization_id, file.saved_by, records)


def _is_of_one_rank(file: RankFile) -> bool:
    """Return whether no other rank should have the same: where nothing is cut, all may hold the whole."""
    is_cut = any(isinstance(tensor, DistributedTensor) for tensor in file.tensors.values())
    return is_cut and any(record.nbytes for record in file.file.records.values())


def types(found: RankFolder) -> Iterator[tuple[str, Mapping[Path, DType]]]:
    """Yield each tensor with the type that each file has."""
    for name, tensor in found.tensors.items():
        yield name, {part.holder.path: part.local.dtype for part in tensor.parts}


def replicas(found: RankFolder) -> Iterator[Replica]:
    """Yield the parts that several ranks hold, which must be equal."""
    for name, tensor in found.tensors.items():
        for first, other in tensor.replicas if _is_one_for_all(name, tensor) else ():
            yield Replica(name, first.holder.path, other.holder.path, first.crc() == other.crc())


def _is_one_for_all(name: str, tensor: CutTensor) -> bool:
    """Return whether all ranks have the same values where they have the same elements; a plain buffer is each one's own."""
    held = (replica.holder.tensors[name] for _, replica in tensor.replicas)
    return ".lora_" in name or any(isinstance(of, DistributedTensor) for of in held)
