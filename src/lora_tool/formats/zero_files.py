"""What one rank file of DeepSpeed says: the dictionaries in it, as frozen data. No tensor is read.

Sources: DeepSpeed 0.19.8 `runtime/engine.py` (`_save_checkpoint`, `_get_zero_param_shapes`),
`runtime/zero/stage_1_and_2.py` and `stage3.py` (`state_dict`), `runtime/bf16_optimizer.py`. The keys are the same since
0.9.1, except where a comment says otherwise.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core import keys
from lora_tool.core.errors import CorruptFile, Defect, Problem, UnsupportedCheckpoint
from lora_tool.core.tensors import MAX_BYTES, is_tensor_name
from lora_tool.formats.fields import is_number
from lora_tool.formats.files import require_inside
from lora_tool.formats.pickle_names import problems_of
from lora_tool.formats.pickle_objects import Stub, as_json
from lora_tool.formats.state_dicts import require_read
from lora_tool.formats.torch_objects import LazyTensor
from lora_tool.formats.torch_zip import TorchFile, read_scalar

if TYPE_CHECKING:
    from lora_tool.formats.torch_zip import TorchFile


_Value = TypeVar("_Value")
Default = TypeVar("Default")

_MAX_RANKS = 1_000_000
GATHER = "load it with the DeepSpeed that wrote it, and save the gathered model: engine.save_16bit_model(FOLDER)"
BY_ITS_PROGRAM = "load it with the program that trained it, and save the whole model from there"


class ZeroStage(enum.IntEnum):
    """Named after the values that the stage begins to divide among the ranks (`zero/config.py::ZeroStageEnum`)."""

    DISABLED = 0
    OPTIMIZER_STATES = 1
    GRADIENTS = 2
    WEIGHTS = 3


class ZeroFile(Struct, frozen=True, kw_only=True):
    """The facts about itself and the run that every rank file has."""

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


class ModelStates(ZeroFile, frozen=True, kw_only=True):
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

    @property
    def trained_shapes(self) -> dict[str, tuple[int, ...]]:
        """The trained parameters of all groups."""
        return {name: shape for group in self.param_shapes for name, shape in group.items()}


class OptimStates(ZeroFile, frozen=True, kw_only=True):
    """One `*_optim_states.pt`: this rank's part of the float32 masters."""

    groups: tuple[LazyTensor, ...]
    step: float | None
    """How many steps the optimizer took, where it counts them."""


def model_states(file: TorchFile, rank: int, before: ModelStates | None) -> ModelStates:
    """Return the content of a `*_model_states.pt`. `before` are another rank's states with the same content, if any.

    Raises `CorruptFile`, and `UnsupportedCheckpoint` for kinds of parallelism that lora-tool does not join.
    """
    if before is not None:
        return replace(before, file=replace(file, value=None), rank=rank)
    table = file.value
    _require_whole_parameters(file)
    if table.get("ds_autoep_layers"):
        message = "AutoEP replaced its mixtures of experts, and its names for the experts are not the model's"
        raise UnsupportedCheckpoint(f"{file.path}: {message}", hint=GATHER)
    if any(_get(table, "num_experts", list, [])):
        message = "the checkpoint was trained with DeepSpeed-MoE, whose experts lora-tool does not put together"
        raise UnsupportedCheckpoint(f"{file.path}: {message}", hint=BY_ITS_PROGRAM)
    shapes = table.get("param_shapes")
    groups = [shapes] if isinstance(shapes, dict) else [] if shapes is None else shapes
    if not isinstance(groups, list):
        raise _corrupt(file, "is not a list of dictionaries of shapes", "param_shapes")
    frozen = table.get("frozen_param_fragments")
    config = _get(table, "ds_config", dict, {})
    _require_one_group(file, config, _count_of_ranks(table.get("dp_world_size")))
    module = _tensors(file, table.get("module") or {}, "module")
    frozen_shapes = table.get("frozen_param_shapes")
    if frozen_shapes is not None:
        frozen_shapes = as_in(module, _shapes(file, frozen_shapes, "frozen_param_shapes"))
    buffers = as_in(module, {name: None for name in _get(table, "buffer_names", list, []) if isinstance(name, str)})
    trained = tuple(as_in(module, _shapes(file, group, "param_shapes")) for group in groups)
    stored = {*buffers, *(frozen_shapes or ()), *(name for group in trained for name in group)}
    return ModelStates(
        file=replace(file, value=None),
        rank=rank,
        stage=3 if file.path.name.startswith("zero_") else _configured_stage(config),
        module=module,
        buffer_names=frozenset(buffers),
        param_shapes=trained,
        frozen_shapes=frozen_shapes,
        frozen=None if frozen is None else as_in(module, _tensors(file, frozen, "frozen_param_fragments")),
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


def _require_whole_parameters(file: TorchFile) -> None:
    """Raise `UnsupportedCheckpoint` where pipeline or tensor parallelism divided the parameters."""
    # the key is there since 0.19.5
    degrees = _get(file.value, "checkpoint_parallel_dimensions", dict, {})
    if _get(degrees, "pp_degree", int, 1) > 1:
        message = f"pp_degree is {degrees['pp_degree']}: the checkpoint was trained with pipeline parallelism"
        raise UnsupportedCheckpoint(f"{file.path}: {message}", hint=BY_ITS_PROGRAM)
    degree = max(_get(file.value, "mp_world_size", int, 1), _get(degrees, "tp_degree", int, 1))
    if degree > 1:
        message = f"mp_world_size is {degree}: tensor parallelism, and lora-tool does not join its slices of parameters"
        raise UnsupportedCheckpoint(f"{file.path}: {message}", hint=BY_ITS_PROGRAM)


def _require_one_group(file: TorchFile, config: Mapping[str, Any], ranks: int | None) -> None:
    """Raise `UnsupportedCheckpoint` for MiCS, where groups of ranks have all parameters each; DeepSpeed has removed it."""
    size = _get(_get(config, "zero_optimization", dict, {}), "mics_shard_size", int, -1)
    if size > 0 and size != ranks:
        message = f"mics_shard_size is {size}: under MiCS every {size} ranks hold all parameters"
        raise UnsupportedCheckpoint(f"{file.path}: {message}, which lora-tool does not put together", hint=GATHER)


def _configured_stage(config: Mapping[str, Any]) -> int:
    stage = _get(_get(config, "zero_optimization", dict, {}), "stage", int, 0)
    return stage if stage in (1, 2) else 0  # stage 3 would be in the file's name


def optim_states(file: TorchFile, rank: int, _: OptimStates | None) -> OptimStates:
    """Return the content of a `*_optim_states.pt`. Raises `CorruptFile`."""
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
    return {name: value for name, value in table.items() if isinstance(require_read(file, name, value), LazyTensor)}


def as_in(module: Mapping[str, object], table: Mapping[str, _Value]) -> Mapping[str, _Value]:
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


def _get(table: Mapping[str, Any], key: str, kind: type[_Value], default: Default) -> _Value | Default:
    """Return the value under `key`, the default where it is of another type."""
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


# DeepSpeed's universal checkpoints: float32 masters with a folder for every parameter, next to the model's rank files.
#
# `ds_to_universal.py` makes ``TAG_universal/zero/PARAMETER/{fp32,exp_avg,exp_avg_sq,step}.pt`` of a tag's optimizer files
# and copies its model files (DeepSpeed 0.19.8, `checkpoint/ds_to_universal.py`). A master of stages 1 and 2 has its shape
# and lies in a dictionary as ``param``; one of stage 3 is flat, and only the model files have its shape.


FOLDER = "zero"
FILE = "fp32.pt"
_STEP = "step.pt"


class Master(Struct, frozen=True, kw_only=True):
    """One parameter's float32 values, and how many steps its optimizer took, which stage 3 does not write."""

    file: TorchFile
    tensor: LazyTensor
    step: float | None


def is_universal(folder: Path, names: Sequence[str]) -> bool:
    """Return whether the masters of the tag `folder`, which holds `names`, lie in folders of parameters."""
    return (
        FOLDER in names and (folder / FOLDER).is_dir() and not any(name.endswith("_optim_states.pt") for name in names)
    )


def read_masters(folder: Path, problems: list[Problem]) -> dict[str, Master]:
    """Return name → master of every parameter with a folder in the tag; unreadable files go into `problems`."""
    found = {}
    for path in sorted(_folders(folder / FOLDER, problems)):
        try:
            if (path / FILE).is_file():
                require_inside(folder, path / FILE)
                found[path.name] = _master(path, problems)
        except CorruptFile as error:
            problems.append(error.problem)
    return found


def _folders(zero: Path, problems: list[Problem]) -> Iterator[Path]:
    try:
        yield from (path for path in zero.iterdir() if path.is_dir())
    except OSError as error:
        message = f"cannot be listed: {error.strerror}"
        problems.append(Problem(defect=Defect.NOT_A_FILE, path=str(zero), message=message))


def _master(folder: Path, problems: list[Problem]) -> Master:
    from lora_tool.formats.torch_zip import read_torch_file  # not to judge an adapter

    file = read_torch_file(folder / FILE)
    problems += problems_of(file.path, file.unknown)
    tensor = file.value.get("param") if isinstance(file.value, dict) else file.value
    if not isinstance(tensor, LazyTensor) or not tensor.dtype.is_float:
        raise CorruptFile.of(file.path, Defect.BAD_HEADER, "holds no float tensor: not written by ds_to_universal.py")
    return Master(file=file, tensor=tensor, step=_step_of(folder / _STEP, problems))


def _step_of(path: Path, problems: list[Problem]) -> float | None:
    from lora_tool.formats.torch_zip import read_scalar, read_torch_file

    if not path.is_file():
        return None
    file = read_torch_file(path)
    problems += problems_of(path, file.unknown)
    if isinstance(file.value, LazyTensor):
        return read_scalar(file, file.value)
    return float(file.value) if type(file.value) in (int, float) else None
