"""Planning a consolidation: rank files → an adapter, a model or a bare state dict, as copies of byte spans."""

from __future__ import annotations

import enum
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from lora_tool.checkpoints import ADAPTER_WEIGHTS, VALUE_HEAD, ShardedDir
from lora_tool.checkpoints.folders import listed
from lora_tool.checkpoints.states.frozen_heads import has_lora
from lora_tool.checkpoints.states.state import TrainingState, wrapper_of
from lora_tool.checkpoints.states.training_state import training_state
from lora_tool.core import keys
from lora_tool.core.choices import Choice, above_zero, codes, number_of_bytes
from lora_tool.core.display import counted
from lora_tool.core.errors import BrokenFile, Problem, UnsupportedCheckpoint
from lora_tool.core.options import Options, Section, option
from lora_tool.core.progress import decided
from lora_tool.core.report import Severity
from lora_tool.core.report.model import refuse_errors
from lora_tool.core.tensors import FLOAT_NAMES, DType, FileStamp, StoredTensor, TensorAction, TensorSpec, float_type
from lora_tool.formats import generation_config, model_config, tokenizer
from lora_tool.formats.files import is_folder, json_bytes, read_object, require_own_file
from lora_tool.formats.partitions import Role, StateEntry
from lora_tool.plans.consolidate.extract_adapter import Selection, select_adapter
from lora_tool.plans.consolidate.rebuilt_config import FoundConfig, adapter_config_of
from lora_tool.plans.core.ops import Precision, copied_as
from lora_tool.plans.core.options import FLOAT_DTYPE, SHARD_SIZE
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import (
    DEFAULT_MAX_SHARD_BYTES,
    InputRecord,
    Shard,
    SideFile,
    Step,
    copied_file,
    index_files,
    lay_out,
)
from lora_tool.rules.consolidating import check_of_values, judge_adapter, judge_files
from lora_tool.rules.options import IgnoreOptions
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


@dataclass(frozen=True, kw_only=True)
class RankFileOptions(Options):
    """What rank files do not say themselves."""

    section = Section.INPUT

    tag: str | None = option(
        None,
        "Saved step to use, such as global_step500, or which module, if several were saved together, such as critic.  "
        "[default: the step in the file `latest`]",
    )
    adapter_config: str | os.PathLike[str] | None = option(
        None,
        "adapter_config.json, or the file with the run's arguments.  [default: beside the rank files]",
        metavar="PATH",
        existing=True,
    )
    lora_alpha: float | None = option(
        None,
        "lora_alpha of an adapter that has no adapter_config.json, if no file of the run records it.",
        parse=above_zero,
        metavar="N",
    )


_HASHED = 1 << 30
"""Bytes of rank files that are hashed: half a second of one core. Those of a whole model take as long as the writing."""


@dataclass(frozen=True, kw_only=True)
class StateOptions(IgnoreOptions, RankFileOptions):
    """The options of `plan_consolidate`: what is written. Raises `WrongValue` for a bad value."""

    what: What | str = option(
        What.AUTO,
        "auto: an adapter if there are LoRA tensors, else a model; state: all tensors under their saved names.",
        parse=What,
    )
    dtype: DType | str | None = option(None, "Data type of all weights.  [default: as saved]", **FLOAT_DTYPE)
    ignore: Iterable[str] = option((), "Continue despite these findings: LT404,LT41.", parse=codes)
    max_shard_size: int | str | None = option(None, "Maximum size of a weights file.  [default: 5GB]", **SHARD_SIZE)


def plan_consolidate(checkpoint: ShardedDir, options: StateOptions) -> Plan:
    """Return the plan that reassembles the tensors of `checkpoint`, from headers only.

    The execution of the plan checks every byte that it uses, unless `ignore` covers all of these checks. Raises
    `FindingsFound` for errors, as the execution does for errors in the values; `UnknownRule` for a code that no rule
    has; `UnsupportedCheckpoint` and `CheckpointError` for a checkpoint that cannot be consolidated.
    """
    ignored = _known_rules(tuple(options.ignore))
    dtype = None if options.dtype is None else float_type(options.dtype)
    state = training_state(checkpoint, tag=options.tag)
    lora = has_lora(state.entries)
    target = _target(What(options.what), lora=lora)
    subject = ShardedSubject(checkpoint=checkpoint, state=state, as_model=target is What.MODEL and not lora)
    findings = refuse_errors(judge_files(subject), ignored)
    selection = _selected(target, subject, options, dtype)
    if selection.heads is not None:
        chosen = replace(subject, chosen=tuple(selection.names.values()), chosen_heads=selection.heads)
        findings = (*findings, *refuse_errors(judge_adapter(chosen), ignored))
    _require_shapes(state, selection)
    tensors = state.assemble(frozenset((*selection.names.values(), *selection.value_head.values())))
    values = check_of_values(state, tensors, ignored)
    steps = _steps(state, tensors, dtype, selection.names)
    if target is What.ADAPTER:
        shards: tuple[Shard, ...] = (Shard(filename=ADAPTER_WEIGHTS, steps=steps),)
    else:
        given = options.max_shard_size
        most = DEFAULT_MAX_SHARD_BYTES if given is None else number_of_bytes(given)
        shards = lay_out(steps, homes={}, max_shard_bytes=most)
    head = _steps(state, tensors, dtype, selection.value_head)
    side_files = (*selection.side_files, *index_files(shards))
    stamps = _used(state, tensors.values())
    return Plan(
        shards=(*shards, Shard(filename=VALUE_HEAD, steps=head)) if head else shards,
        side_files=side_files,
        leftovers=tuple(
            InputRecord(path=state.folder, name=name, action=TensorAction.DROPPED, reason=reason)
            for name, reason in selection.leftovers
        ),
        inputs=(*stamps, *(FileStamp.of(file.source) for file in side_files if file.source is not None)),
        hashed=tuple(stamp.path for stamp in stamps) if sum(stamp.size for stamp in stamps) <= _HASHED else (),
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
            "dtype": dtype.value if dtype else "as saved",
            "merged_adapters": [],
            "values_checked": values is not None,
            **({"adapter_config": dict(selection.origins)} if selection.origins else {}),
            "ignored": list(ignored),
            "inputs": {
                "checkpoint": {
                    "path": str(state.root.resolve()),
                    **state.facts,
                    "weights": [
                        {"name": os.path.relpath(stamp.path, state.root), "bytes": stamp.size, "sha256": None}
                        for stamp in stamps
                    ],
                }
            },
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


def _known_rules(requested: tuple[str, ...]) -> tuple[str, ...]:
    """Return the codes as reports write them. Raises `UnknownRule`."""
    if requested:
        import lora_tool.rules.judging  # noqa: F401 - it registers the rules, which only this needs
        from lora_tool.rules.engine.registry import expand

        expand(requested)
    return tuple(code.upper() for code in requested)


def _selected(target: What, subject: ShardedSubject, options: StateOptions, dtype: DType | None) -> Selection:
    """Return what is written of the state. Raises `UnsupportedCheckpoint`, and as `_config_of`."""
    state = subject.state
    lora = has_lora(state.entries)
    if target is What.ADAPTER and lora:
        selection = select_adapter(state, _config_of(subject.checkpoint, state, options))
        return replace(selection, side_files=(*selection.side_files, *tokenizer_files(state)))
    if target is What.ADAPTER:
        _refuse_foreign(state)
        raise UnsupportedCheckpoint(f"{state.folder} holds no LoRA tensors", hint='`what="model"`, or `what="state"`')
    if not state.entries:
        raise UnsupportedCheckpoint(f"{state.folder} holds no tensors")
    dropped = tuple((name, f"tied to `{real}`, which is written") for name, real in state.shared.items())
    if target is What.STATE:
        return Selection(names={name: name for name in state.entries}, leftovers=dropped)
    _refuse_foreign(state)
    if lora:
        raise UnsupportedCheckpoint(
            f"{state.folder} holds a PEFT model, which is not a plain model",
            hint='consolidate the adapter with `what="adapter"`, then merge it; `what="state"` writes every tensor',
        )
    files, warnings = model_files(state, dtype or _usual_dtype(state))
    return Selection(names=_plain_names(state.entries), leftovers=dropped, side_files=files, warnings=warnings)


def _config_of(checkpoint: ShardedDir, state: TrainingState, options: StateOptions) -> FoundConfig:
    """Return the adapter's config. Raises `FindingsFound` where `validate` finds the one near the checkpoint broken, or
    the files that would make one, and as `adapter_config_of`.
    """
    given = Path(options.adapter_config) if options.adapter_config else None
    try:
        found = adapter_config_of(state, given=given, lora_alpha=options.lora_alpha)
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
    lost = sorted(state.shapeless.intersection((*selection.names.values(), *selection.value_head.values())))
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
    state: TrainingState, tensors: Mapping[str, StoredTensor], dtype: DType | None, names: Mapping[str, str]
) -> tuple[Step, ...]:
    """Return the steps that write `tensors` of the training module by their `names` in the output, as `dtype`, if given."""
    steps = []
    for name, saved in names.items():
        tensor, role = tensors[saved], state.entries[saved].role
        written = dtype if dtype and tensor.dtype.is_float else tensor.dtype
        master = role is Role.TRAINED and tensor.dtype is DType.F32
        reason = "float32 master weights" if master else f"{role}, {tensor.dtype}"
        reason += f" from {counted(len(tensor.places), 'piece')}"
        if name != saved:
            reason += f", saved as {saved}"
        op = copied_as(written, tensor)
        if not op.is_copy:
            reason += f", {tensor.dtype} to {written}"
        out = TensorSpec(name=name, dtype=written, shape=tensor.shape)
        action = TensorAction.COPIED if op.is_copy else TensorAction.CAST
        steps.append(Step(out=out, op=op, action=action, reason=reason))
    return tuple(steps)


def _used(state: TrainingState, tensors: Iterable[StoredTensor]) -> tuple[FileStamp, ...]:
    return tuple(state.stamps[path] for path in Counter(place.path for tensor in tensors for place in tensor.places))


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
