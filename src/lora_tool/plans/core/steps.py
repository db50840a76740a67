"""The parts of a plan: steps in weight files, other files, and input tensors without an output of that name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct, field

from lora_tool.core.tensors import TensorAction, TensorSpec
from lora_tool.formats.files import require_own_file
from lora_tool.formats.safetensors import build_header
from lora_tool.plans.core.ops import Op


class Step(Struct, frozen=True, kw_only=True):
    """One output tensor: its spec, the operation that makes it, the action and the reason in words."""

    out: TensorSpec
    op: Op
    action: TensorAction
    reason: str


class InputRecord(Struct, frozen=True, kw_only=True):
    """An input tensor without an output tensor of the same name: dropped, or consumed by a step."""

    path: Path
    name: str
    action: TensorAction
    reason: str


class Shard(Struct, frozen=True, kw_only=True):
    """One output weights file: its tensors in file order."""

    filename: str
    steps: tuple[Step, ...]
    metadata: Mapping[str, str] = field(default_factory=lambda: {"format": "pt"})

    @property
    def header(self) -> bytes:
        """The bytes before the data."""
        return build_header((step.out for step in self.steps), self.metadata)

    @property
    def data_bytes(self) -> int:
        return sum(step.out.nbytes for step in self.steps)

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return len(self.header) + self.data_bytes


class SideFile(Struct, frozen=True, kw_only=True):
    """A file without weights: copied from `source`, or written with `content`."""

    filename: str
    reason: str
    source: Path | None = None
    content: bytes | None = None

    def __post_init__(self) -> None:
        if (self.source is None) == (self.content is None):
            raise ValueError(f"{self.filename}: a side file has either a source or a content")

    @property
    def nbytes(self) -> int:
        """The size of the file. Raises OSError."""
        return self.source.stat().st_size if self.source else len(self.content or b"")


def copied_file(root: Path, name: str, whose: object) -> SideFile:
    """Return the file `name` of the folder `root`, `whose` it is, to be copied as it is.

    Raises `CorruptFile` for a link out of the folder, and for one that is not a regular file or cannot be opened.
    """
    require_own_file(root, root / name)
    return SideFile(filename=name, source=root / name, reason=f"copied from {whose}")
