"""The ranks of LoRA on single experts: PEFT stacks the factors of all of a layer's experts, which need one rank for that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from lora_tool.adapters.experts import EXPERT, PROJECTIONS
from lora_tool.core.keys import without_numbers


def largest_of_experts(ranks: Mapping[str, int]) -> int | None:
    """Return the largest rank of the modules that are matrices of single experts; None where none is."""
    return max((rank for module, rank in ranks.items() if EXPERT.fullmatch(module)), default=None)


def equal_for_experts(ranks: Mapping[str, int]) -> dict[str, int]:
    """Return the ranks of modules, that of each expert's matrix raised to the largest of them."""
    largest = largest_of_experts(ranks)
    return {
        module: rank if largest is None or not EXPERT.fullmatch(module) else largest for module, rank in ranks.items()
    }


def missing_experts(modules: Iterable[str], known: Iterable[str]) -> Iterator[tuple[str, str | None]]:
    """Yield what PEFT needs besides, to stack the factors of `modules`, of all modules that are `known`: the other experts,
    in all layers, and all their matrices beside gate or up; down alone it finds. Each comes with one of the modules that
    has as many columns, if there is one.
    """
    present = set(modules)
    likes: dict[tuple[str, str], str | None] = {}
    for module in sorted(present):
        if match := EXPERT.fullmatch(module):
            experts = without_numbers(match["experts"])
            for projection in next((each for each in PROJECTIONS if match["projection"] in each[:-1]), ()):
                likes.setdefault((experts, projection), None)
            for projection in _as_wide(match["projection"]):
                likes[experts, projection] = likes.get((experts, projection)) or module
    for module in sorted(set(known) - present):
        match = EXPERT.fullmatch(module)
        if match and (at := (without_numbers(match["experts"]), match["projection"])) in likes:
            yield module, likes[at]


def _as_wide(projection: str) -> tuple[str, ...]:
    """Return the projections that have as many columns as this one: gate and up read the same."""
    return next(((gate, up) for gate, up, _ in PROJECTIONS if projection in (gate, up)), (projection,))
