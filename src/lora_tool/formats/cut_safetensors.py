"""Safetensors files that each hold one rank's rectangles of the tensors; the headers give their offsets.

Source: torch 2.13 `distributed/checkpoint/hf_storage.py` and `_hf_utils.py`: `DCP_SHARDING_INFO` in a file's metadata
is JSON, tensor name → `saved_offsets`. The shape of the whole stands in no file: it is as far as the rectangles reach.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeGuard

from msgspec import Struct

from lora_tool.core.errors import CorruptFile, Defect, IncompleteCheckpoint, Problem
from lora_tool.core.tensors import DType, FileStamp, StoredTensor, TensorSpec
from lora_tool.formats.files import require_inside
from lora_tool.formats.pieces import Piece, assembled, uncovered
from lora_tool.formats.safetensors import WeightsFile, scan_file

_INFO = "DCP_SHARDING_INFO"


class CutPart(NamedTuple):
    """Elements of a tensor from `offsets` on."""

    offsets: tuple[int, ...]
    stored: StoredTensor

    @property
    def piece(self) -> Piece:
        return Piece(self.offsets, self.stored.shape, self.stored.spans[0])


class CutModel(Struct, frozen=True, kw_only=True):
    """The tensors in the files of all ranks."""

    folder: Path
    stamps: Mapping[Path, FileStamp]
    parts: Mapping[str, tuple[CutPart, ...]]
    """Tensor name → its rectangles, each once."""
    doubled: tuple[tuple[Path, Path], ...] = ()
    """Files with a rectangle that another file has, too, each with the other."""
    problems: tuple[Problem, ...] = ()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return how far the tensor's rectangles reach."""
        ends = [[at + size for at, size in zip(*part.piece[:2], strict=True)] for part in self.parts[name]]
        return tuple(map(max, zip(*ends, strict=True)))

    def gap(self, name: str) -> str | None:
        """Return which part of the tensor is in no file, or in two; None where all that they reach is there once."""
        return uncovered(self.shape(name), [part.piece for part in self.parts[name]])


def read_cut_safetensors(folder: Path, names: Iterable[str]) -> CutModel:
    """Return the tensors in the files `names` of `folder`, read from their headers; faults are among its problems."""
    parts: dict[str, dict[tuple[tuple[int, ...], ...], CutPart]] = {}
    problems: list[Problem] = []
    stamps, doubled = {}, {}
    for path in (folder / name for name in names):
        try:
            require_inside(folder, path)
            scanned = scan_file(path)
            fatal = next((problem for problem in scanned.problems if problem.fatal), None)
            found = [] if fatal else list(cut_parts(scanned))
        except CorruptFile as error:
            fatal, found = error.problem, []
        if fatal is not None:
            problems.append(fatal)
            continue
        stamps[path] = scanned.stamp
        for name, part in found:
            first = parts.setdefault(name, {}).setdefault((part.offsets, part.stored.shape), part)
            if first is not part and part.stored.nbytes:
                doubled[path] = first.stored.path
    return CutModel(
        folder=folder,
        stamps=stamps,
        parts={name: tuple(held.values()) for name, held in parts.items()},
        doubled=tuple(doubled.items()),
        problems=tuple(problems),
    )


def cut_parts(scanned: WeightsFile) -> Iterator[tuple[str, CutPart]]:
    """Yield the name and rectangle of each tensor of a file. Raises `CorruptFile` where it does not say where that lies."""
    try:
        info = json.loads(scanned.metadata[_INFO])
    except (KeyError, ValueError, RecursionError) as error:
        message = f"has no {_INFO}, which says where its tensors lie in the whole ones"
        raise CorruptFile.of(scanned.path, Defect.BAD_HEADER, message) from error
    for name, tensor in scanned.tensors.items():
        entry = info.get(name) if isinstance(info, dict) else None
        offsets = entry.get("saved_offsets") if isinstance(entry, dict) else None
        if not _are_offsets(offsets) or len(offsets) != len(tensor.shape):
            message = f"has no valid offsets in {_INFO}: {offsets!r:.60}"
            raise CorruptFile.of(scanned.path, Defect.BAD_HEADER, message, name)
        yield name, CutPart(tuple(offsets), tensor)


def _are_offsets(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(offset) is int and offset >= 0 for offset in value)


def assemble_cut(model: CutModel, wanted: Container[str]) -> dict[str, StoredTensor]:
    """Return the tensors whose names are in `wanted`, as spans. Raises `IncompleteCheckpoint` for one with a hole."""
    tensors = {}
    for name, parts in model.parts.items():
        if name not in wanted:
            continue
        try:
            spec = TensorSpec(name=name, dtype=_common_type(parts), shape=model.shape(name))
            tensors[name] = assembled(spec, [part.piece for part in parts])
        except ValueError as error:
            hint = "copy each rank's file from the machine that wrote it"
            raise IncompleteCheckpoint(f"{model.folder}: `{name}` is incomplete: {error}", hint=hint) from error
    return tensors


def _common_type(parts: Iterable[CutPart]) -> DType:
    types = {part.stored.dtype for part in parts}
    if len(types) > 1:
        raise ValueError(f"its parts are of {len(types)} types")
    return types.pop()
