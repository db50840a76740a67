"""The state in a training checkpoint of any kind: names with roles, and where their bytes are."""

from __future__ import annotations

import abc
import math
from collections import defaultdict
from collections.abc import Collection, Container, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from lora_tool.formats.files import is_folder
from lora_tool.formats.partitions import Role, StateEntry
from lora_tool.formats.torch_zip import Record
from lora_tool.keys import has_lora_factor
from lora_tool.records import AbstractRecord
from lora_tool.report import Finding
from lora_tool.sharded.file_values import FileValues, ValuePiece
from lora_tool.sharded.value_check import ValueCheck
from lora_tool.tensors import FileStamp, Span, StoredTensor, TensorTable

_BESIDE = ("lora_adapter", "huggingface")
"""Folders in which verl puts the adapter with its config, up to 2025, and the model's config and tokenizer."""


class TrainingState(Struct, frozen=True, kw_only=True, metaclass=AbstractRecord):
    """The tensors of a training run at one step: plain data, of which each kind of checkpoint has a class of its own."""

    root: Path
    folder: Path
    """Where the rank files are: `root` or the tag's folder in it."""
    title: str
    """One line for people: the kind of checkpoint, the number of ranks, the step."""
    entries: Mapping[str, StateEntry]
    shared: Mapping[str, str] = field(default_factory=dict)
    """Tied tensors: other name → the name under which it is in `entries`."""
    beside: tuple[str, ...] = ()
    """Keys of the other states in the checkpoint, which are left there."""
    without_values: tuple[str, ...] = ()
    """Names of frozen tensors that the module has and the checkpoint has not, as far as they are known."""
    shapeless: frozenset[str] = frozenset()
    """Names of tensors whose elements are there but whose shapes are unknown; in `entries` they have one dimension."""
    faults: tuple[Finding, ...] = ()
    """What is wrong with its structure."""
    stamps: Mapping[Path, FileStamp]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the manifest records about it."""

    @abc.abstractmethod
    def assemble(self, wanted: Container[str]) -> dict[str, StoredTensor]:
        """Return its tensors whose names are in `wanted`, each as the spans that hold its elements.

        Raises `IncompleteCheckpoint` for a tensor of which a part is missing, `CorruptFile` where a file is broken.
        """

    def optimised(self) -> frozenset[str]:
        """Return the names of the tensors that an optimizer beside them has states of: those that were trained.

        None are known where no optimizer was saved, or one that lora-tool does not look into.
        """
        return frozenset()

    def value_check(self, tensors: TensorTable) -> ValueCheck:
        """Return the check of the values of `tensors`, some of its own, without running it."""
        masters = frozenset(name for name in tensors if self._is_trained(name))
        return check_of_files(tensors, self.records(tensors), masters=masters)

    def _is_trained(self, name: str) -> bool:
        role = self.entries[name].role
        return role is Role.TRAINED or (role is Role.SAVED and has_lora_factor(name))

    def records(self, tensors: TensorTable) -> frozenset[Record | Span]:
        """Return what has to be read to know the values of `tensors`: records where a CRC32 tells their bytes, else spans."""
        return frozenset(place for tensor in tensors.values() for place in tensor.places)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, roughly: tensors not read yet count as float32."""
        return sum(4 * math.prod(entry.shape) for entry in self.entries.values())

    @property
    def near(self) -> tuple[Path, ...]:
        """Where what belongs to it may lie: HF Trainer writes it beside the tags, others above or inside, verl in folders
        beside the pieces.
        """
        beside = (place / name for place in (self.folder, self.root) for name in _BESIDE)
        exported = filter(is_folder, beside)
        return tuple(dict.fromkeys((self.root, self.folder, self.root.absolute().parent, *exported)))


def check_of_files(tensors: TensorTable, records: Collection[Record | Span], *, masters: frozenset[str]) -> ValueCheck:
    """Return the check of each file's values; `records` hold the tensors, `masters` are the trained ones."""
    by_path: dict[Path, list[Record | Span]] = defaultdict(list)
    for record in records:
        by_path[record.path].append(record)
    pieces: dict[Path, list[ValuePiece]] = defaultdict(list)
    for tensor in tensors.values():
        for span in tensor.places:
            piece = ValuePiece(span.offset, span.offset + span.nbytes, tensor.name, tensor.dtype)
            pieces[span.path].append(piece)
    parts = tuple(
        FileValues(path=path, records=tuple(by_path[path]), pieces=tuple(pieces[path]), masters=masters)
        for path in sorted(by_path)
    )
    return ValueCheck(nbytes=sum(record.nbytes for record in records), parts=parts)
