"""The training state in one safetensors file for each rank."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

from lora_tool.checkpoints import ShardedDir
from lora_tool.checkpoints.fsdp import CUT_FILE
from lora_tool.checkpoints.models import other_models, weights_in
from lora_tool.checkpoints.states.file_facts import NumberedFiles
from lora_tool.checkpoints.states.state import TrainingState, base_layers_left_out, size_near
from lora_tool.checkpoints.states.tags import choose_model, require_tag_here
from lora_tool.core.display import counted
from lora_tool.core.errors import Defect
from lora_tool.core.tensors import DType, StoredTensor, TensorTable
from lora_tool.formats.cut_safetensors import CutModel, assemble_cut, read_cut_safetensors
from lora_tool.formats.partitions import Role, StateEntry
from lora_tool.formats.weights import read_single
from lora_tool.models.ends import is_input

_LAST_NORM = re.compile(r"(\A|\.)(norm|ln_f|final_layer_?norm)\.weight\Z")


class CutState(TrainingState, frozen=True, kw_only=True):
    """The state of a module in one safetensors file for each rank."""

    model: CutModel
    shards: frozenset[int]
    """The numbers in the names of its files."""

    def numbered_files(self) -> Iterator[NumberedFiles]:
        """See `TrainingState`; where every tensor is whole, no file is missing between others."""
        if self._gaps:
            numbers = range(1, max(self.shards) + 1)
            yield NumberedFiles(folder=self.folder, of="shard", numbers=numbers, there=self.shards)

    def known_rows(self) -> Iterator[tuple[str, int, int]] | None:
        """Yield the embeddings and the last norm with their rows by a config nearby; None where a gap is known."""
        return None if self.problems or self._gaps else self._known_rows()

    def _known_rows(self) -> Iterator[tuple[str, int, int]]:
        for name in self.model.parts:
            shape = self.model.shape(name)
            is_end = is_input(name.removesuffix(".weight"))
            size = "vocab_size" if is_end else "hidden_size" if _LAST_NORM.search(name) else None
            wanted = size and size_near(size, self.folder)
            if wanted and shape:
                yield name, shape[0], wanted

    def copies(self) -> Iterator[tuple[Path, Path]]:
        """See `TrainingState`."""
        yield from self.model.doubled

    def types(self) -> Iterator[tuple[str, Mapping[Path, DType]]]:
        """See `TrainingState`."""
        for name, parts in self.model.parts.items():
            yield name, {part.stored.path: part.stored.dtype for part in parts}

    def gaps(self) -> Iterator[tuple[Path, str, str]]:
        """See `TrainingState`."""
        if not self.problems and len(self.shards) == max(self.shards):
            for name, gap in self._gaps.items():
                yield self.folder, name, gap

    @property
    def lists_all_names(self) -> bool:
        """Whether every file can be read and every tensor in them is whole."""
        return not self.problems and not self._gaps

    @property
    def _gaps(self) -> dict[str, str]:
        return {name: gap for name in self.model.parts if (gap := self.model.gap(name))}

    def assemble(self, wanted: Container[str]) -> dict[str, StoredTensor]:
        """See `assemble_cut`."""
        return assemble_cut(self.model, wanted)


def cut_state(checkpoint: ShardedDir, *, tag: str | None = None) -> TrainingState:
    """Return the state in the files of all ranks; see `training_state`."""
    require_tag_here(checkpoint, tag)
    folder, names = checkpoint.root, checkpoint.rank_files["."]
    model = read_cut_safetensors(folder, names)
    return CutState(
        root=folder,
        folder=folder,
        title=f"distributed safetensors checkpoint {folder}, {counted(len(names), 'file')}",
        entries={name: StateEntry(role=Role.SAVED, shape=model.shape(name)) for name in model.parts},
        without_values=base_layers_left_out(model.parts),
        problems=model.problems,
        model=model,
        shards=frozenset(int(match["shard"]) for match in map(CUT_FILE.match, names) if match),
        stamps=model.stamps,
        facts={"format": str(checkpoint.kind), "tag": ".", "files": len(names)},
    )


# The training state of a PEFT model in the files of a model: every tensor is whole in one of them.


class WholeState(TrainingState, frozen=True, kw_only=True):
    """The state of a module in `pytorch_model.bin`, `model.safetensors`, or shards of them."""

    tensors: TensorTable

    def assemble(self, wanted: Container[str]) -> dict[str, StoredTensor]:
        """Return its tensors whose names are in `wanted`."""
        return {name: tensor for name, tensor in self.tensors.items() if name in wanted}


def whole_state(checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> TrainingState:
    """Return the state in the files of a model, of several the first where `or_newest` takes one; see `training_state`."""
    folder, others = checkpoint.root, other_models(checkpoint.folder)
    models = ("model",) if or_newest and tag is None else ("model", *others)
    file = others.get(choose_model(checkpoint, models, tag))
    weights = weights_in(checkpoint.folder) if file is None else read_single(folder / file)
    return WholeState(
        root=folder,
        folder=folder,
        title=f"{checkpoint.kind} {folder if file is None else folder / file}, {counted(len(weights.files), 'file')}",
        entries={name: StateEntry(role=Role.SAVED, shape=tensor.shape) for name, tensor in weights.tensors.items()},
        without_values=base_layers_left_out(weights.tensors),
        problems=tuple(each for each in weights.problems if each.fatal or each.defect is Defect.FOREIGN_CALL),
        tensors=weights.tensors,
        stamps={stamp.path: stamp for stamp in weights.stamps},
        facts={"format": str(checkpoint.kind), "tag": ".", "files": len(weights.files)},
    )
