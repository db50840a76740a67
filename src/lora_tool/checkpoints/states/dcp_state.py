"""The training state in a folder of torch distributed checkpoints, as FSDP and tensor parallelism write them."""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Container, Iterator
from operator import itemgetter
from pathlib import Path

from lora_tool.checkpoints import ShardedDir
from lora_tool.checkpoints.fsdp import STEP
from lora_tool.checkpoints.states.file_facts import AbsentFile, SavedTags
from lora_tool.checkpoints.states.state import TrainingState, base_layers_left_out
from lora_tool.core.errors import CorruptFile, NotACheckpoint, UnsupportedCheckpoint
from lora_tool.core.tensors import Span, StoredTensor, TensorTable
from lora_tool.formats.dcp import DcpFolder, Pieces, assemble_dcp, lost_metadata, read_dcp, stamps, uncovered
from lora_tool.formats.files import open_regular, read_at
from lora_tool.formats.partitions import Role, StateEntry
from lora_tool.formats.state_dicts import OTHER_KEYS
from lora_tool.formats.torch_zip import Record

_OTHER_FOLDER = re.compile(rf"(?:{'|'.join(sorted(OTHER_KEYS))})(?![a-z])")
"""Names of folders that hold no weights: `optimizer_0`, `optim`."""
_Content = tuple[str, int, int]
"""The name of a tensor, where a piece of it begins in its file, and the CRC32 of the piece."""


class DcpState(TrainingState, frozen=True, kw_only=True):
    """The state of a module in torch's distributed checkpoints."""

    found: DcpFolder
    others: tuple[Path, ...] = ()
    """Folders beside it that hold no weights, but what training goes on from."""

    def absent_files(self) -> Iterator[AbsentFile]:
        """See `TrainingState`."""
        folder = self.found.folder
        for name in self.found.missing:
            yield AbsentFile(folder / name, "and .metadata says that it holds weights")
        for name in lost_metadata(self.found):
            yield AbsentFile(folder / name, "so that nothing says what its rank saved")

    def copies(self) -> Iterator[tuple[Path, Path]]:
        """See `TrainingState`."""
        return copied_files(self.found.pieces)

    def gaps(self) -> Iterator[tuple[Path, str, str]]:
        """See `TrainingState`."""
        if not lost_metadata(self.found):
            for name, tensor in self.found.tensors.items():
                if gap := uncovered(tensor):
                    yield self.found.folder / self.found.metadata[0], name, gap

    def optimised(self) -> frozenset[str]:
        """See `TrainingState`; the optimizer may lie in a folder of its own."""
        names = set(self.found.optimised)
        for folder in self.others:
            with contextlib.suppress(CorruptFile, UnsupportedCheckpoint):
                names |= read_dcp(folder).optimised
        return frozenset(names)

    def assemble(self, wanted: Container[str]) -> dict[str, StoredTensor]:
        """See `assemble_dcp`."""
        return assemble_dcp(self.found, wanted)

    def records(self, tensors: TensorTable) -> frozenset[Record | Span]:
        """Return the archive members that hold the tensors."""
        return frozenset(piece.record for name in tensors for piece in self.found.pieces[name])


def dcp_state(checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> TrainingState:
    """Return the state of the module in a folder of torch distributed checkpoints; see `training_state`.

    `tag` is the sub-folder of the model, or, where only one may be it, the wanted one of several modules in there.
    Sub-folders that are not steps have no order, so that none is the newest.
    """
    # accelerate and the HF Trainer write pytorch_model_fsdp_0 and optimizer_0 side by side, others model and optim
    parts = [name for name in checkpoint.rank_files if not _OTHER_FOLDER.match(name)]
    if not parts:
        held = ", ".join(checkpoint.rank_files)
        raise NotACheckpoint(f"{checkpoint.root} holds no weights, but what training goes on from beside them: {held}")
    module = tag if len(parts) == 1 and tag not in checkpoint.rank_files else None
    if tag is not None and module is None:
        parts = [tag]
    several = () if tag or not all(map(STEP.match, parts)) else parts
    if several and or_newest:
        parts = parts[-1:]
    if len(parts) != 1 or parts[0] not in checkpoint.rank_files:
        listed = ", ".join(checkpoint.rank_files)
        raise NotACheckpoint(
            f"{checkpoint.root}: several folders may hold the model: {listed}", hint="choose: `tag=FOLDER`"
        )
    folder = checkpoint.root / parts[0] if parts[0] != "." else checkpoint.root
    try:
        found = read_dcp(folder, module)
    except CorruptFile as error:
        found = DcpFolder(folder=folder, tensors={}, problems=(error.problem,))
    return DcpState(
        root=checkpoint.root,
        folder=folder,
        title=f"FSDP checkpoint {folder}, {len(found.filenames)} files",
        entries={name: StateEntry(role=Role.SAVED, shape=tensor.shape) for name, tensor in found.tensors.items()},
        beside=found.beside,
        without_values=base_layers_left_out(found.tensors),
        problems=found.problems,
        tags=SavedTags(root=checkpoint.root, names=tuple(several), latest=None, pointer=None),
        found=found,
        others=tuple(checkpoint.root / name for name in checkpoint.rank_files if _OTHER_FOLDER.match(name)),
        stamps=stamps(found),
        facts={"format": "torch distributed checkpoint", "tag": parts[0], "save_id": found.save_id},
    )


def copied_files(pieces: Pieces) -> Iterator[tuple[Path, Path]]:
    """Yield files all of whose pieces another file has, too, at the same places, with that file; constants do not count.

    The other may have more of them: in files of one layout the first rank's has what was not cut, at its end. Files of
    safetensors say themselves where their pieces lie, and are not compared.
    """
    held: dict[Path, dict[_Content, StoredTensor]] = defaultdict(dict)
    having: dict[_Content, list[Path]] = defaultdict(list)
    for name, parts in pieces.items():
        for piece in parts:
            if not isinstance(piece.record, Record):
                continue
            content = name, piece.stored.spans[0].offset, piece.record.crc
            held[piece.record.path][content] = piece.stored
            having[content].append(piece.record.path)
    copies: set[Path] = set()
    for path, inside in sorted(held.items(), key=itemgetter(0), reverse=True):  # of two that are equal the later one
        # one piece that varies is nearly always enough: only copies have the same
        one = next((content for content, stored in inside.items() if _varies(stored)), None)
        for other in having[one] if one else ():
            lacking = (stored for content, stored in inside.items() if content not in held[other])
            if other != path and other not in copies and not any(map(_varies, lacking)):
                copies.add(path)
                yield path, other
                break


def _varies(tensor: StoredTensor) -> bool:
    """Return whether the first elements differ from each other."""
    (span,) = tensor.spans
    with open_regular(span.path) as fd:
        data = read_at(span.path, fd, span.offset, min(span.nbytes, 4096))
    size = tensor.dtype.bits // 8
    return data[size:] != data[:-size]
