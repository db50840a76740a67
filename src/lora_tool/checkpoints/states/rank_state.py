"""The training state in one file for each rank: verl's, accelerate's without DCP, and a whole one in one file."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Hashable, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from lora_tool.checkpoints import ShardedDir
from lora_tool.checkpoints.folders import read_folder
from lora_tool.checkpoints.fsdp import FSDP_FULL, FULL_FILE, RANK_FILE
from lora_tool.checkpoints.state_file import STATE_FILE
from lora_tool.checkpoints.states.dcp_state import flat_shapes
from lora_tool.checkpoints.states.file_facts import FileFacts, NumberedFiles, SavedTags
from lora_tool.checkpoints.states.state import TrainingState, base_layers_left_out, size_near
from lora_tool.checkpoints.states.tags import choose_model, choose_tag, is_critic
from lora_tool.checkpoints.verl import MODEL_FILE, pointer_of, ranks_of
from lora_tool.core.display import counted
from lora_tool.core.tensors import DType, Span, StoredTensor, TensorTable
from lora_tool.formats.distributed_tensors import DistributedTensor
from lora_tool.formats.partitions import Role, StateEntry
from lora_tool.formats.rank_files import RankFolder, assemble_ranks, gap_in, read_rank_files
from lora_tool.formats.torch_zip import Record


class RankState(TrainingState, frozen=True, kw_only=True):
    """The state of a module in one file for each rank."""

    found: RankFolder
    ranks: int
    """How many processes saved."""
    there: frozenset[int]
    """Those whose files exist, readable or not."""
    alone: bool = False
    """Whether the one file should hold everything."""
    extra: tuple[tuple[Path, int], ...] = ()
    """Files of another run in the folder, each with its number of ranks."""

    def numbered_files(self) -> Iterator[NumberedFiles]:
        """See `TrainingState`; under HSDP other ranks may hold all that a missing file held."""
        if not self.alone:
            found = self.found
            spare = bool(found.files) and not self._is_flat and not self._gaps
            yield NumberedFiles(folder=found.folder, numbers=range(self.ranks), there=self.there, spare=spare)

    def ungathered_files(self) -> Iterator[tuple[Path, int, int]]:
        """See `TrainingState`."""
        if self._is_ungathered:
            for file in self.found.files.values():
                yield file.path, file.saved_by or 0, self.ranks

    def files(self) -> Iterator[FileFacts]:
        """See `TrainingState`; only names of a file that should hold everything."""
        for rank, file in self.found.files.items():
            shapes = tuple((name, tensor.shape) for name, tensor in sorted(file.tensors.items()))
            yield FileFacts(
                path=file.path,
                archive=None if self.alone else file.file.root,
                rank=None if self.alone else rank,
                saved_by=None if self.alone else file.saved_by,
                all_ranks=self.ranks,
                names=tuple(file.tensors),
                shapes=None if self._is_flat else shapes,
            )
        for path, ranks in self.extra:
            yield FileFacts(path=path, ranks=ranks, all_ranks=self.ranks, is_extra=True)

    def contents(self) -> Iterator[tuple[Path, Hashable]]:
        """See `TrainingState`; where nothing is cut, all ranks may hold the whole."""
        for file in self.found.files.values():
            is_cut = any(isinstance(tensor, DistributedTensor) for tensor in file.tensors.values())
            if is_cut and any(record.nbytes for record in file.file.records.values()):
                records = tuple((key, record.crc) for key, record in file.file.records.items())
                yield file.path, (file.file.serialization_id, file.saved_by, records)

    def types(self) -> Iterator[tuple[str, Mapping[Path, DType]]]:
        """See `TrainingState`."""
        for name, tensor in self.found.tensors.items():
            yield name, {part.holder.path: part.local.dtype for part in tensor.parts}

    def unequal_replicas(self) -> Iterator[tuple[str, Path, Path]]:
        """See `TrainingState`; a plain buffer is each rank's own."""
        for name, tensor in self.found.tensors.items():
            held = (replica.holder.tensors[name] for _, replica in tensor.replicas)
            if ".lora_" in name or any(isinstance(each, DistributedTensor) for each in held):
                for first, other in tensor.replicas:
                    if first.crc() != other.crc():
                        yield name, first.holder.path, other.holder.path

    def gaps(self) -> Iterator[tuple[Path, str, str]]:
        """See `TrainingState`."""
        if self.lists_all_names and not self._is_ungathered:
            for name, gap in self._gaps.items():
                yield self.found.folder, name, gap

    @property
    def lists_all_names(self) -> bool:
        """Whether no rank's file is missing or broken."""
        return not self.broken and (self.alone or self.there.issuperset(range(self.ranks)))

    @property
    def _gaps(self) -> dict[str, str]:
        """The tensors that are not whole, each with its gap."""
        return {name: gap for name, tensor in self.found.tensors.items() if (gap := gap_in(tensor))}

    @property
    def _is_flat(self) -> bool:
        """Whether the files hold slices of tensors' elements, whose shapes they do not know."""
        return any(tensor.flat for tensor in self.found.tensors.values())

    @property
    def _is_ungathered(self) -> bool:
        return self.alone and self.ranks > 1 and bool(self._gaps)

    def assemble(self, wanted: Container[str]) -> dict[str, StoredTensor]:
        """See `assemble_ranks`."""
        return assemble_ranks(self.found, wanted)

    def records(self, tensors: TensorTable) -> frozenset[Record | Span]:
        """Return the archive members that hold the tensors."""
        held = (part for name in tensors for part in self.found.tensors[name].parts)
        return frozenset(part.holder.file.record(part.local) for part in held)


def verl_state(checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> TrainingState:
    """Return the state of one module of verl: the actor of the step that the run points at, or of `tag`."""
    pointer = pointer_of(checkpoint.folder)
    name = choose_tag(checkpoint, tag, or_newest=or_newest, pointer=pointer, called="steps")
    folder = _inside(checkpoint, name)
    matches = {file: match for file in checkpoint.rank_files[name] if (match := MODEL_FILE.match(file))}
    sizes = Counter(int(match["ranks"]) for match in matches.values())
    ranks = ranks_of(read_folder(folder)) or sizes.most_common(1)[0][0]
    paths = {int(match["rank"]): folder / file for file, match in matches.items() if int(match["ranks"]) == ranks}
    extra = tuple(
        (folder / file, int(match["ranks"])) for file, match in matches.items() if int(match["ranks"]) != ranks
    )
    steps = tuple(tag for tag in checkpoint.rank_files if not is_critic(tag))
    saved = SavedTags(root=checkpoint.root, names=steps, latest=checkpoint.latest, pointer=pointer)
    title = f"verl checkpoint {folder}, {ranks} ranks"
    return replace(
        _state(checkpoint, name, paths, ranks=ranks, title=title), extra=extra, tags=saved if tag is None else None
    )


def torch_state(checkpoint: ShardedDir, *, tag: str | None = None) -> TrainingState:
    """Return the state in files of `torch.save` of one save: accelerate's, or any training program's one file.

    See `training_state`; `tag` is the wanted module of a program's file that holds several.
    """
    names, root = checkpoint.rank_files["."], checkpoint.root
    if checkpoint.kind is STATE_FILE:
        path, module = root / names[0], tag if tag != "." else None
        return _state(checkpoint, ".", {0: path}, title=f"training state {path}", alone=True, module=module)
    alone = checkpoint.kind is FSDP_FULL
    pattern = FULL_FILE if alone else RANK_FILE
    matches = [match for name in names if (match := pattern.match(name))]
    models = {f"pytorch_model_fsdp_{match['model'] or ''}".rstrip("_"): match["model"] for match in matches}
    model = models[choose_model(checkpoint, sorted(models), tag)]
    paths = {0 if alone else int(match["rank"]): root / match.string for match in matches if match["model"] == model}
    title = (
        f"FSDP full state dict {paths[0]}" if alone else f"FSDP checkpoint {root}, {counted(len(paths), 'rank file')}"
    )
    return _state(checkpoint, ".", paths, title=title, alone=alone)


def _state(
    checkpoint: ShardedDir,
    tag: str,
    paths: Mapping[int, Path],
    *,
    title: str,
    ranks: int | None = None,
    alone: bool = False,
    module: str | None = None,
) -> RankState:
    folder = _inside(checkpoint, tag)
    found = read_rank_files(folder, paths, module)
    flat = {name: math.prod(tensor.shape) for name, tensor in found.tensors.items() if tensor.flat}
    known = flat_shapes(flat, hidden=size_near("hidden_size", folder, folder.absolute().parent)) if flat else {}
    shaped = {name: replace(found.tensors[name], shape=shape) for name, shape in known.items()}
    found = replace(found, tensors={**found.tensors, **shaped})
    ranks = ranks or _ranks(found.ranks, files=max(paths) + 1)
    return RankState(
        root=checkpoint.root,
        folder=folder,
        title=title,
        entries={name: StateEntry(role=Role.SAVED, shape=tensor.shape) for name, tensor in found.tensors.items()},
        without_values=base_layers_left_out(found.tensors),
        shapeless=frozenset(flat.keys() - known.keys()),
        problems=found.problems,
        found=found,
        ranks=ranks,
        there=frozenset(paths),
        alone=alone,
        stamps={file.path: file.file.stamp for file in found.files.values()},
        facts={
            "format": str(checkpoint.kind),
            "tag": tag,
            "world_size": ranks,
            "serialization_ids": {file.path.name: file.file.serialization_id for file in found.files.values()},
        },
    )


def _ranks(sharing: int, *, files: int) -> int:
    """Return how many processes saved, where no file name has the number; `files` is one more than the highest rank.

    `sharing` is how many processes share a tensor. Under HSDP that is a part of them, and divides their number.
    """
    return files if not sharing or files % sharing == 0 else sharing


def _inside(checkpoint: ShardedDir, tag: str) -> Path:
    return checkpoint.root if tag == "." else checkpoint.root / tag
