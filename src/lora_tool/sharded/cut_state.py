"""The training state in one safetensors file for each rank."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator

from lora_tool.architectures.ends import is_input
from lora_tool.checkpoint import ShardedDir
from lora_tool.checkpoint.cut_safetensors import CUT_FILE
from lora_tool.display import counted
from lora_tool.formats import model_config
from lora_tool.formats.cut_safetensors import CutModel, assemble_cut, read_cut_safetensors
from lora_tool.formats.partitions import Role, StateEntry
from lora_tool.report import Finding, Severity
from lora_tool.sharded.faults import (
    COPY,
    adapter_left_out,
    base_layers_left_out,
    fault,
    frozen_left_out,
    odd_ones_out,
    unreadable_files,
)
from lora_tool.sharded.model_sizes import size_near
from lora_tool.sharded.state import TrainingState
from lora_tool.sharded.tags import require_tag_here
from lora_tool.tensors import StoredTensor

_LAST_NORM = re.compile(r"(\A|\.)(norm|ln_f|final_layer_?norm)\.weight\Z")


class CutState(TrainingState, frozen=True, kw_only=True):
    """The state of a module in one safetensors file for each rank."""

    model: CutModel

    def assemble(self, wanted: Container[str]) -> dict[str, StoredTensor]:
        """See `assemble_cut`."""
        return assemble_cut(self.model, wanted)


def cut_state(checkpoint: ShardedDir, *, tag: str | None = None, or_newest: bool = False) -> TrainingState:  # noqa: ARG001 - one save only
    """Return the state in the files of all ranks; see `training_state`."""
    require_tag_here(checkpoint, tag)
    folder, names = checkpoint.root, checkpoint.rank_files["."]
    model = read_cut_safetensors(folder, names)
    lost = base_layers_left_out(model.parts)
    return CutState(
        root=folder,
        folder=folder,
        title=f"distributed safetensors checkpoint {folder}, {counted(len(names), 'file')}",
        entries={name: StateEntry(role=Role.SAVED, shape=model.shape(name)) for name in model.parts},
        without_values=lost,
        faults=(*_faults(checkpoint, model), *frozen_left_out(folder, lost)),
        model=model,
        stamps=model.stamps,
        facts={"format": str(checkpoint.kind), "tag": ".", "files": len(names)},
    )


def _faults(checkpoint: ShardedDir, model: CutModel) -> Iterator[Finding]:
    """Yield what is wrong with the files, no value read: LT401, LT402, LT405, LT407, LT408, LT416."""
    gaps = {name: gap for name in model.parts if (gap := model.gap(name))}
    numbers = {int(match["shard"]) for match in map(CUT_FILE.match, checkpoint.rank_files["."]) if match}
    lost = [number for number in range(1, max(numbers) + 1) if number not in numbers]
    if gaps and lost:
        one = f"shard {lost[0]} is" if len(lost) == 1 else f"shards {', '.join(map(str, lost[:5]))} are"
        yield fault("LT401", model.folder, f"{one} missing", hint=COPY)
    yield from unreadable_files(model.problems)
    for path, other in model.doubled:
        yield fault("LT405", path, f"has the same content as {other.name}, of another rank", hint=COPY)
    for name, parts in model.parts.items():
        types = {part.stored.path: part.stored.dtype for part in parts}
        for path, dtype, usual in odd_ones_out(types):
            hint = "a file from another run was mixed in: copy this run's again"
            yield fault("LT407", path, f"holds {dtype}, but the other files hold {usual}", subject=name, hint=hint)
    if model.problems:
        return
    if gaps and not lost:
        for name, gap in gaps.items():
            yield fault("LT408", model.folder, gap, subject=name, hint="copy the files again, or use another step")
    if not gaps:
        yield from _cut_short(model)
        yield from adapter_left_out(model.folder, model.parts)


def _cut_short(model: CutModel) -> Iterator[Finding]:
    """LT401: yield a finding if the last files are missing, which only the model's config can tell."""
    known = False
    for name in model.parts:
        shape = model.shape(name)
        module = name.removesuffix(".weight")
        size = "vocab_size" if is_input(module) else "hidden_size" if _LAST_NORM.search(name) else None
        want = size and size_near(size, model.folder)
        if want and shape:
            known = True
            if shape[0] < want:
                message = f"ends after {shape[0]:,} of {want:,} rows: the files of the last ranks are missing"
                yield fault("LT401", model.folder, message, subject=name, hint=COPY)
                return
    if not known:
        message = "does not say how many ranks saved it, so lora-tool cannot tell whether the last files are missing"
        hint = f"put the model's {model_config.FILE_NAME} beside the files, or compare with the base: lora-tool validate --base"
        yield fault("LT401", model.folder, message, hint=hint, severity=Severity.INFO)
