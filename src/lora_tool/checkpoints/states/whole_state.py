"""The training state of a PEFT model in the files of a model: every tensor is whole in one of them."""

from __future__ import annotations

from collections.abc import Container

from lora_tool.checkpoints import ShardedDir
from lora_tool.checkpoints.models import weights_in
from lora_tool.checkpoints.states.state import TrainingState, base_layers_left_out
from lora_tool.checkpoints.states.tags import require_tag_here
from lora_tool.core.display import counted
from lora_tool.core.tensors import StoredTensor, TensorTable
from lora_tool.formats.partitions import Role, StateEntry


class WholeState(TrainingState, frozen=True, kw_only=True):
    """The state of a module in `pytorch_model.bin`, `model.safetensors`, or shards of them."""

    tensors: TensorTable

    def assemble(self, wanted: Container[str]) -> dict[str, StoredTensor]:
        """Return its tensors whose names are in `wanted`."""
        return {name: tensor for name, tensor in self.tensors.items() if name in wanted}


def whole_state(checkpoint: ShardedDir, *, tag: str | None = None) -> TrainingState:
    """Return the state in the files of a model; see `training_state`."""
    require_tag_here(checkpoint, tag)
    folder, weights = checkpoint.root, weights_in(checkpoint.folder)
    return WholeState(
        root=folder,
        folder=folder,
        title=f"{checkpoint.kind} {folder}, {counted(len(weights.files), 'file')}",
        entries={name: StateEntry(role=Role.SAVED, shape=tensor.shape) for name, tensor in weights.tensors.items()},
        without_values=base_layers_left_out(weights.tensors),
        problems=tuple(problem for problem in weights.problems if problem.fatal),
        tensors=weights.tensors,
        stamps={stamp.path: stamp for stamp in weights.stamps},
        facts={"format": str(checkpoint.kind), "tag": ".", "files": len(weights.files)},
    )
