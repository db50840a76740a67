"""The training state in a folder of torch distributed checkpoints, as FSDP2 writes them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from lora_tool.checkpoint import ShardedDir
from lora_tool.errors import CorruptFile, NotACheckpoint
from lora_tool.formats.dcp import DcpFolder, Pieces, assemble_dcp, read_dcp, read_pieces, stamps
from lora_tool.formats.partitions import Role, StateEntry
from lora_tool.formats.torch_zip import Record
from lora_tool.report import Finding
from lora_tool.sharded import dcp_checks, zero_checks
from lora_tool.sharded.state import Tensors, TrainingState
from lora_tool.tensors import Span, StoredTensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DcpState(TrainingState):
    """The state of a module in torch's distributed checkpoints."""

    found: DcpFolder
    pieces: Pieces

    def assemble(self, wanted: Container[str]) -> dict[str, StoredTensor]:
        """See `assemble_dcp`."""
        return assemble_dcp(self.found, self.pieces, wanted)

    def records(self, tensors: Tensors) -> frozenset[Record | Span]:
        """Return the archive members that hold the tensors."""
        return frozenset(piece.record for name in tensors for piece in self.pieces[name])


def dcp_state(checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> TrainingState:  # noqa: ARG001 - nothing points at a part
    """Return the state of the module in a folder of torch distributed checkpoints; see `training_state`.

    `tag` is the sub-folder of the model; of several that may be its no one is the newest, so `or_newest` helps nothing.
    """
    # accelerate and the HF Trainer write pytorch_model_fsdp_0 and optimizer_0 side by side
    parts = [name for name in checkpoint.rank_files if not name.startswith("optimizer")] if tag is None else [tag]
    if len(parts) != 1 or parts[0] not in checkpoint.rank_files:
        listed = ", ".join(checkpoint.rank_files)
        raise NotACheckpoint(f"{checkpoint.root}: which of these is the model's? {listed}", hint="choose: `tag=FOLDER`")
    folder = checkpoint.root / parts[0] if parts[0] != "." else checkpoint.root
    try:
        found = read_dcp(folder)
    except CorruptFile as error:
        found = DcpFolder(folder=folder, tensors={})
        faults = tuple(dcp_checks.unreadable([error.problem]))
        return _dcp_state(checkpoint, parts[0], found, faults)
    return _dcp_state(checkpoint, parts[0], found)


def _dcp_state(checkpoint: ShardedDir, part: str, found: DcpFolder, faults: tuple[Finding, ...] = ()) -> TrainingState:
    pieces, problems = read_pieces(found)
    lost = zero_checks.base_layers_left_out(found.tensors)
    return DcpState(
        root=checkpoint.root,
        folder=found.folder,
        title=f"FSDP2 checkpoint {found.folder}, {len(found.filenames)} files",
        entries={name: StateEntry(role=Role.SAVED, shape=tensor.shape) for name, tensor in found.tensors.items()},
        beside=found.beside,
        without_values=lost,
        faults=(
            *faults,
            *dcp_checks.structure_faults(found, pieces, problems),
            *zero_checks.frozen_not_saved(found.folder, lost),
        ),
        found=found,
        pieces=pieces,
        stamps=stamps(found),
        facts={"format": "torch distributed checkpoint", "tag": part, "save_id": found.save_id},
    )
