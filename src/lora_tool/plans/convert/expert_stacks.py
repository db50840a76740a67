"""Which parameter in memory the matrices of single experts are rows of, as far as their names tell; else by transformers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec import Struct

from lora_tool.adapters.experts import DOWN, EXPERT, GATE_UP, LISTED, PROJECTIONS, is_single
from lora_tool.checkpoints import AdapterDir, ModelDir

_IN_MEMORY = (".block_sparse_moe.", ".mlp.")
"""How transformers 5 calls the block of Mixtral and its relatives, whose checkpoints have the first name."""
_IN_BOTH = re.compile(r"model\.layers\.\d+\.(mlp|feed_forward)\.experts")
"""How transformers calls the experts of nearly all models of text; for others the class itself is asked."""
_STACK = 3
"""Dimensions of a parameter that holds one matrix per expert."""


class ExpertStack(Struct, frozen=True, kw_only=True):
    """A parameter that holds one or two matrices of every expert."""

    parameter: str
    """Its path in memory."""
    matrices: tuple[tuple[str, ...], ...]
    """For each expert the modules on disk whose rows it holds, in their order."""


def stacks_of(base: ModelDir | None, adapter: AdapterDir, wanted: Collection[str]) -> Mapping[str, ExpertStack]:
    """Return the stacks of a base's experts by their parameters; those that `wanted` make where the base has no experts
    one by one.

    `wanted` are paths of experts in memory, or of single experts' matrices. Where names do not tell, transformers does:
    raises `MissingDependency` without it, and otherwise as `read_model`.
    """
    names = () if base is None else (name.removesuffix(".weight") for name in base.tensors)
    single = set(filter(is_single, names))
    found = {stack.parameter: stack for stack in _by_names(single or wanted)}
    if base is None or not single:
        return found
    known = {name for stack in found.values() for each in stack.matrices for name in each}
    in_memory = {parameter.rpartition(".")[0] for parameter in found}
    if known == single and known | in_memory >= set(wanted) and all(map(_IN_BOTH.fullmatch, in_memory)):
        return found
    return {stack.parameter: stack for stack in _by_transformers(base, adapter)}


def _by_names(modules: Iterable[str]) -> Iterator[ExpertStack]:
    """Yield the stacks of matrices whose names are gate, up and down; up without a gate makes none."""
    counts: dict[str, dict[str, int]] = {}
    for module in modules:
        if match := EXPERT.fullmatch(module) or LISTED.fullmatch(module):
            of_experts = counts.setdefault(match["experts"], {})
            of_experts[match["projection"]] = max(of_experts.get(match["projection"], 0), 1 + int(match["number"]))
    for experts, found in counts.items():
        for parameter, matrices in _MADE_OF:
            if matrices[0] in found:
                count = max(found.get(name, 0) for name in matrices)
                yield ExpertStack(
                    parameter=f"{experts.replace(*_IN_MEMORY)}.{parameter}",
                    matrices=tuple(tuple(_path(experts, at, name) for name in matrices) for at in range(count)),
                )


_MADE_OF = (
    *((GATE_UP, (gate, up)) for gate, up, _ in PROJECTIONS),
    *((DOWN, (down,)) for *_, down in PROJECTIONS),
    (GATE_UP, (f"{GATE_UP}s",)),
    (DOWN, (f"{DOWN}s",)),
)
"""Parameter → the names of the matrices of each expert that it holds."""


def _path(experts: str, number: int, matrix: str) -> str:
    listed = matrix.endswith("s")
    return f"{experts}.{matrix}.{number}" if listed else f"{experts}.{number}.{matrix}"


def _by_transformers(base: ModelDir, adapter: AdapterDir) -> Iterator[ExpertStack]:
    """Yield the stacks of the class that transformers loads the base as."""
    from lora_tool.plans.base.task import Task
    from lora_tool.plans.merge.model.reading import read_model  # many files, seldom needed

    conversion = read_model(base, (adapter,), Task.AUTO).conversion
    for parameter, made in conversion.mapping.parameters.items() if conversion else ():
        names = [piece.name.removesuffix(".weight") for piece in made.pieces or ()]
        if len(made.shape) == _STACK and names and all(map(is_single, names)):
            each = len(names) // made.shape[0]
            matrices = tuple(tuple(names[at : at + each]) for at in range(0, len(names), each))
            yield ExpertStack(parameter=parameter, matrices=matrices)
