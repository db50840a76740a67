"""The words for names: which rows of which tensors make another. Plain data; transformers is not needed to hold it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Protocol

from msgspec import Struct

ShapeOnDisk = tuple[int, ...]


class RowSlice(Struct, frozen=True, kw_only=True):
    """`rows` consecutive rows of the tensor `name` from row `start`; a vector's rows are its elements.

    The rows of a tensor of three dimensions are those of all its matrices, one after the other.
    """

    name: str
    start: int
    rows: int


class RowMapping(Struct, frozen=True, kw_only=True):
    """A tensor made of rows of others, in this order.

    `pieces` is None where it is no concatenation of their rows, because they were transposed. `sources` are the tensors
    that the conversion read to make it.
    """

    shape: ShapeOnDisk
    pieces: tuple[RowSlice, ...] | None
    sources: tuple[str, ...]
    transposed: bool = False
    """Whether it is its one source with the last two dimensions swapped."""


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What planning a merge needs to know of a transformers class, built for one config without weights."""

    class_name: str
    shapes: Mapping[str, ShapeOnDisk]
    """Every parameter and saved buffer, in the model's order. A label dimension is `LABELS`."""
    buffers: frozenset[str]
    modules: frozenset[str]
    """Paths of all modules."""
    layers: frozenset[str]
    """Paths of the modules that PEFT wraps as layers: linear ones, Conv1D and embeddings."""
    conv1d: frozenset[str]
    """Paths of modules that store their weight as [in, out]."""
    transposed: frozenset[str]
    """Paths of modules whose three-dimensional parameters are [experts, in, out]."""
    tied: Mapping[str, str]
    """Parameter → the parameter that it is the same as; only the latter is saved."""
    output: str | None
    """Path of the language-modelling output layer."""
    tokens_of_both: str | None
    """Path of the embedding whose trained tokens PEFT trains at the tied ends, too: none where its config ties none."""
    head: str | None
    """Path of the last layer of the classification head: its outputs are the labels."""
    unsaved: frozenset[str]
    """Parameters that transformers computes when it builds the model, and does not save."""
    keep_in_fp32: frozenset[str]
    """Parameters that transformers loads in float32 in a model of any dtype."""
    optional: frozenset[str] = frozenset()
    """What a checkpoint may lack: transformers gives it one value, and says nothing."""

    @property
    def label_axes(self) -> dict[str, int]:
        """Parameter whose shape depends on the number of labels → the dimension that is that number."""
        return {name: shape.index(LABELS) for name, shape in self.shapes.items() if LABELS in shape}

    def has_row_per_label(self, name: str) -> bool:
        """Return whether this parameter's rows are labels."""
        return self.shapes.get(name, ())[:1] == (LABELS,)

    @property
    def parameters(self) -> Iterator[str]:
        """The parameters in the model's order, without its buffers."""
        return (name for name in self.shapes if name not in self.buffers)


class NamesOnDisk(Protocol):
    """What `from_pretrained` takes from a checkpoint for one class, and what saving writes: `WeightMapping` asks
    transformers, `MixtureMapping` a table.
    """

    @property
    def facts(self) -> ModelFacts:
        """What is special about the class."""

    @property
    def parameters(self) -> Mapping[str, RowMapping]:
        """Parameter → the rows on disk that it is made of."""

    @property
    def unexpected(self) -> tuple[str, ...]:
        """Tensors on disk that the class has no place for."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Parameters that the checkpoint has nothing for, tied ones aside."""

    @property
    def outside(self) -> frozenset[str]:
        """Parameters that the class which adapters are trained on does not have."""

    @property
    def tied_by_config(self) -> Mapping[str, str]:
        """Parameter → the one that it is the same as because the config says so, and would not be otherwise."""

    def place(self, disk_name: str) -> str:
        """Return the parameter that a tensor of this name would be loaded into, or a part of."""

    def piece_names(self, parameter: str) -> AbstractSet[str]:
        """Return the names of the tensors on disk whose rows make the parameter; none where it is not made of rows."""

    def is_written_as_in_memory(self, parameter: str) -> bool:
        """Return whether `save_pretrained` writes the rows of a parameter by itself, however it was stored."""

    def written(self, memory: Mapping[str, ShapeOnDisk]) -> dict[str, RowMapping]:
        """Return what `save_pretrained` writes for these parameters: tensor name → the rows that it is made of."""

    def left_out_by_peft(self, folder: Path, tensors: Mapping[str, ShapeOnDisk]) -> tuple[str, ...]:
        """Return the LoRA tensors of the adapter in `folder` that PEFT would drop with a warning."""


LABELS = 7919
"""A number of labels that no other dimension has, by which the head is found."""


def row_count(shape: ShapeOnDisk) -> int:
    """Return how many rows a tensor of this shape has: all matrices' together, or a vector's elements."""
    count = 1
    for size in shape[:-1] if len(shape) > 1 else shape:
        count *= size
    return count
