"""Which of the tensors in a training program's state are the module's, and their own names: the same in every format.

Programs put the module's state dict under a key, `model` say, and those of optimizer and scheduler under others.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Container, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lora_tool.core.display import some
from lora_tool.core.errors import CorruptFile, Defect, UnsupportedCheckpoint
from lora_tool.core.tensors import is_tensor_name
from lora_tool.formats.distributed_tensors import DistributedTensor
from lora_tool.formats.pickle_objects import Known, Stub, name_of
from lora_tool.formats.torch_objects import LazyTensor, TorchStorage
from lora_tool.formats.torch_zip import TorchFile

_Value = TypeVar("_Value")

TO_ONE_FILE = "python -m torch.distributed.checkpoint.format_utils dcp_to_torch DIR FILE"
_MODEL_KEYS = frozenset({"model", "state_dict", "module"})
"""Keys under which training programs put the module's state dict, itself perhaps under others: ``app.model``."""
OTHER_KEYS = frozenset({"optimizer", "optimizers", "optim", "lr_scheduler", "scheduler", "dataloader", "train_state"})
"""Keys of other states, which torchtitan puts on the same level as the weights."""
_OF_OPTIMIZERS = frozenset({"state", "param_groups"})
"""The keys of the state dict of every optimizer of torch's."""
_OTHER_TENSORS = ("torch._utils._rebuild_", "numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
_DEEPEST = 4
"""Keys above the module's names, at most."""

RankTensor = LazyTensor | DistributedTensor
"""A tensor as one rank saved it: whole, or the rank's part."""


def module_names(path: Path, paths: Mapping[str, tuple[Any, ...]], module: str | None = None) -> dict[str, str]:
    """Return the checkpoint's name → the module's own, for the module's tensors only; `paths` are the keys to each.

    Of several modules `module` is the one that is wanted, by its keys with dots between. Raises
    `UnsupportedCheckpoint`, which names `path`, where there are several and none is wanted, or no such one.
    """
    held = frozenset(paths.values())
    weights = {
        fqn: keys
        for fqn, keys in paths.items()
        if OTHER_KEYS.isdisjoint(keys[:-1][:_DEEPEST])
        and not _is_moment(keys, held)
        and not of_optimizer(str(keys[-1]))
    }
    modules = {keys[:depth] for keys in weights.values() if (depth := _depth(keys))} or _unnamed(weights.values())
    if not modules and module is None:
        flat = {fqn: keys for fqn, keys in weights.items() if len(keys) == 1}
        inside = flat if any(map(_has_dots, flat.values())) else weights
        return {fqn: ".".join(map(str, keys)) for fqn, keys in inside.items()}
    chosen = _chosen({".".join(map(str, keys)): keys for keys in sorted(modules, key=str)}, path, module)
    inside = {fqn: keys[len(chosen) :] for fqn, keys in weights.items() if keys[: len(chosen)] == chosen}
    return {fqn: ".".join(map(str, keys)) for fqn, keys in inside.items()}


def _chosen(modules: Mapping[str, tuple[Any, ...]], path: Path, wanted: str | None) -> tuple[Any, ...]:
    """Return the keys of the module that is wanted, or of the only one that lies least deep."""
    if wanted is not None and wanted in modules:
        return modules[wanted]
    shallowest = min(map(len, modules.values()), default=0)
    found = [name for name, keys in modules.items() if len(keys) == shallowest]
    if wanted is None and len(found) == 1:
        return modules[found[0]]
    if wanted is not None:
        message = f"{path} holds no module `{wanted}`{f', but {some(list(modules))}' if modules else ' by a key'}"
        raise UnsupportedCheckpoint(message)
    folder = shlex.quote(str(path.parent if path.suffix else path))
    raise UnsupportedCheckpoint(
        f"{path} holds the states of {len(found)} modules: {some(found)}",
        hint=f"choose one: lora-tool consolidate {folder} --tag {shlex.quote(found[0])}",
    )


def of_optimizer(name: str) -> str:
    """Return the beginning of a name of several parts that is an optimizer's, "" of any other.

    Megatron writes them without keys above: ``optimizer.state.exp_avg.…``, ``chained_0.optimizer.distributed.…``.
    """
    above, found, _ = f".{name}".partition(".optimizer.")
    return f"{above}.optimizer"[1:] if found else ""


def _is_moment(keys: tuple[Any, ...], held: Container[tuple[Any, ...]]) -> bool:
    """Return whether it is the optimizer's, of a parameter in the same dict: ``state.norm.weight.exp_avg``, as torch's
    flattened optimizer states are.
    """
    of, _, rest = str(keys[-1]).partition(".")
    return of in _OF_OPTIMIZERS and (*keys[:-1], rest.rpartition(".")[0]) in held


def _unnamed(paths: Collection[tuple[Any, ...]]) -> set[tuple[Any, ...]]:
    """Return the keys of the dicts that are modules' states under unknown keys, none where the weights lie on top.

    Names of parameters have dots, those of counters and random states have none, and an optimizer's state has two
    keys of its own.
    """
    if any(len(keys) == 1 and _has_dots(keys) for keys in paths):
        return set()
    named = {keys[:1] for keys in paths if len(keys) > 1 and _has_dots(keys[1:]) and keys[1] not in _OF_OPTIMIZERS}
    return named or ({keys[:1] for keys in paths} if all(len(keys) > 1 for keys in paths) else set())


def _has_dots(keys: tuple[Any, ...]) -> bool:
    """Return whether one of them is a name of several parts, as parameters have."""
    return any("." in key for key in keys if type(key) is str)


def _depth(keys: tuple[Any, ...]) -> int:
    """Return how many keys lead to the state dict of a module, 0 where none is known. The last key is a tensor's."""
    return next((at + 1 for at, key in enumerate(keys[:-1][:_DEEPEST]) if type(key) is str and key in _MODEL_KEYS), 0)


def module_tensors(file: TorchFile, module: str | None = None) -> dict[str, RankTensor]:
    """Return the module's tensors in a file that `torch.save` wrote, by their own names, whatever dicts they lie in.

    Of several modules `module` is the wanted one.

    Raises `CorruptFile` where it holds no dict or names that no tensor can have, and as `module_names`.
    """
    if not isinstance(file.value, dict):
        message = f"holds a {type(file.value).__name__}, expected a dict of tensors"
        raise CorruptFile.of(file.path, Defect.BAD_HEADER, message)
    found = {str(number): (keys, tensor) for number, (keys, tensor) in enumerate(_leaves(file.value, ()))}
    names = module_names(file.path, {number: keys for number, (keys, _) in found.items()}, module)
    if len(set(names.values())) != len(names) or not all(map(is_tensor_name, names.values())):
        message = "gives two tensors the same name, or one tensor an invalid name"
        raise CorruptFile.of(file.path, Defect.BAD_HEADER, message)
    held = {name: found[number][1] for number, name in names.items()}
    return {name: require_read(file, name, value) for name, value in held.items()}


def require_read(file: TorchFile, name: str, value: _Value) -> _Value:
    """Return `value`, which is `name` in the file. Raises `UnsupportedCheckpoint` for a kind that is not read."""
    other = _unread(name, value)
    if other is not None:
        message = (
            f"{file.path}: `{name}` is made by {other}: lora-tool reads plain tensors, DTensors and ShardedTensors"
        )
        raise UnsupportedCheckpoint(message, hint="save it again as a plain tensor, with the program that trained it")
    return value


def _unread(name: object, value: object) -> str | None:
    """Return the maker of an unsupported tensor or array, or of another object with a parameter's name; else None."""
    maker = name_of(value) or name_of(type(value))
    is_named = type(name) is str and "." in name and not name.endswith("_extra_state")
    of_tensor = isinstance(value, Stub) and any(
        isinstance(arg, LazyTensor | TorchStorage | Known) for arg in value.args
    )
    return maker[:80] if maker and (is_named or of_tensor or maker.startswith(_OTHER_TENSORS)) else None


def _leaves(table: dict[Any, Any], keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield the tensors in a dict and the dicts in it, with the keys to each; other values are not weights."""
    for key, value in table.items():
        if type(key) not in (str, int):
            continue
        if isinstance(value, LazyTensor | DistributedTensor) or _unread(key, value):
            yield (*keys, key), value
        elif isinstance(value, dict) and len(keys) < _DEEPEST:
            yield from _leaves(value, (*keys, key))
