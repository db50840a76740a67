"""Which of the tensors in a training program's state are the module's, and their own names: the same in every format.

Programs put the module's state dict under a key, `model` say, beside those of the optimizer and the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lora_tool.display import some
from lora_tool.errors import CorruptFile, Defect, UnsupportedCheckpoint
from lora_tool.formats.distributed_tensors import DistributedTensor
from lora_tool.formats.pickle_objects import Known, Stub, name_of
from lora_tool.formats.torch_objects import LazyTensor, Storage
from lora_tool.formats.torch_zip import TorchFile
from lora_tool.tensors import is_tensor_name

Value = TypeVar("Value")

_TO_ONE_FILE = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIR FILE"
_MODEL_KEYS = frozenset({"model", "state_dict", "module"})
"""Keys under which training programs put the module's state dict, itself perhaps under others: ``app.model``."""
_OTHER_KEYS = frozenset({"optimizer", "optimizers", "optim", "lr_scheduler", "scheduler", "dataloader", "train_state"})
"""Keys of what is no weight, where torchtitan puts it beside the weights themselves."""
_OTHER_TENSORS = ("torch._utils._rebuild_", "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
_DEEPEST = 4
"""Keys above the module's names, at most."""

RankTensor = LazyTensor | DistributedTensor
"""A tensor as one rank saved it: whole, or what it had of it."""


def module_names(path: Path, paths: Mapping[str, tuple[Any, ...]]) -> dict[str, str]:
    """Return the checkpoint's name → the module's own, of the module's tensors alone; `paths` are the keys to each.

    Raises `UnsupportedCheckpoint`, which names `path`, where there are several modules.
    """
    weights = {fqn: keys for fqn, keys in paths.items() if _OTHER_KEYS.isdisjoint(keys[:-1][:_DEEPEST])}
    modules = {keys[:depth] for keys in weights.values() if (depth := _depth(keys))}
    if not modules and all(len(keys) > 1 for keys in weights.values()):
        modules = {keys[:1] for keys in weights.values()}
    if not modules:
        return {fqn: ".".join(map(str, keys)) for fqn, keys in weights.items()}
    shallowest = min(map(len, modules))
    found = sorted((module for module in modules if len(module) == shallowest), key=str)
    if len(found) > 1:
        listed = some([".".join(map(str, module)) for module in found])
        message = f"{path} holds the states of {len(found)} modules: {listed}"
        hint = f"save only the one that you want; to write all of them into one file: {_TO_ONE_FILE}"
        raise UnsupportedCheckpoint(message, hint=hint)
    inside = {fqn: keys[shallowest:] for fqn, keys in weights.items() if keys[:shallowest] == found[0]}
    return {fqn: ".".join(map(str, keys)) for fqn, keys in inside.items()}


def _depth(keys: tuple[Any, ...]) -> int:
    """Return how many keys lead to the state dict of a module, 0 where none says so. The last key is a tensor's."""
    return next((at + 1 for at, key in enumerate(keys[:-1][:_DEEPEST]) if type(key) is str and key in _MODEL_KEYS), 0)


def module_tensors(file: TorchFile) -> dict[str, RankTensor]:
    """Return the module's tensors in a file that `torch.save` wrote, by their own names, whatever dicts they lie in.

    Raises `CorruptFile` where it holds no dict or names that no tensor can have, and as `module_names`.
    """
    if not isinstance(file.value, dict):
        message = f"holds a {type(file.value).__name__}, expected a dict of tensors"
        raise CorruptFile.of(file.path, Defect.BAD_HEADER, message)
    found = {str(number): (keys, tensor) for number, (keys, tensor) in enumerate(_leaves(file.value, ()))}
    names = module_names(file.path, {number: keys for number, (keys, _) in found.items()})
    if len(set(names.values())) != len(names) or not all(map(is_tensor_name, names.values())):
        message = "gives two tensors the same name, or one tensor an invalid name"
        raise CorruptFile.of(file.path, Defect.BAD_HEADER, message)
    held = {name: found[number][1] for number, name in names.items()}
    return {name: require_read(file, name, value) for name, value in held.items()}


def require_read(file: TorchFile, name: str, value: Value) -> Value:
    """Return what is called `name` in the file. Raises `UnsupportedCheckpoint` where that is a tensor that is not read."""
    other = _unread(name, value)
    if other is not None:
        message = (
            f"{file.path}: `{name}` is made by {other}: lora-tool reads plain tensors, DTensors and ShardedTensors"
        )
        raise UnsupportedCheckpoint(message, hint="save it again as a plain tensor, with the program that trained it")
    return value


def _unread(name: object, value: object) -> str | None:
    """Return what makes a tensor or array of another sort, or anything else that has a parameter's name; else None."""
    maker = name_of(value) or name_of(type(value))
    is_named = type(name) is str and "." in name and not name.endswith("_extra_state")
    of_tensor = isinstance(value, Stub) and any(isinstance(arg, LazyTensor | Storage | Known) for arg in value.args)
    return maker[:80] if maker and (is_named or of_tensor or maker.startswith(_OTHER_TENSORS)) else None


def _leaves(table: dict[Any, Any], keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the tensors in a dict and the dicts in it, with the keys to each; what else is there is no weight."""
    for key, value in table.items():
        if type(key) not in (str, int):
            continue
        if isinstance(value, LazyTensor | DistributedTensor) or _unread(key, value):
            yield (*keys, key), value
        elif isinstance(value, dict) and len(keys) < _DEEPEST:
            yield from _leaves(value, (*keys, key))
