"""A base that is stored as it is in memory, so that headers alone tell where everything is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lora_tool.architectures import Architecture
from lora_tool.checkpoint import AdapterDir, ModelDir
from lora_tool.plan.adapter.modules import AdapterModules
from lora_tool.plan.base.task import Task
from lora_tool.plan.core.ops import Precision
from lora_tool.plan.core.steps import InputRecord, Step
from lora_tool.plan.merge.base_view import PerExpert
from lora_tool.plan.merge.unexpected_tensors import computed_buffers


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectBase:
    """The inputs as they are: the `BaseView` with nothing to translate."""

    base: ModelDir
    adapters: Sequence[AdapterDir]
    arch: Architecture
    task: Task
    leftovers: tuple[InputRecord, ...] = ()
    facts: None = None
    missing_keys: frozenset[str] = frozenset()

    @property
    def tied_by_config(self) -> Mapping[str, str]:
        """The second bias of BERT's kin, `X.decoder.bias`, which is `X.bias`."""
        ends = [name for name in self.arch.causal_only if name.endswith(".decoder.bias")]
        return {name: f"{name.removesuffix('.decoder.bias')}.bias" for name in ends}

    def in_memory(self) -> None:
        """Return nothing: its names on disk are those in memory."""

    def parts_of_fused(self, modules: AdapterModules, precision: Precision) -> tuple[AdapterModules, PerExpert]:
        """Return the modules, and none that are a part of a fused parameter, in any precision."""
        del precision
        return modules, {}

    def on_disk(self, steps: Sequence[Step], per_expert: PerExpert) -> tuple[Step, ...]:
        """Return the steps."""
        if per_expert:
            raise AssertionError("a plainly stored model has no fused parameters")
        return tuple(steps)


def direct_base(base: ModelDir, adapters: Sequence[AdapterDir], arch: Architecture, task: Task) -> DirectBase:
    """Return the view of a plainly stored base, without the buffers that transformers does not load."""
    leftovers = tuple(computed_buffers(base))
    left = {item.name for item in leftovers}
    tensors = {name: tensor for name, tensor in base.tensors.items() if name not in left}
    return DirectBase(
        base=replace(base, weights=replace(base.weights, tensors=tensors)) if left else base,
        adapters=adapters,
        arch=arch,
        task=task,
        leftovers=leftovers,
    )
