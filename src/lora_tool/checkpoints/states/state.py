"""The state in a training checkpoint of any kind: names with roles, places of their bytes, and facts from its files."""

from __future__ import annotations

import abc
import math
import re
from collections import defaultdict
from collections.abc import Collection, Container, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from lora_tool.checkpoints.states.file_facts import Amount, FileFacts, NumberedFiles, SavedTags
from lora_tool.checkpoints.states.file_values import FileValues, ValuePiece, ValueReader
from lora_tool.core.errors import BrokenFile, Problem
from lora_tool.core.keys import LORA_FACTOR, has_lora_factor
from lora_tool.core.records import AbstractRecord
from lora_tool.core.tensors import DType, FileStamp, Span, StoredTensor, TensorTable
from lora_tool.formats import model_config
from lora_tool.formats.files import is_file, is_folder, read_object
from lora_tool.formats.partitions import Role, StateEntry
from lora_tool.formats.stored import read_part
from lora_tool.formats.torch_zip import Record
from lora_tool.models.ends import is_new_module
from lora_tool.models.model_tensors import base_prefixes

_EXPORTS = ("lora_adapter", "huggingface")
"""Folders in which verl puts the adapter with its config, up to 2025, and the model's config and tokenizer."""


_BEGINNING = 4096
"""Bytes of a tensor that show whether it is constant."""
_BASE = re.compile(r"\.base_layer(?=\.)")


class TrainingState(Struct, frozen=True, kw_only=True, metaclass=AbstractRecord):
    """The tensors of a training run at one step: plain data, with a subclass for each kind of checkpoint."""

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
    problems: tuple[Problem, ...] = ()
    """Of files that cannot be read, and of pickles that call what no checkpoint needs."""
    tags: SavedTags | None = None
    """The saves that this one was chosen from; None where the caller named it."""
    stamps: Mapping[Path, FileStamp]
    facts: Mapping[str, Any] = field(default_factory=dict)
    """The facts that the manifest records about it."""

    @abc.abstractmethod
    def assemble(self, wanted: Container[str]) -> dict[str, StoredTensor]:
        """Return its tensors whose names are in `wanted`, each as the spans that hold its elements.

        Raises `IncompleteCheckpoint` for a tensor with a missing part, `CorruptFile` where a file is broken.
        """

    def optimised(self) -> frozenset[str]:
        """Return the names of the tensors with a state in the saved optimizer: those that were trained.

        Empty where no optimizer was saved, or one that lora-tool does not read.
        """
        return frozenset()

    # facts from its files, for the rules; each kind yields those that it has

    def numbered_files(self) -> Iterator[NumberedFiles]:
        """Yield the files that it should have by their numbers."""
        yield from ()

    def absent_files(self) -> Iterator[tuple[Path, str]]:
        """Yield the files that others name and that do not exist, each with the end of a sentence that says so."""
        yield from ()

    def ungathered_files(self) -> Iterator[tuple[Path, int, int]]:
        """Yield the files that should hold whole tensors and hold one rank's parts, with that rank and their number."""
        yield from ()

    def known_rows(self) -> Iterator[tuple[str, int, int]] | None:
        """Yield the tensors whose rows the model's config gives: name, rows in the files, rows by the config.

        None for kinds whose files have the rank count.
        """
        return None

    def files(self) -> Iterator[FileFacts]:
        """Yield each rank file's facts about itself and its run."""
        yield from ()

    def contents(self) -> Iterator[tuple[Path, Hashable]]:
        """Yield the files whose content no other file should have, with a key of the content."""
        yield from ()

    def copies(self) -> Iterator[tuple[Path, Path]]:
        """Yield the files that hold the content of another rank's file, each with the other."""
        seen: dict[Hashable, Path] = {}
        for path, content in self.contents():
            other = seen.setdefault(content, path)
            if other != path:
                yield path, other

    def strangers(self) -> Iterator[tuple[Path, str]]:
        """Yield the parameters in its files that the module does not have, each with its place."""
        yield from ()

    def types(self) -> Iterator[tuple[str, Mapping[Path, DType]]]:
        """Yield the tensors with parts in several files, with the type that each file has."""
        yield from ()

    def unequal_replicas(self) -> Iterator[tuple[str, Path, Path]]:
        """Yield the tensors of which two files should hold the same values and, by their checksums, do not."""
        yield from ()

    def gaps(self) -> Iterator[tuple[Path, str, str]]:
        """Yield file or folder, name and gap of each tensor that is not whole although no file is missing."""
        yield from ()

    def amounts(self) -> Iterator[Amount]:
        """Yield how many elements the files hold of the values divided among the ranks."""
        yield from ()

    @property
    def names_path(self) -> Path:
        """The file or folder that lists the module's tensors."""
        return self.folder

    @property
    def hides_frozen(self) -> bool:
        """Whether frozen parameters were left out, and no file lists their names."""
        return False

    @property
    def lists_all_names(self) -> bool:
        """Whether no file is missing or broken that may name further tensors."""
        return not self.broken

    @property
    def broken(self) -> tuple[Problem, ...]:
        """The problems of files that cannot be read."""
        return tuple(problem for problem in self.problems if problem.fatal)

    @property
    def has_module_names(self) -> bool:
        """Whether its names are those of the training module, and not translated."""
        return True

    # its values

    def value_readers(self, tensors: TensorTable) -> tuple[ValueReader, ...]:
        """Return readers for the values of `tensors`, a subset of its own, that can run at the same time."""
        masters = frozenset(name for name in tensors if self._is_trained(name))
        records: dict[Path, list[Record | Span]] = defaultdict(list)
        for record in self.records(tensors):
            records[record.path].append(record)
        pieces: dict[Path, list[ValuePiece]] = defaultdict(list)
        for tensor in tensors.values():
            for span in tensor.places:
                piece = ValuePiece(span.offset, span.offset + span.nbytes, tensor.name, tensor.dtype)
                pieces[span.path].append(piece)
        return tuple(
            FileValues(path=path, records=tuple(records[path]), pieces=tuple(pieces[path]), masters=masters)
            for path in sorted(records)
        )

    def _is_trained(self, name: str) -> bool:
        role = self.entries[name].role
        return role is Role.TRAINED or (role is Role.SAVED and has_lora_factor(name))

    def records(self, tensors: TensorTable) -> frozenset[Record | Span]:
        """Return the places to read for the values of `tensors`: records where a CRC32 covers the bytes, else spans."""
        return frozenset(place for tensor in tensors.values() for place in tensor.places)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors, roughly: tensors not read yet count as float32."""
        return sum(4 * math.prod(entry.shape) for entry in self.entries.values())

    @property
    def near(self) -> tuple[Path, ...]:
        """Folders to search for its configs: HF Trainer writes them next to the tags, others above or inside, verl in
        folders next to the pieces.
        """
        exported = filter(is_folder, (place / name for place in (self.folder, self.root) for name in _EXPORTS))
        return tuple(dict.fromkeys((self.root, self.folder, self.root.absolute().parent, *exported)))


def size_near(name: str, *folders: Path) -> int | None:
    """Return the size `name`, "hidden_size" say, in the first config.json that the folders have; None where none says it."""
    path = next((path for folder in folders if is_file(path := folder / model_config.FILE_NAME)), None)
    if path is None:
        return None
    try:
        found = read_object(path)
    except BrokenFile:
        return None
    text = found.get("text_config")
    tables = [found, text if isinstance(text, dict) else {}]
    size = next((table[name] for table in tables if name in table), None)
    return size if type(size) is int and size > 0 else None


def varies(tensor: StoredTensor) -> bool:
    """Return whether the first elements differ from each other: parameters may well hold the same constant."""
    data, size = read_part(tensor, 0, min(tensor.nbytes, _BEGINNING)), tensor.dtype.bits // 8
    return data[size:] != data[:-size]


def base_layers_left_out(names: Collection[str]) -> tuple[str, ...]:
    """Return the names that the frozen weights under LoRA would have, without those that are among `names`."""
    lacking: set[str] = set()
    held: set[str] = set()
    for name in names:
        if match := LORA_FACTOR.search(name):
            if f"{name[: match.start()]}.weight" not in names:  # prime-rl saves the base under its own names
                lacking.add(name[: match.start()])
        # under `target_parameters` the base's parameter has a name of its own: experts.base_layer.gate_up_proj
        # PEFT saves a bias there that it trained, without the weight
        elif ".lora_" not in name and not name.endswith(".base_layer.bias"):
            held.update(name[: match.start()] for match in _BASE.finditer(name))
    return tuple(f"{module}.base_layer.weight" for module in sorted(lacking - held))


# What the modules around a model put before all names in a training state: a Lightning module's ``net.``, say.


_MOST = 8
"""Modules around one another, at most."""


def wrapper_of(names: Collection[str]) -> str:
    """Return the beginning of all `names` that is not the model's, with its dot; "" where there is none, or none that
    is known to be one.
    """
    shared = next(iter(names), "").split(".")[:-1][:_MOST]
    found = ""
    for depth in range(1, len(shared) + 1):
        before = f"{'.'.join(shared[:depth])}."
        if not all(name.startswith(before) for name in names):
            break
        inner = {name[len(before) :].partition(".")[0] for name in names}
        heads = set(filter(is_new_module, inner))
        if not inner <= base_prefixes() | heads:
            continue  # a model of its own kind: Qwen2.5-Omni has its output layer in ``thinker``
        if heads or (not found and base_prefixes().isdisjoint(shared[:depth])):
            found = before
    return found
