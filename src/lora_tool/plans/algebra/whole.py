"""What a sum of adapters holds besides LoRA: heads, saved modules, biases, trained tokens. They cannot be added."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.adapters.view import AdapterView, WholeTensor
from lora_tool.core.actions import TensorAction
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.keys import Part
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.stored import same_values
from lora_tool.plans.core.ops import Copy
from lora_tool.plans.core.steps import InputRecord, Step


class WholeTensors(Struct, frozen=True, kw_only=True):
    """The whole tensors of a sum, and those that are not in it."""

    steps: tuple[Step, ...]
    dropped: tuple[InputRecord, ...]


def whole_tensors(views: Sequence[AdapterView], *, head_of: AdapterView | None = None) -> WholeTensors:
    """Return every whole tensor of the adapters once: those that are the same in all of them, or in one alone.

    If their values differ, those of `head_of` are taken. Raises `UnsupportedAdapter` if they differ without `head_of`.
    """
    kept: dict[str, tuple[StoredTensor, AdapterView]] = {}
    dropped: list[InputRecord] = []
    ordered = sorted(views, key=lambda view: view is not head_of)
    for view in ordered:
        for name, tensor in _named(view, dropped):
            first, whose = kept.setdefault(name, (tensor, view))
            if first is tensor:
                continue
            same = same_values(first, tensor)
            if not same and whose is not head_of:
                raise UnsupportedAdapter(
                    f"{tensor.path}: `{tensor.name}` differs from the one in {whose.adapter.root}, and whole tensors "
                    "cannot be added as ΔW can",
                    hint=f"choose which to keep: `head_of={shlex.quote(str(whose.adapter.root))}`",
                )
            why = "holds it with the same values" if same else "has the requested one"
            dropped.append(_dropped(tensor, f"{whose.adapter.root} {why}"))
    return WholeTensors(
        steps=tuple(_copied(name, tensor, view) for name, (tensor, view) in kept.items()),
        dropped=tuple(dropped),
    )


def magnitude_steps(view: AdapterView) -> Iterator[Step]:
    """Yield the steps that copy DoRA's magnitudes, each under the name that PEFT gives it."""
    for layer in view.layers:
        if layer.magnitude is not None:
            key = view.adapter.keys[layer.magnitude.name]
            yield _copied(replace(key, module=layer.module).canonical, layer.magnitude, view)


def _copied(name: str, tensor: StoredTensor, view: AdapterView) -> Step:
    reason = f"copied from {view.adapter.root}"
    out = replace(tensor.spec, name=name)
    return Step(out=out, op=Copy(source=tensor), action=TensorAction.COPIED, reason=reason)


def _named(view: AdapterView, dropped: list[InputRecord]) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the whole tensors by the names that PEFT gives them; note those that it does not load."""
    for name, first in view.repeats.items():
        dropped.append(_dropped(view.adapter.tensors[name], f"a copy of {first.name}, which is in the file too"))
    for item in view.whole:
        if item.tensor.name in view.repeats:
            continue
        if item.part is Part.ORIGINAL_MODULE:
            dropped.append(_dropped(item.tensor, "the frozen original of a saved module; PEFT does not load it either"))
        else:
            yield _peft_name(view, item), item.tensor


def _peft_name(view: AdapterView, item: WholeTensor) -> str:
    return replace(view.adapter.keys[item.tensor.name], module=item.module, leaf=item.leaf).canonical


def _dropped(tensor: StoredTensor, reason: str) -> InputRecord:
    return InputRecord(path=tensor.path, name=tensor.name, action=TensorAction.DROPPED, reason=reason)
