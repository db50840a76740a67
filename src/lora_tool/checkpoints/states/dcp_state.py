"""The training state in a folder of torch distributed checkpoints, as FSDP and tensor parallelism write them."""

from __future__ import annotations

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from operator import itemgetter
from pathlib import Path

from lora_tool.checkpoints import ShardedDir
from lora_tool.checkpoints.folders import is_called_save
from lora_tool.checkpoints.states.file_facts import SavedTags
from lora_tool.checkpoints.states.frozen_heads import is_new_head
from lora_tool.checkpoints.states.state import TrainingState, base_layers_left_out, varies
from lora_tool.core import keys
from lora_tool.core.errors import CorruptFile, NotACheckpoint, UnsupportedCheckpoint
from lora_tool.core.keys import AdapterKey, Part
from lora_tool.core.tensors import Span, StoredTensor, TensorTable
from lora_tool.formats.dcp import DcpFolder, Pieces, assemble_dcp, lost_metadata, read_dcp, stamps, uncovered
from lora_tool.formats.partitions import Role, StateEntry
from lora_tool.formats.state_dicts import OTHER_KEYS
from lora_tool.formats.torch_zip import Record
from lora_tool.models.ends import is_end

_OTHER_FOLDER = re.compile(rf"(?:{'|'.join(sorted(OTHER_KEYS))})(?![a-z])")
"""Names of folders that hold no weights: `optimizer_0`, `optim`."""
_Content = tuple[str, int, int]
"""The name of a tensor, where a piece of it begins in its file, and the CRC32 of the piece."""


class DcpState(TrainingState, frozen=True, kw_only=True):
    """The state of a module in torch's distributed checkpoints."""

    found: DcpFolder
    others: tuple[Path, ...] = ()
    """Folders next to it with the optimizer's and other training state, but no weights."""

    def absent_files(self) -> Iterator[tuple[Path, str]]:
        """See `TrainingState`."""
        folder = self.found.folder
        for name in self.found.missing:
            yield folder / name, "and .metadata says that it holds weights"
        for name in lost_metadata(self.found):
            yield folder / name, "so that nothing says what its rank saved"

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
    several = () if tag or not all(map(is_called_save, parts)) else parts
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

    The other may have more of them: in files of one layout the first rank's also has, at its end, the tensors that are
    not cut.
    """
    held: dict[Path, dict[_Content, StoredTensor]] = defaultdict(dict)
    having: dict[_Content, list[Path]] = defaultdict(list)
    for name, parts in pieces.items():
        for piece in parts:
            content = name, piece.stored.spans[0].offset, piece.record.crc
            held[piece.record.path][content] = piece.stored
            having[content].append(piece.record.path)
    copies: set[Path] = set()
    for path, inside in sorted(held.items(), key=itemgetter(0), reverse=True):  # of two that are equal the later one
        # one piece that varies is nearly always enough: only copies have the same
        one = next((content for content, stored in inside.items() if varies(stored)), None)
        for other in having[one] if one else ():
            lacking = (stored for content, stored in inside.items() if content not in held[other])
            if other != path and other not in copies and not any(map(varies, lacking)):
                copies.add(path)
                yield path, other
                break


# The shapes of tensors whose files hold only their elements: FSDP1's local state dicts.


_Shape = tuple[int, ...]
_VECTOR = re.compile(r"(bias|norm\w*\.weight|layernorm\w*\.weight|ln_\w+\.weight)\Z", re.IGNORECASE)


def flat_shapes(numels: Mapping[str, int], *, hidden: int | None) -> dict[str, _Shape]:
    """Return the shapes of those tensors for which they are known, from how many elements each has.

    `hidden` is the model's hidden size, from which those of heads and embeddings saved whole follow. Where the base's
    weight is there as well, r is known, and every shape of the module with it; nothing is guessed.
    """
    parsed = {name: keys.parse(keys.unwrapped(name)) for name in numels}
    by_part: dict[tuple[str, Part, str | None], str] = {}
    for name, key in parsed.items():
        if key.leaf == "weight" or key.part in (Part.EMBEDDING_A, Part.EMBEDDING_B):
            by_part[key.module, key.part, key.adapter_name] = name
    shapes: dict[str, _Shape] = {}
    for name, key in parsed.items():
        if _is_vector(key):
            shapes[name] = (numels[name],)
        elif key.part in (Part.LORA_A, Part.EMBEDDING_A):
            other = Part.LORA_B if key.part is Part.LORA_A else Part.EMBEDDING_B
            below = by_part.get((key.module, other, key.adapter_name))
            base = by_part.get((key.module, Part.BASE_LAYER, None))
            if below is not None and base is not None:
                shapes |= _of_pair(name, below, base, numels)
        elif hidden and _is_wide(key) and numels[name] % hidden == 0:
            shapes[name] = (numels[name] // hidden, hidden)
    vectors = (name for name, key in parsed.items() if key.part is Part.MAGNITUDE)  # of matrices: one for each row
    return shapes | {
        name: (numels[name],) for name in vectors if _has_rows(parsed[name], numels[name], shapes, by_part)
    }


def _is_vector(key: AdapterKey) -> bool:
    if key.part is Part.LORA_B:
        return key.leaf == "bias"
    whole = key.part in (Part.PLAIN, Part.SAVED_MODULE, Part.BASE_LAYER)
    return whole and _VECTOR.search(f"{key.module}.{key.leaf}") is not None


def _has_rows(
    key: AdapterKey, rows: int, shapes: Mapping[str, _Shape], by_part: Mapping[tuple[str, Part, str | None], str]
) -> bool:
    """Return whether the lora_B that belongs to a magnitude is a matrix of so many rows."""
    below = by_part.get((key.module, Part.LORA_B, key.adapter_name))
    return below is not None and shapes.get(below, ())[:1] == (rows,)


def _is_wide(key: AdapterKey) -> bool:
    """Return whether it is a matrix with a column for each element of a hidden state: of a head, an embedding, or the
    tokens of one.
    """
    if key.part is Part.TOKENS_DELTA:
        return is_end(key.module)
    if key.part is not Part.SAVED_MODULE:
        return False
    return key.leaf is not None and key.leaf.endswith("weight") and (is_new_head(key.module) or is_end(key.module))


def _of_pair(above: str, below: str, base: str, numels: Mapping[str, int]) -> dict[str, _Shape]:
    """Return the shapes [r, in], [out, r] and [out, in], nothing where no whole r explains the numbers."""
    if not numels[base]:
        return {}
    square, rest = divmod(numels[above] * numels[below], numels[base])
    rank = math.isqrt(square)
    if rest or rank * rank != square or not rank or numels[above] % rank or numels[below] % rank:
        return {}
    inner, outer = numels[above] // rank, numels[below] // rank
    return {above: (rank, inner), below: (outer, rank), base: (outer, inner)}
