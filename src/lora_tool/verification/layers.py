"""A model of which only the layer that is computing is in memory: weights come from the disk and go again.

It is built without weights. A hook reads the parameters of a decoder layer, or of a module outside them, in float32
before it runs and drops them after. PEFT's layers are part of it: LoRA factors come from the adapter's file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lora_tool.checkpoints import AdapterDir
from lora_tool.core import keys
from lora_tool.core.errors import MissingDependency
from lora_tool.core.keys import PREFIX, Part
from lora_tool.core.tensors import FLOAT_NAMES, DType, StoredTensor, TensorTable
from lora_tool.verification.elements import Files

try:
    import torch
    from accelerate import init_empty_weights
    from peft import LoraConfig, PeftModel, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper
except ImportError as error:
    raise MissingDependency("peft", extra="merge") from error

_TORCH = {dtype: getattr(torch, name) for dtype, name in FLOAT_NAMES.items()}
_DIGITS = {DType.BF16: 8, DType.F16: 11, DType.F32: 24, DType.F64: 24}

Noise = Mapping[str, DType]
"""Tensor of the merged model → the type it is stored in: what is moved at random by up to half its last place."""
Find = Callable[[str], StoredTensor | None]
"""Name of a parameter → where its values are."""


class NotStreamable(Exception):
    """A parameter without values on the disk: the model cannot be run layer by layer."""


def bare_model(auto: Any, config: Any) -> Any:
    """Return the model that the auto class makes of the config, without weights; its buffers are real."""
    with init_empty_weights(include_buffers=False):
        model = auto.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    model.tie_weights()  # parameters made without memory are not the same object any more
    return model


def with_adapters(model: Any, adapters: Sequence[AdapterDir]) -> Any:
    """Return the bare model with the adapters around it, all active, their weights not read."""
    names = peft_names(len(adapters))
    for name, adapter in zip(names, adapters, strict=True):
        config = LoraConfig.from_pretrained(str(adapter.root))
        config.inference_mode = True
        with init_empty_weights(include_buffers=False):
            if isinstance(model, PeftModel):
                model.add_adapter(name, config, low_cpu_mem_usage=True)
            else:
                model = get_peft_model(model, config, adapter_name=name, low_cpu_mem_usage=True)
    model.base_model.set_adapter(names)
    return model.eval()


def peft_names(count: int) -> list[str]:
    """Return what PEFT is to call so many adapters."""
    return ["default", *(f"adapter_{number}" for number in range(2, count + 1))]


def finder(base: TensorTable, adapters: Sequence[AdapterDir]) -> Find:
    """Return what finds the values of a parameter of an adapted model: in the adapter that has it, else in the base."""
    saved = [
        {
            key.canonical: adapter.tensors[name]
            for name, key in adapter.keys.items()
            if key.part is not Part.ORIGINAL_MODULE
        }
        for adapter in adapters
    ]
    names = peft_names(len(adapters))

    def find(name: str) -> StoredTensor | None:
        key = _parsed(name)
        number = names.index(key.adapter_name) if key.adapter_name in names else 0
        whole = f"{key.module}.{key.leaf}" if key.part is Part.BASE_LAYER else key.tensor
        if key.part in (Part.PLAIN, Part.BASE_LAYER):
            carried = (table.get(key.canonical) or table.get(PREFIX + whole) for table in saved)
            return next((tensor for tensor in carried if tensor is not None), base.get(whole))
        return saved[number].get(key.canonical) if number < len(saved) else None

    return find


def _parsed(name: str) -> keys.AdapterKey:
    """Return a parameter's name parsed; the layer under trained tokens, or a copy, is the model's own layer."""
    for inside in (".token_adapter.base_layer.", ".original_module."):
        name = name.replace(inside, ".base_layer.")
    return keys.parse(name)


def _merged_name(name: str) -> str:
    """Return what the merged model calls the tensor that a parameter of the adapted model goes into."""
    key = _parsed(name)
    return f"{key.module}.{key.leaf}" if key.part in (Part.BASE_LAYER, Part.SAVED_MODULE) else key.tensor


def stream(model: Any, find: Find, files: Files, *, noise: Noise | None = None) -> None:
    """Make the bare model read its weights when it runs. Raises `NotStreamable` where one has no values on the disk."""
    source = _Source(model, find, files, noise or {})
    for unit in list(_units(model)):
        places = [
            (module, leaf, parameter, source.of(parameter))
            for module in unit.modules()
            for leaf, parameter in module._parameters.items()  # noqa: SLF001 - torch has no other way to replace one
            if parameter is not None and parameter.is_meta and not source.is_unused(parameter)
        ]
        _hook(unit, places, source.read)


class _Source:
    """Where the values of a model's parameters are. A tied parameter has several names, of which one is on disk."""

    def __init__(self, model: Any, find: Find, files: Files, noise: Noise) -> None:
        self._find = find
        self._files = files
        self._noise = noise
        self._generator = torch.Generator().manual_seed(0)
        self._names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)

    def is_unused(self, parameter: Any) -> bool:
        """Whether it is the original of a module that was trained whole: the trained copy runs in its place."""
        return all(".original_module." in name for name in self._names[id(parameter)])

    def of(self, parameter: Any) -> tuple[str, StoredTensor]:
        """Return the name under which the values are on disk, and where. Raises `NotStreamable`."""
        names = self._names[id(parameter)]
        found = next(((name, tensor) for name in names if (tensor := self._find(name)) is not None), None)
        if found is None:
            raise NotStreamable(f"`{names[0]}` is neither in the base nor in the adapter")
        name, tensor = found
        if tensor.shape != tuple(parameter.shape) or not tensor.dtype.is_float:
            raise NotStreamable(f"`{name}` is {tensor.dtype} {list(tensor.shape)}, in memory {list(parameter.shape)}")
        return found

    def read(self, name: str, tensor: StoredTensor) -> Any:
        """Return the values as a float32 parameter, moved at random where that was asked for."""
        raw = torch.from_numpy(self._files.read(tensor, 0, tensor.nbytes))
        values = raw.view(_TORCH[tensor.dtype]).reshape(tensor.shape).to(torch.float32)
        dtype = self._noise.get(_merged_name(name))
        values = values if dtype is None else shaken(values, dtype, self._generator)
        return torch.nn.Parameter(values, requires_grad=False)


def shaken(values: Any, dtype: DType, generator: Any) -> Any:
    """Return float32 values, each moved at random by up to half a unit in the last place that it has as `dtype`.

    A float32 weight moves by up to two: its sum was accumulated in float32, too.
    """
    apart = torch.ldexp(torch.ones(()), torch.frexp(values).exponent - _DIGITS[dtype])
    apart = apart if dtype in (DType.BF16, DType.F16) else 4 * apart
    return values + (torch.rand(values.shape, generator=generator) - 0.5) * apart


def _hook(unit: Any, places: list[Any], read: Callable[[str, StoredTensor], Any]) -> None:
    def load(*_: object) -> None:
        for module, leaf, _parameter, (name, tensor) in places:
            module._parameters[leaf] = read(name, tensor)  # noqa: SLF001

    def drop(*_: object) -> None:
        for module, leaf, parameter, _found in places:
            module._parameters[leaf] = parameter  # noqa: SLF001

    unit.register_forward_pre_hook(load)
    unit.register_forward_hook(drop, always_call=True)


def _units(model: Any) -> Iterator[Any]:
    """Yield the modules whose weights are read together: decoder layers, PEFT's layers, whatever else owns weights."""
    layers = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}

    def walk(module: Any) -> Iterator[Any]:
        whole = type(module).__name__ in layers or isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper)
        if (whole and not isinstance(module, PeftModel)) or any(True for _ in module.parameters(recurse=False)):
            yield module
        else:
            for child in module.children():
                yield from walk(child)

    yield from walk(model)
