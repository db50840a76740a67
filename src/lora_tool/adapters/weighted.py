"""`A=0.7`: an adapter with its weight in a sum, as it is typed. The weight stands by the adapter, so none is miscounted."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from lora_tool.checkpoints.sources import Reference, several
from lora_tool.core.errors import WrongValue
from lora_tool.formats.files import expanded, is_folder


def weighted(reference: Reference) -> tuple[Reference, float]:
    """Return an adapter's reference and its weight, 1 where none is given.

    A folder whose whole name is there is that folder, whatever stands behind an `=` in it. Raises `WrongValue` for a
    weight of zero, infinity or NaN, and where the name means two folders.
    """
    if not isinstance(reference, str) or "=" not in reference:
        return reference, 1.0
    name, _, number = reference.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        return reference, 1.0  # a path with an = in it
    if is_folder(expanded(reference)):
        if name and is_folder(expanded(name)):
            raise WrongValue(
                f"{reference} is ambiguous: it is a folder, and also the folder {name} with the weight {number}",
                hint=f"{reference}=1 for the first, {name}/={number} for the second",
            )
        return reference, 1.0
    if not name:
        raise WrongValue(f"{reference}: expected an adapter before the =", hint="ADAPTER=0.7")
    return name, checked(weight, name)


def checked(weight: float, name: object) -> float:
    """Return a weight that an adapter can have. Raises `WrongValue`."""
    if not math.isfinite(weight) or weight == 0:
        what = "leaves it out" if weight == 0 else "is not a usable number"
        raise WrongValue(f"{name}: the weight {weight:g} {what}: expected a number such as 0.7 or -0.3")
    return weight


def averaged(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights of a mean: each divided by their sum. Raises `WrongValue` where that is zero."""
    total = math.fsum(weights)
    if total == 0:
        given = ", ".join(f"{weight:g}" for weight in weights)
        raise WrongValue(
            f"average: the weights {given} add up to 0, and a mean divides by their sum",
            hint="give other weights, such as A=2 B=1",
        )
    return tuple(weight / total for weight in weights)


def place_of(chosen: Reference, among: Sequence[Reference]) -> int:
    """Return which of the adapters is `chosen`, named with its weight or without. Raises `WrongValue`."""
    name = weighted(chosen)[0]
    for at, each in enumerate(among):
        if each is name or _as_typed(each) == _as_typed(name) is not None:
            return at
    raise WrongValue(f"head_of: {chosen} is not one of the adapters: {', '.join(map(str, among))}")


def _as_typed(reference: Reference) -> str | None:
    return os.fspath(reference).rstrip("/") if isinstance(reference, str | os.PathLike) else None


def all_weighted(
    adapters: Reference | Sequence[Reference], weights: Sequence[float] | None
) -> tuple[tuple[Reference, ...], tuple[float, ...]]:
    """Return adapters and their weights: those of `weights`, or what stands behind each name.

    Raises `WrongValue` for an adapter that would have both, too.
    """
    listed = several(adapters)
    if weights is None:
        pairs = [weighted(each) for each in listed]
        return tuple(name for name, _ in pairs), tuple(weight for _, weight in pairs)
    if len(weights) != len(listed):
        raise WrongValue(f"weights: expected {len(listed)}, one for each adapter, found {len(weights)}")
    for each in listed:
        if isinstance(each, str) and not is_folder(expanded(each)) and weighted(each)[0] is not each:
            raise WrongValue(f"{each} has a weight, but `weights` gives it another: leave out one of the two")
    return listed, tuple(checked(float(weight), name) for weight, name in zip(weights, listed, strict=True))
