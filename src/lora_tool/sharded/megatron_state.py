"""The training state in a torch_dist checkpoint of Megatron: its LoRA, as an adapter of transformers' model."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lora_tool.checkpoint import ShardedDir
from lora_tool.errors import UnsupportedCheckpoint
from lora_tool.formats.lora_recipes import read_yaml
from lora_tool.formats.partitions import Role, StateEntry
from lora_tool.formats.torch_zip import Record
from lora_tool.sharded.dcp_state import DcpState, dcp_state
from lora_tool.sharded.faults import base_layers_left_out
from lora_tool.sharded.megatron_names import GIVE, Place, geometry_of, is_megatron, places
from lora_tool.sharded.state import TrainingState
from lora_tool.tensors import Span, StoredTensor, TensorSpec, TensorTable, contiguous

RUN_CONFIG = "run_config.yaml"


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronState(TrainingState):
    """The LoRA in Megatron's chunks, by PEFT's names; `stored` is the state as Megatron names it."""

    stored: DcpState
    places: Mapping[str, Place]

    def assemble(self, wanted: Container[str]) -> dict[str, StoredTensor]:
        """Return tensors of the adapter, each as the rows of Megatron's that are its. Raises as `DcpState.assemble`."""
        own = {name: place for name, place in self.places.items() if name in wanted}
        whole = self.stored.assemble({place.source for place in own.values()})
        return {name: _taken(whole[place.source], place, name) for name, place in own.items()}

    def records(self, tensors: TensorTable) -> frozenset[Record | Span]:
        """Return the archive members that hold the tensors."""
        pieces = self.stored.found.pieces
        used = {span.path for tensor in tensors.values() for span in tensor.spans}
        records = {piece.record for name in tensors for piece in pieces[self.places[name].source]}
        return frozenset(record for record in records if record.path in used)


def torch_dist_state(checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> TrainingState:
    """Return the state in a folder of torch distributed checkpoints, whoever wrote it; see `training_state`."""
    stored = dcp_state(checkpoint, tag=tag, or_newest=or_newest)
    return megatron_state(stored) if isinstance(stored, DcpState) and is_megatron(stored.entries) else stored


def megatron_state(stored: DcpState) -> MegatronState:
    """Return the adapter in a checkpoint of Megatron that was opened as torch's.

    Raises `UnsupportedCheckpoint` where the run's config does not tell how its modules are fused, or LoRA is on others
    than those of a dense transformer.
    """
    path = next((folder / RUN_CONFIG for folder in _near(stored) if (folder / RUN_CONFIG).is_file()), None)
    if path is None:
        message = f"{stored.folder} is a checkpoint of Megatron without {RUN_CONFIG}, which says how rows of its modules are fused"
        raise UnsupportedCheckpoint(message, hint=GIVE)
    found = places({name: entry.shape for name, entry in stored.entries.items()}, geometry_of(read_yaml(path), path))
    entries = {name: StateEntry(role=Role.SAVED, shape=place.shape) for name, place in found.items()}
    sources = {place.source for place in found.values()}
    others = tuple(name for name in stored.entries if name not in sources)
    return MegatronState(
        root=stored.root,
        folder=stored.folder,
        title=f"Megatron checkpoint {stored.folder}, {len(sources)} tensors of LoRA",
        entries=entries,
        beside=(*stored.beside, *others),
        without_values=base_layers_left_out(entries),
        faults=tuple(finding for finding in stored.faults if finding.code != "LT416"),
        stamps=stored.stamps,
        facts={**stored.facts, "format": "Megatron torch_dist"},
        stored=stored,
        places=found,
    )


def _near(stored: DcpState) -> tuple[Path, ...]:
    return stored.folder, stored.root


def _taken(whole: StoredTensor, place: Place, name: str) -> StoredTensor:
    """Return the rows of the place as a tensor of their own."""
    spec = TensorSpec(name=name, dtype=whole.dtype, shape=place.shape)
    columns = place.shape[1]
    row_bytes = columns * whole.dtype.bits // 8
    layer = 0 if place.layer is None else place.layer * (whole.nbytes // whole.shape[0])
    runs = ((0, place.shape[0]),) if place.rows is None else place.rows
    parts = (whole.part(layer + first * row_bytes, count * row_bytes) for first, count in runs)
    return replace(whole, spec=spec, spans=contiguous(span for spans in parts for span in spans))
