"""A plan: for every output tensor where it comes from, what is done to it and why. Pure data, printable, comparable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_tool.actions import TensorAction
from lora_tool.formats.safetensors import build_header
from lora_tool.plan.core.ops import Copy, LoraDelta, Op, Precision
from lora_tool.tensors import FileStamp, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One output tensor: its spec, the operation that makes it, its fate and the reason in words."""

    out: TensorSpec
    op: Op
    action: TensorAction
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InputRecord:
    """An input tensor that makes no output tensor of its own name: dropped, or consumed by a step."""

    path: Path
    name: str
    action: TensorAction
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFile:
    """A file that is no weights file: copied from `source`, or written with `content`."""

    filename: str
    reason: str
    source: Path | None = None
    content: bytes | None = None

    def __post_init__(self) -> None:
        if (self.source is None) == (self.content is None):
            raise ValueError(f"{self.filename}: a side file has either a source or a content")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All that will be written, and where each input tensor goes. `notes` are the summary's lines."""

    shards: tuple[Shard, ...]
    side_files: tuple[SideFile, ...]
    leftovers: tuple[InputRecord, ...]
    inputs: tuple[FileStamp, ...]
    precision: Precision
    manifest: Mapping[str, Any]
    input_names: Mapping[Path, str] = field(default_factory=dict)
    """Folder → its name in the manifest's `inputs`, where a tensor's name alone does not tell which adapter's it is."""
    hashed: tuple[Path, ...] = ()
    """Inputs whose sha256 the manifest records; taken while writing, because it costs a second per 400 MB."""
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def steps(self) -> Iterator[Step]:
        """All steps, shard by shard."""
        return (step for shard in self.shards for step in shard.steps)

    @property
    def data_bytes(self) -> int:
        """Bytes of all output tensors: the index's `total_size`."""
        return sum(shard.data_bytes for shard in self.shards)

    @property
    def only_copies(self) -> bool:
        """Whether every output tensor is the bytes of an input."""
        return all(isinstance(step.op, Copy) for step in self.steps)

    @property
    def recomputes_inits(self) -> bool:
        """Whether a base weight must be changed as PEFT changes it when it builds its layers."""
        return any(isinstance(step.op, LoraDelta) and step.op.init is not None for step in self.steps)

    def counts(self) -> dict[str, int]:
        """Return how many tensors have each fate, of the output first, then of the inputs."""
        fates = [step.action.value for step in self.steps] + [item.action.value for item in self.leftovers]
        return {fate: fates.count(fate) for fate in dict.fromkeys(fates)}

    def __str__(self) -> str:
        from lora_tool.plan.core.render import plan_text  # noqa: PLC0415 - the text is built from the plan, not the reverse

        return plan_text(self)
