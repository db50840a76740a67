"""Planning a consolidation: rank files → an adapter, a model or a bare state dict, as copies of byte spans."""

from __future__ import annotations

import enum
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from lora_tool.checkpoints import ADAPTER_WEIGHTS, VALUE_HEAD, ShardedDir, open_sharded
from lora_tool.checkpoints.folders import listed
from lora_tool.checkpoints.states.frozen_heads import has_lora
from lora_tool.checkpoints.states.state import TrainingState, wrapper_of
from lora_tool.checkpoints.states.training_state import training_state
from lora_tool.core import keys
from lora_tool.core.choices import Choice, codes
from lora_tool.core.display import counted
from lora_tool.core.errors import BrokenFile, Problem, UnsupportedCheckpoint
from lora_tool.core.progress import decided
from lora_tool.core.report import Severity
from lora_tool.core.report.findings import refuse_errors
from lora_tool.core.tensors import FLOAT_NAMES, DType, FileStamp, StoredTensor, TensorAction, TensorSpec, float_type
from lora_tool.formats import generation_config, model_config, tokenizer
from lora_tool.formats.files import is_folder, json_bytes, read_object, require_own_file
from lora_tool.formats.partitions import Role, StateEntry
from lora_tool.plans.consolidate.extract_adapter import Selection, select_adapter
from lora_tool.plans.consolidate.rebuilt_config import FoundConfig, adapter_config_of
from lora_tool.plans.core import sharding
from lora_tool.plans.core.ops import Precision, copied_as
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import InputRecord, Shard, SideFile, Step, copied_file
from lora_tool.rules.consolidating import check_of_values, judge_adapter, judge_files
from lora_tool.rules.training.sharded_subject import ShardedSubject

_OTHER_LORA = re.compile(r"\.(lora_[ab]|lora_(up|down)|adapter\.linear_(in|out))(\.weight)?\Z")
"""Names of LoRA factors in other programs' modules: torchtitan's and torchtune's, kohya's."""
_FUSED = re.compile(r"(\A|\.)decoder\.layers\.(\d+\.)?(self_attention|mlp)\.(experts\.)*linear_(qkv|proj|fc[12])\.")
"""Names of modules that another program fuses: rows of q, k and v in one tensor, gate and up in another."""


@enum.unique
class What(Choice):
    """The values of `--what`."""

    AUTO = "auto"
    """An adapter where there are LoRA tensors, else a model."""
    ADAPTER = "adapter"
    MODEL = "model"
    STATE = "state"
    """The training module's own state dict, names as saved."""


def plan_consolidate(
    checkpoint: ShardedDir | str | os.PathLike[str],
    *,
    what: What | str = What.AUTO,
    tag: str | None = None,
    adapter_config: str | os.PathLike[str] | None = None,
    lora_alpha: float | None = None,
    dtype: DType | str | None = None,
    max_shard_bytes: int | None = None,
    ignore: Iterable[str] = (),
) -> Plan:
    """Return the plan that puts the tensors of `checkpoint`, a path or an opened one, together.

    Writes nothing and reads no values. `what` is "adapter", "model", "state", or "auto": an adapter if there are LoRA
    tensors, else a model. `tag` is the saved step, by default the one that the checkpoint points at. `adapter_config`
    is adapter_config.json, its folder, or the file of the run's arguments, by default the one near the checkpoint. If
    there is none, the config is rebuilt: rank and targets from the tensors, alpha from the run's files or `lora_alpha`.
    `dtype` None keeps the dtype of each tensor: float32 for trained ones, the model's for frozen ones.
    `max_shard_bytes` None cuts files at 5 GB. `ignore` are codes of rules, or their beginnings, whose errors do not
    refuse the checkpoint; they stay among the plan's findings. The execution of the plan checks every byte that it uses
    (CRC32, NaN, all-zero parts, rounding), unless `ignore` covers all of these checks. Raises `FindingsFound` for
    errors, as the execution does for errors in the values; `UnknownRule` for a code that no rule has;
    `UnsupportedCheckpoint` and `CheckpointError` for a checkpoint that cannot be consolidated.
    """
    ignored = _rules(codes(ignore))
    cast = None if dtype is None else float_type(dtype)
    if not isinstance(checkpoint, ShardedDir):
        checkpoint = open_sharded(checkpoint)
    state = training_state(checkpoint, tag=tag)
    lora = has_lora(state.entries)
    target = _target(What(what), lora=lora)
    subject = ShardedSubject(checkpoint=checkpoint, state=state, as_model=target is What.MODEL and not lora)
    of_checkpoint = refuse_errors(judge_files(subject), ignored)
    given = Path(adapter_config) if adapter_config else None
    found = _config_of(checkpoint, state, given, lora_alpha) if target is What.ADAPTER and lora else None
    selection = _choose(target, state, found, cast)
    chosen = replace(subject, chosen=tuple(selection.names.values()), chosen_heads=selection.heads)
    of_adapter = judge_adapter(chosen) if found else ()
    findings = (*of_checkpoint, *refuse_errors(of_adapter, ignored))
    _require_shapes(state, selection)
    tensors = state.assemble(frozenset((*selection.names.values(), *selection.beside.values())))
    values = check_of_values(state, tensors, ignored)
    shards = _shards(target, tuple(_steps(selection.names, tensors, state.entries, cast)), max_shard_bytes)
    head = tuple(_steps(selection.beside, tensors, state.entries, cast))
    side_files = (*selection.side_files, *sharding.index_files(shards))
    return Plan(
        shards=(*shards, Shard(filename=VALUE_HEAD, steps=head)) if head else shards,
        side_files=side_files,
        leftovers=tuple(
            InputRecord(path=state.folder, name=name, action=TensorAction.DROPPED, reason=reason)
            for name, reason in selection.leftovers
        ),
        inputs=_inputs(state, tensors.values(), side_files),
        precision=Precision.FLOAT32,
        findings=findings,
        warnings=selection.warnings,
        notes=(
            f"{target} from {state.title}",
            *(str(fault) for fault in findings if fault.severity < Severity.WARNING),
            *selection.notes,
            *([f"left in the checkpoint, beside the weights: {', '.join(state.beside[:8])}"] if state.beside else []),
        ),
        manifest={
            "operation": "consolidate",
            "what": target.value,
            "dtype": cast.value if cast else "as saved",
            "merged_adapters": [],
            "values_checked": values is not None,
            **({"adapter_config": dict(found.origins)} if found and found.origins else {}),
            "ignored": list(ignored),
            "inputs": {"checkpoint": {"path": str(state.root.resolve()), **state.facts}},
        },
        values=values,
    )


def _target(requested: What, *, lora: bool) -> What:
    """Return what to write: as requested, else an adapter if there is LoRA, else a model."""
    if requested is not What.AUTO:
        return requested
    found = What.ADAPTER if lora else What.MODEL
    decided(f"what: {found}, because there are {'' if lora else 'no '}LoRA tensors")
    return found


def _rules(requested: tuple[str, ...]) -> tuple[str, ...]:
    """Return the codes as reports write them. Raises `UnknownRule`."""
    if requested:
        import lora_tool.rules.judging  # noqa: F401 - it registers the rules, which only this needs
        from lora_tool.rules.engine.registry import expand

        expand(requested)
    return tuple(code.upper() for code in requested)


def _config_of(
    checkpoint: ShardedDir, state: TrainingState, given: Path | None, lora_alpha: float | None
) -> FoundConfig:
    """Return the adapter's config. Raises `FindingsFound` where `validate` finds it broken, or the files that would make
    one, and as `adapter_config_of`.
    """
    try:
        found = adapter_config_of(state, given=given, lora_alpha=lora_alpha)
    except BrokenFile as error:
        if given is None:
            _refuse_broken_config(checkpoint, (error.problem,))
        raise
    if given is None:
        _refuse_broken_config(checkpoint, found.config.problems)
    return found


def _refuse_broken_config(checkpoint: ShardedDir, problems: tuple[Problem, ...]) -> None:
    """Raise `FindingsFound` where `validate` calls one of the problems an error."""
    if problems:
        from lora_tool.rules.judging import broken_files  # slow to import, for few folders

        found = broken_files(checkpoint, problems)
        found.raise_at(Severity.ERROR, hint="give the config of this run: `adapter_config=FILE`")


def _choose(what: What, state: TrainingState, found: FoundConfig | None, dtype: DType | None) -> Selection:
    if what is What.ADAPTER and found is None:
        _refuse_foreign(state)
        raise UnsupportedCheckpoint(f"{state.folder} holds no LoRA tensors", hint='`what="model"`, or `what="state"`')
    if found is not None:
        selection = select_adapter(state, found)
        return replace(selection, side_files=(*selection.side_files, *tokenizer_files(state)))
    if not state.entries:
        raise UnsupportedCheckpoint(f"{state.folder} holds no tensors")
    dropped = tuple((name, f"tied to `{real}`, which is written") for name, real in state.shared.items())
    if what is What.STATE:
        return Selection(names={name: name for name in state.entries}, leftovers=dropped)
    _refuse_foreign(state)
    if has_lora(state.entries):
        raise UnsupportedCheckpoint(
            f"{state.folder} holds a PEFT model, which is not a plain model",
            hint='consolidate the adapter with `what="adapter"`, then merge it; `what="state"` writes every tensor',
        )
    files, warnings = model_files(state, dtype or _usual_dtype(state))
    return Selection(
        names=_plain_names(state.entries),
        leftovers=dropped,
        side_files=files,
        warnings=warnings,
    )


def _refuse_foreign(state: TrainingState) -> None:
    """Raise `UnsupportedCheckpoint` for LoRA or a model under the names of another program."""
    foreign = next(filter(_OTHER_LORA.search, state.entries), None)
    if foreign is not None:
        raise UnsupportedCheckpoint(
            f"{state.folder} holds LoRA under names that are not PEFT's (`{foreign}`), as torchtitan writes them: a model "
            "of these tensors would be the base with an unmerged adapter beside it",
            hint='merge and export it with the program that trained it; `what="state"` writes every tensor',
        )
    fused = next(filter(_FUSED.search, state.entries), None)
    if fused is not None:
        raise UnsupportedCheckpoint(
            f"{state.folder} is a model whose modules another program fused, under names that are not transformers' (`{fused}`)",
            hint='convert it with the program that trained it; `what="state"` writes every tensor',
        )


def _require_shapes(state: TrainingState, selection: Selection) -> None:
    """Raise `UnsupportedCheckpoint` if a requested tensor is a row of elements without a shape."""
    lost = sorted(state.shapeless.intersection((*selection.names.values(), *selection.beside.values())))
    if lost:
        more = f" and {len(lost) - 1} more are" if lost[1:] else " is"
        message = f"`{lost[0]}`{more} saved as {math.prod(state.entries[lost[0]].shape):,} elements without a shape"
        hint = f"put the model's {model_config.FILE_NAME} beside the rank files: a head's shape follows from its hidden size"
        if any((folder / model_config.FILE_NAME).is_file() for folder in state.near):
            hint = 'no file tells their shapes; an adapter may do without them: `what="adapter"`'
        raise UnsupportedCheckpoint(f"{state.folder}: {message}", hint=hint)


def _plain_names(entries: Mapping[str, StateEntry]) -> dict[str, str]:
    """Return transformers' name → saved name, without the parts that wrappers put into names or before all of them."""
    names = {keys.unwrapped(name): name for name in entries}
    if len(names) != len(entries):
        raise UnsupportedCheckpoint(
            "two tensors have the same name without their wrappers", hint='`what="state"` writes both'
        )
    while names and all(name.startswith("module.") for name in names):
        names = {name.removeprefix("module."): saved for name, saved in names.items()}
    wrapper = wrapper_of(names)
    return {name.removeprefix(wrapper): saved for name, saved in names.items()}


def _usual_dtype(state: TrainingState) -> DType:
    """Return the type of the module's first float tensor of the commonest sort: masters are float32."""
    if any(entry.role is Role.TRAINED for entry in state.entries.values()):
        return DType.F32
    found = Counter(tensor.dtype for tensor in state.assemble(state.entries).values() if tensor.dtype.is_float)
    return found.most_common(1)[0][0] if found else DType.F32


def _steps(
    names: Mapping[str, str],
    tensors: Mapping[str, StoredTensor],
    entries: Mapping[str, StateEntry],
    dtype: DType | None,
) -> Iterator[Step]:
    for name, saved in names.items():
        tensor = tensors[saved]
        out = TensorSpec(
            name=name, dtype=dtype if dtype and tensor.dtype.is_float else tensor.dtype, shape=tensor.shape
        )
        reason = _reason(entries[saved].role, tensor)
        if name != saved:
            reason += f", saved as {saved}"
        op = copied_as(out.dtype, tensor)
        action = TensorAction.COPIED if op.is_copy else TensorAction.CAST
        cast = "" if op.is_copy else f", {tensor.dtype} to {out.dtype}"
        yield Step(out=out, op=op, action=action, reason=f"{reason}{cast}")


def _reason(role: Role, tensor: StoredTensor) -> str:
    pieces = counted(len(tensor.places), "piece")
    what = "float32 master weights" if role is Role.TRAINED and tensor.dtype is DType.F32 else f"{role}, {tensor.dtype}"
    return f"{what} from {pieces}"


def _shards(what: What, steps: tuple[Step, ...], max_shard_bytes: int | None) -> tuple[Shard, ...]:
    if what is What.ADAPTER:
        return (Shard(filename=ADAPTER_WEIGHTS, steps=steps),)
    return sharding.lay_out(steps, homes={}, max_shard_bytes=max_shard_bytes or sharding.DEFAULT_MAX_SHARD_BYTES)


def _inputs(
    state: TrainingState, tensors: Iterable[StoredTensor], side_files: Iterable[SideFile]
) -> tuple[FileStamp, ...]:
    used = Counter(place.path for tensor in tensors for place in tensor.places)
    copied = [FileStamp.of(file.source) for file in side_files if file.source is not None]
    return (*(state.stamps[path] for path in used), *copied)


def model_files(state: TrainingState, dtype: DType) -> tuple[tuple[SideFile, ...], tuple[str, ...]]:
    """Return a model's files near the checkpoint, the config with the `dtype` that is written; and warnings, where none is near.

    Raises `BrokenFile` for a config that cannot be read, and as `tokenizer_files`.
    """
    path = _find(state, model_config.FILE_NAME)
    tokenizers = tuple(tokenizer_files(state))
    if path is None:
        places = ", ".join(map(str, state.near))
        return tokenizers, (f"no config.json in {places}: the folder needs one before transformers can load it",)
    require_own_file(path.parent, path)
    raw = read_object(path)
    # transformers 4 wrote `torch_dtype`, 5 writes `dtype` and reads both
    raw["torch_dtype" if "torch_dtype" in raw else "dtype"] = FLOAT_NAMES[dtype]
    reason = f"that of {path.parent}, with the dtype of the written weights"
    config = SideFile(filename=model_config.FILE_NAME, content=json_bytes(raw, indent=2, sort_keys=True), reason=reason)
    generation = _find(state, generation_config.FILE_NAME)
    copied = [copied_file(generation.parent, generation.name, generation.parent)] if generation else []
    return (config, *copied, *tokenizers), ()


def tokenizer_files(state: TrainingState) -> Iterator[SideFile]:
    """Yield the tokenizer's files of the nearest folder that has some, and its named chat templates.

    Raises `CorruptFile` for one that is not a regular file inside its folder.
    """
    for folder in state.near:
        names = [name for name in sorted(tokenizer.FILE_NAMES) if _is_there(folder, name)]
        if names:
            names += tokenizer.templates_among(listed(folder / tokenizer.TEMPLATES))
            yield from (copied_file(folder, name, folder) for name in names)
            return


def _find(state: TrainingState, name: str) -> Path | None:
    return next((folder / name for folder in state.near if _is_there(folder, name)), None)


def _is_there(folder: Path, name: str) -> bool:
    """Return whether the folder has the file, also where it is a link that leads nowhere: it is named, not left out."""
    return os.path.lexists(folder / name) and not is_folder(folder / name)
