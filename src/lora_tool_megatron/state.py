"""The training state in a torch_dist checkpoint of Megatron: its LoRA, as an adapter of transformers' model."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from lora_tool.checkpoints import ShardedDir
from lora_tool.checkpoints.folders import read_folder
from lora_tool.checkpoints.other_formats import refuse_files
from lora_tool.checkpoints.states.dcp_state import DcpState, dcp_state
from lora_tool.checkpoints.states.file_facts import SavedTags
from lora_tool.checkpoints.states.state import TrainingState, base_layers_left_out
from lora_tool.checkpoints.states.tags import choose_tag
from lora_tool.core.keys import PREFIX
from lora_tool.core.tensors import Span, StoredTensor, TensorSpec, TensorTable, contiguous
from lora_tool.formats.files import is_folder
from lora_tool.formats.partitions import Role, StateEntry
from lora_tool.formats.torch_zip import Record
from lora_tool_megatron.kind import POINTER
from lora_tool_megatron.model import model_of
from lora_tool_megatron.names import ModulePlace, is_megatron, places

_NESTS = frozenset({"weights", "policy", "value", "model"})
"""Folders of NeMo-RL and verl between the step, or the role, where the config lies, and the pieces."""
_EXPORTED = ("huggingface/adapter", "huggingface")
"""Folders in which verl puts what transformers and PEFT need beside weights: the config of both, and the tokenizer."""

_ADAPTER_OF_RANKS = "adapter_checkpoint"
"""Where verl once put the LoRA of each rank, beside the pieces of the optimizer."""


class MegatronState(TrainingState, frozen=True, kw_only=True):
    """The LoRA in Megatron's chunks, by PEFT's names; `stored` is the state as Megatron names it."""

    stored: DcpState
    places: Mapping[str, ModulePlace]

    def absent_files(self) -> Iterator[tuple[Path, str]]:
        """See `TrainingState`."""
        return self.stored.absent_files()

    def copies(self) -> Iterator[tuple[Path, Path]]:
        """See `TrainingState`."""
        return self.stored.copies()

    def gaps(self) -> Iterator[tuple[Path, str, str]]:
        """See `TrainingState`."""
        return self.stored.gaps()

    @property
    def has_module_names(self) -> bool:
        """False: Megatron's names were translated."""
        return False

    def assemble(self, wanted: Container[str]) -> dict[str, StoredTensor]:
        """Return tensors of the adapter, each as the rows of Megatron's that are its. Raises as `DcpState.assemble`."""
        own = {name: place for name, place in self.places.items() if name in wanted}
        whole = self.stored.assemble({place.source for place in own.values()})
        return {name: _taken(whole[place.source], place, name) for name, place in own.items()}

    def records(self, tensors: TensorTable) -> frozenset[Record | Span]:
        """Return the archive members that hold the tensors."""
        pieces = self.stored.found.pieces
        used = {span.path for tensor in tensors.values() for span in tensor.spans}
        records = {
            piece.record for source in {self.places[name].source for name in tensors} for piece in pieces[source]
        }
        return frozenset(record for record in records if record.path in used)

    @property
    def near(self) -> tuple[Path, ...]:
        """Where what belongs to it may lie; NeMo-RL has its config in the step's folder, above `policy/weights`."""
        return _near(self)


def iteration_state(checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> TrainingState:
    """Return the state of one iteration of Megatron: of `tag`, or of the one that the run points at.

    Raises `UnsupportedCheckpoint` where the LoRA lies beside it in files that say too little.
    """
    name = choose_tag(checkpoint, tag, or_newest=or_newest, pointer=POINTER, called="iterations")
    stored = dcp_state(checkpoint, tag=name)
    state = adopted_state(stored) or stored
    if not isinstance(state, MegatronState):
        if is_folder(beside := state.folder.absolute().parent / _ADAPTER_OF_RANKS):
            refuse_files(read_folder(beside), adapter=True)
        if not stored.entries:
            refuse_files(read_folder(stored.folder), adapter=True)
        state = replace(state, title=state.title.replace("FSDP", "Megatron", 1))
    saved = SavedTags(
        root=checkpoint.root, names=tuple(checkpoint.rank_files), latest=checkpoint.latest, pointer=POINTER
    )
    return replace(state, tags=saved if tag is None else state.tags)


def adopted_state(stored: TrainingState) -> MegatronState | None:
    """Return the adapter in the state of a folder of torch's distributed checkpoints; None if its names are not Megatron's.

    Raises as `megatron_state`.
    """
    return megatron_state(stored) if isinstance(stored, DcpState) and is_megatron(stored.entries) else None


def megatron_state(stored: DcpState) -> MegatronState:
    """Return the adapter in a checkpoint of Megatron that was opened as torch's.

    Raises `UnsupportedCheckpoint` where the run's files do not tell how its modules are fused and what transformers
    calls them, or LoRA is on others than those that are known.
    """
    model = model_of(_near(stored), stored.folder)
    shapes = {name: entry.shape for name, entry in stored.entries.items()}
    found = places(shapes, model, {name: _row_cuts(stored, name) for name in shapes})
    entries = {name: StateEntry(role=Role.SAVED, shape=place.shape) for name, place in found.items()}
    sources = {place.source for place in found.values()}
    others = tuple(name for name in stored.entries if name not in sources)
    return MegatronState(
        root=stored.root,
        folder=stored.folder,
        title=f"Megatron checkpoint {stored.folder}, {len(sources)} tensors of LoRA",
        entries=entries,
        beside=(*stored.beside, *others),
        without_values=(*base_layers_left_out(entries), *_without_lora(entries, tuple(model.linear_modules()))),
        problems=stored.problems,
        tags=stored.tags,
        stamps=stored.stamps,
        facts={**stored.facts, "format": "Megatron torch_dist"},
        stored=stored,
        places=found,
    )


def _without_lora(entries: Mapping[str, StateEntry], modules: tuple[str, ...]) -> tuple[str, ...]:
    """Return the weights of the model's modules that have no LoRA; an output layer is one in any case."""
    adapted = {name.removeprefix(PREFIX).partition(".lora_")[0] for name in entries}
    return tuple(f"{PREFIX}{module}.weight" for module in (*modules, "lm_head") if modules and module not in adapted)


def _row_cuts(stored: DcpState, name: str) -> int:
    """Return in how many ranges of rows a tensor was saved, each by one tensor parallel rank."""
    chunks = stored.found.tensors[name].chunks
    return max(1, len({chunk.offsets[-2] for chunk in chunks if len(chunk.offsets) > 1}))


def _near(state: TrainingState) -> tuple[Path, ...]:
    inner = state.folder.absolute().parent
    above = [inner]
    while above[-1].name in _NESTS:
        above.append(above[-1].parent)
    beside = (place / name for place in above for name in _EXPORTED)
    exported = filter(is_folder, beside)
    return tuple(dict.fromkeys((state.folder, state.root, *above, *exported, state.root.absolute().parent)))


def _taken(whole: StoredTensor, place: ModulePlace, name: str) -> StoredTensor:
    """Return the rows of the place as a tensor of their own."""
    spec = TensorSpec(name=name, dtype=whole.dtype, shape=place.shape)
    row_bytes = place.shape[1] * whole.dtype.bits // 8
    parts = (whole.part((place.first + first) * row_bytes, count * row_bytes) for first, count in place.rows)
    return replace(whole, spec=spec, spans=contiguous(span for spans in parts for span in spans))
