"""DeepSpeed's ZeRO checkpoints: which files a tag has, and what the dictionaries in them say. No tensor is read.

Sources: DeepSpeed 0.19.8 `runtime/engine.py` (`_get_zero_ckpt_name`, `_save_checkpoint`, `_get_zero_param_shapes`),
`runtime/zero/stage_1_and_2.py` and `stage3.py` (`state_dict`), `runtime/bf16_optimizer.py`, `utils/zero_to_fp32.py`.
The keys are the same since 0.9.1, except where a comment says otherwise.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from lora_tool import keys
from lora_tool.errors import CorruptFile, Defect, NotACheckpoint, Problem, UnsupportedCheckpoint
from lora_tool.formats.fields import is_number
from lora_tool.formats.files import require_inside
from lora_tool.formats.pickle_objects import Stub, as_json
from lora_tool.formats.torch_objects import LazyTensor
from lora_tool.formats.torch_zip import PickleMemory, TorchFile, read_scalar, read_torch_file
from lora_tool.formats.universal import FOLDER, Master, is_universal, read_masters
from lora_tool.tensors import MAX_BYTES, is_tensor_name

States = TypeVar("States")
Value = TypeVar("Value")
Default = TypeVar("Default")

_RANK = r"zero_pp_rank_(?P<rank>0|[1-9]\d{0,5})_"
_OPTIM = re.compile(rf"(?P<prefix>bf16_|fp16_)?{_RANK}mp_rank_(?P<mp>\d{{2,}})_optim_states\.pt\Z")
_MODEL = re.compile(rf"(?:{_RANK})?mp_rank_(?P<mp>\d{{2,}})_model_states\.pt\Z")
_MAX_RANKS = 1_000_000
_USE_DEEPSPEED = "convert it with DeepSpeed's ds_to_universal.py: lora-tool reads universal checkpoints"
_NOT_UNIVERSAL = "move the folder or the optimizer files away: they belong to two checkpoints"
_REFUSED = (
    (r"zero\Z", "has the folder of a universal one (ds_to_universal.py) beside optimizer files", _NOT_UNIVERSAL),
    (r"layer_\d+_expert_\d+_|expp_rank_", "holds the experts of a mixture (MoE) in files of their own", _USE_DEEPSPEED),
    (r"layer_\d+-model_", "was trained with pipeline parallelism: every layer has its own files", _USE_DEEPSPEED),
    (r"offloaded_tensors\Z", "keeps optimizer state in NVMe swap files", _USE_DEEPSPEED),
    (r".*mp_rank_0*[1-9]\d*_(model|optim)_states\.pt\Z", "was trained with tensor parallelism", _USE_DEEPSPEED),
)
"""Pattern of a file's name, what the checkpoint is in words, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFile:
    """What every rank file says of itself and of the run."""

    file: TorchFile
    """Without the object that it holds, which may be of any class."""
    rank: int
    stage: int
    """The ZeRO stage, by the file's name and content."""
    world_size: int | None
    """How many ranks shared the parameters."""
    config: str
    """DeepSpeed's, as JSON."""

    @property
    def path(self) -> Path:
        return self.file.path


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStates(RankFile):
    """One `*_model_states.pt`: the names and shapes of everything, and the tensors that are not optimized."""

    module: Mapping[str, LazyTensor]
    """Stage 1 and 2: the weights in the model's type. Stage 3: placeholders of shape [0], and real buffers."""
    buffer_names: frozenset[str]
    param_shapes: tuple[Mapping[str, tuple[int, ...]], ...]
    """Trained parameters in the order in which they lie in each flat group."""
    frozen_shapes: Mapping[str, tuple[int, ...]] | None
    frozen: Mapping[str, LazyTensor] | None
    """Stage 2: whole tensors. Stage 3: this rank's flat piece of each."""
    shared: Mapping[str, str]
    """Tied parameters: other name → the name it is stored under. Filled on rank 0 only."""
    global_steps: int | None
    version: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStates(RankFile):
    """One `*_optim_states.pt`: this rank's part of the float32 masters."""

    groups: tuple[LazyTensor, ...]
    step: float | None
    """How many steps the optimizer took, where it counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroTag:
    """One saved step: the rank files by rank. Files that cannot be read are in `problems` and in no mapping."""

    folder: Path
    name: str
    stage: int
    """The ZeRO stage; 0 where nothing says that there was ZeRO (the weights are then whole in `module`)."""
    world_size: int
    """How many ranks the masters were cut into, as most files say; else how many files there are."""
    model: Mapping[int, ModelStates]
    optim: Mapping[int, OptimStates]
    model_files: Mapping[int, str]
    """Rank → name of its model file, the unreadable ones too."""
    optim_files: Mapping[int, str]
    masters: Mapping[str, Master] | None = None
    """The trained parameters of a universal checkpoint, which has no optimizer files; None of any other."""
    problems: tuple[Problem, ...] = ()

    @property
    def files(self) -> tuple[RankFile, ...]:
        """The files that can be read."""
        return (*self.model.values(), *self.optim.values())

    @property
    def first(self) -> ModelStates | None:
        """The model file of the lowest rank, whose names count; None where none can be read."""
        return self.model[min(self.model)] if self.model else None


def read_tag(folder: Path, name: str) -> ZeroTag:
    """Return the structure of the rank files in `folder`, the tag `name`.

    What cannot be read is in `problems`. Raises `UnsupportedCheckpoint` for layouts that are refused by name, and
    `NotACheckpoint` where there are no rank files.
    """
    names = sorted(entry.name for entry in folder.iterdir())
    universal = is_universal(folder, names)
    _require_supported(folder, [name for name in names if name != FOLDER] if universal else names)
    # stages 1 and 2 write one model file, and no rank in its name
    model = [(int(match["rank"] or 0), match[0]) for match in map(_MODEL.match, names) if match]
    optim = [(int(match["rank"]), match[0]) for match in map(_OPTIM.match, names) if match]
    if not model and not optim:
        raise NotACheckpoint(f"{folder} holds no DeepSpeed rank files")
    problems: list[Problem] = []
    models = _read_files(folder, model, _model_states, problems)
    optims = _read_files(folder, optim, _optim_states, problems)
    first = models[min(models)] if models else None
    stage = next((states.stage for states in optims.values()), first.stage if first else 0)
    masters = _as_in(first.module if first else {}, read_masters(folder, problems)) if universal else None
    stage = stage if masters is None else max(stage, 1)
    ranks = max(rank for rank, _ in (*model, *optim)) + 1
    counts = Counter(states.world_size for states in optims.values() if states.world_size)
    stated = first.world_size if first and stage else None
    return ZeroTag(
        folder=folder,
        name=name,
        stage=stage,
        world_size=counts.most_common(1)[0][0] if counts else max(stated or 1, ranks),
        model=models,
        optim=optims,
        model_files=dict(model),
        optim_files=dict(optim),
        masters=masters,
        problems=tuple(problems),
    )


def _require_supported(folder: Path, names: Sequence[str]) -> None:
    for name in names:
        for pattern, what, hint in _REFUSED:
            if re.match(pattern, name):
                raise UnsupportedCheckpoint(f"{folder / name}: the checkpoint {what}", hint=hint)
    models, optims = ([match for match in map(pattern.match, names) if match] for pattern in (_MODEL, _OPTIM))
    prefixes = {match["prefix"] or "" for match in optims}
    held = None
    if len({match["rank"] is None for match in models}) > 1:
        held = f"`{models[0][0]}` and `{models[-1][0]}`: two runs, one with ZeRO-3 and one without,"
    elif len(prefixes) > 1:
        held = f"optimizer files of two sorts, with and without `{max(prefixes)}` in front: two runs"
    if held:
        message = f"{folder} holds {held} were saved into one folder"
        raise UnsupportedCheckpoint(
            message, hint="move the files of the other run away; their dates tell which those are"
        )


def _require_plain_data_parallel(file: TorchFile) -> None:
    # the key is there since 0.19.5
    parallel = file.value.get("checkpoint_parallel_dimensions")
    degrees = dict(parallel) if isinstance(parallel, dict) else {}
    degrees["mp_world_size"] = file.value.get("mp_world_size")
    for what, degree in degrees.items():
        if isinstance(degree, int) and degree > 1:
            message = (
                f"{what} is {degree}: lora-tool does not put tensor-parallel or pipeline-parallel checkpoints together"
            )
            raise UnsupportedCheckpoint(f"{file.path}: {message}", hint=_USE_DEEPSPEED)


def _read_files(
    folder: Path,
    files: Iterable[tuple[int, str]],
    interpret: Callable[[TorchFile, int, States | None], States],
    problems: list[Problem],
) -> dict[int, States]:
    """Return rank → what `interpret` makes of its file; what is wrong with those that cannot be read is in `problems`.

    It is also given the states of the rank before, where their files say the same.
    """
    found: dict[int, States] = {}
    memory, before, value = PickleMemory(), None, None
    for rank, name in files:
        path = folder / name
        try:
            require_inside(folder, path)
            file = read_torch_file(path, memory=memory)
            if not isinstance(file.value, dict):
                raise CorruptFile.of(path, Defect.BAD_HEADER, "does not hold a dictionary: not written by DeepSpeed")
            found[rank] = before = interpret(file, rank, before if file.value is value else None)
            value = file.value
        except CorruptFile as error:
            problems.append(error.problem)
    return found


def _model_states(file: TorchFile, rank: int, before: ModelStates | None) -> ModelStates:
    if before is not None:
        return replace(before, file=replace(file, value=None), rank=rank)
    table = file.value
    _require_plain_data_parallel(file)
    shapes = table.get("param_shapes")
    groups = [shapes] if isinstance(shapes, dict) else [] if shapes is None else shapes
    if not isinstance(groups, list):
        raise _corrupt(file, "is not a list of dictionaries of shapes", "param_shapes")
    frozen = table.get("frozen_param_fragments")
    config = _get(table, "ds_config", dict, {})
    module = _tensors(file, table.get("module") or {}, "module")
    frozen_shapes = table.get("frozen_param_shapes")
    if frozen_shapes is not None:
        frozen_shapes = _as_in(module, _shapes(file, frozen_shapes, "frozen_param_shapes"))
    buffers = _as_in(module, {name: None for name in _get(table, "buffer_names", list, []) if isinstance(name, str)})
    trained = tuple(_as_in(module, _shapes(file, group, "param_shapes")) for group in groups)
    stored = {*buffers, *(frozen_shapes or ()), *(name for group in trained for name in group)}
    return ModelStates(
        file=replace(file, value=None),
        rank=rank,
        stage=3 if file.path.name.startswith("zero_") else _configured_stage(config),
        module=module,
        buffer_names=frozenset(buffers),
        param_shapes=trained,
        frozen_shapes=frozen_shapes,
        frozen=None if frozen is None else _as_in(module, _tensors(file, frozen, "frozen_param_fragments")),
        shared={
            **_in_one_place(module, stored),
            **{
                _as_in_module(module, name): _as_in_module(module, real)
                for name, real in _shared(table.get("shared_params")).items()
            },
        },
        global_steps=_get(table, "global_steps", int, None),
        world_size=_count_of_ranks(table.get("dp_world_size")),
        version=_get(table, "ds_version", str, None),
        config=as_json(config),
    )


def _configured_stage(config: Mapping[str, Any]) -> int:
    stage = _get(_get(config, "zero_optimization", dict, {}), "stage", int, 0)
    return stage if stage in (1, 2) else 0  # stage 3 would be in the file's name


def _optim_states(file: TorchFile, rank: int, _: OptimStates | None) -> OptimStates:
    table = file.value.get("optimizer_state_dict")
    if not isinstance(table, dict):
        raise _corrupt(file, "has no `optimizer_state_dict`: not written by ZeRO")
    # BF16_Optimizer writes no zero_stage; its parts are cut as stage 1 cuts them
    groups = table.get("fp32_flat_groups")
    stage = 3 if groups is not None else min(max(_stage(table.get("zero_stage")), 1), 2)
    groups = table.get("single_partition_of_fp32_groups") if groups is None else groups
    if not isinstance(groups, list) or not all(isinstance(g, LazyTensor) and len(g.shape) == 1 for g in groups):
        raise _corrupt(file, "has no flat float32 groups, so it holds no masters")
    if not all(group.dtype.is_float for group in groups):
        raise _corrupt(file, f"holds masters of type {groups[0].dtype}, which are not weights")
    if any(_nonzero(padding) for padding in _get(table, "param_alignment_paddings", list, [])):
        raise _corrupt(file, "aligns single parameters (`parameter_alignment`), which lora-tool does not read")
    optimizer = table.get("optimizer_state_dict") or table.get("base_optimizer_state")
    return OptimStates(
        file=replace(file, value=None),
        rank=rank,
        stage=stage,
        groups=tuple(groups),
        world_size=_count_of_ranks(table.get("partition_count")),
        step=_step(file, optimizer),
        config=as_json(_get(file.value, "ds_config", dict, {})),
    )


def _tensors(file: TorchFile, table: object, key: str) -> dict[str, LazyTensor]:
    if not isinstance(table, dict) or not all(isinstance(name, str) and is_tensor_name(name) for name in table):
        raise _corrupt(file, "is not a dictionary of names", key)
    # `_extra_state` entries may be anything; only tensors are weights
    return {name: value for name, value in table.items() if isinstance(value, LazyTensor)}


def _as_in(module: Mapping[str, object], table: Mapping[str, Value]) -> Mapping[str, Value]:
    """Return the table with the names that its tensors have in `module`."""
    if all(map(module.__contains__, table)):
        return table
    found = {_as_in_module(module, name): value for name, value in table.items()}
    return found if len(found) == len(table) else table


def _as_in_module(module: Mapping[str, object], name: str) -> str:
    """Activation checkpointing takes its wrapper out of the names of a state dict; DeepSpeed's other tables have it."""
    plain = name if name in module else keys.unwrapped(name)
    return plain if plain in module else name


def _in_one_place(module: Mapping[str, LazyTensor], stored: Container[str]) -> dict[str, str]:
    """Return other name → the name that is in `stored`, or the first, of parameters that are one tensor.

    `shared_params` has not those of a module that has two names itself, as T5's embedding had.
    """
    names_of: dict[LazyTensor, list[str]] = {}
    for name, tensor in module.items():
        names_of.setdefault(tensor, []).append(name)
    tied: dict[str, str] = {}
    for tensor, names in names_of.items():
        real = [name for name in names if name in stored]
        # placeholders prove it only as long as each parameter has its own
        if len(real) < len(names) > 1 and (len(real) == 1 or 0 not in tensor.shape):
            kept = (real or names)[0]
            tied |= {name: kept for name in names if name != kept and name not in stored}
    return tied


def _shapes(file: TorchFile, table: object, key: str) -> dict[str, tuple[int, ...]]:
    if not isinstance(table, dict):
        raise _corrupt(file, "is not a dictionary of shapes", key)
    for name, shape in table.items():
        if not isinstance(name, str) or not is_tensor_name(name):
            raise _corrupt(file, f"has the key {name!r:.80}, which is not a tensor's name", key)
        if not isinstance(shape, tuple) or any(type(n) is not int or n < 0 for n in shape):
            raise _corrupt(file, f"gives `{name:.80}` no shape: tensor parallel?", key)
        if math.prod(max(n, 1) for n in shape) > MAX_BYTES:
            raise _corrupt(file, f"gives `{name}` the shape {shape!r:.60}, larger than any file", key)
    return table


def _shared(table: object) -> dict[str, str]:
    # 0.9.0 wrote a list of pairs, 0.9.2 and later a dictionary
    pairs: Iterable[Any] = table.items() if isinstance(table, dict) else table if isinstance(table, list) else ()
    return {
        pair[0]: pair[1]
        for pair in pairs
        if isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(name, str) for name in pair)  # noqa: PLR2004
    }


def _get(table: Mapping[str, Any], key: str, kind: type[Value], default: Default) -> Value | Default:
    """Return what the pickle has under `key`, the default where that is of another type."""
    value = table.get(key)
    return value if type(value) is kind else default


def _corrupt(file: TorchFile, message: str, key: str | None = None) -> CorruptFile:
    return CorruptFile.of(file.path, Defect.BAD_HEADER, message, key)


def _stage(value: object) -> int:
    """ZeroStageEnum is an enumeration of integers: the pickle calls it with its value."""
    number = value.args[0] if isinstance(value, Stub) and value.args else value
    return number if type(number) is int else 1


def _nonzero(padding: object) -> bool:
    return any(map(_nonzero, padding)) if isinstance(padding, list) else bool(padding)


def _count_of_ranks(value: object) -> int | None:
    """Stage 3 writes one number, stages 1 and 2 one for each group."""
    counts = value if isinstance(value, list) else [value]
    return max((count for count in counts if type(count) is int and 0 < count < _MAX_RANKS), default=None)


def _step(file: TorchFile, optimizer: object) -> float | None:
    """Torch's Adam counts in the state of each parameter, some fused ones in the parameter groups."""
    parts = optimizer if isinstance(optimizer, list) else [optimizer]
    for part in parts:
        if not isinstance(part, dict):
            continue
        for entry in (*_get(part, "state", dict, {}).values(), *_get(part, "param_groups", list, [])):
            step = entry.get("step") if isinstance(entry, dict) else None
            if isinstance(step, LazyTensor):
                return read_scalar(file, step)
            if is_number(step):
                return float(step)
    return None
