"""The inputs of a merge: a base, and adapters with their weights in the sum."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from lora_tool.adapters.support import require_mergeable, require_weightable
from lora_tool.adapters.view import view_of
from lora_tool.adapters.weighted import all_weighted
from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core.options import Options


class MergeInputs(Struct, frozen=True, kw_only=True):
    """The opened inputs."""

    stored: ModelDir
    """The base as it is on disk."""
    base: ModelDir
    """The base with the values and the config that the merge starts from: dequantised, rounded, or its text model."""
    adapters: tuple[AdapterDir, ...]
    weights: tuple[float, ...]
    """The weight of each adapter's ΔW."""
    is_quantised: bool = False
    is_text_only: bool = False
    notes: tuple[str, ...] = ()


def inputs_of(base: ModelDir, adapters: Sequence[AdapterDir], weights: Sequence[float] | None) -> MergeInputs:
    """Return the inputs; `weights` None is 1 for each adapter. Raises `WrongValue` for another number of weights."""
    _, factors = all_weighted(adapters, weights)
    return MergeInputs(stored=base, base=base, adapters=tuple(adapters), weights=factors)


def require_exact(inputs: MergeInputs, _: Options) -> MergeInputs:
    """Return the inputs. Raises `UnsupportedAdapter` for adapters that cannot be merged exactly, with their weights."""
    for adapter in inputs.adapters:
        require_mergeable(view_of(adapter))
    require_weightable(inputs.adapters, inputs.weights)
    return inputs
