"""The arithmetic of dimensions: the simplest product or sum of fields that gives a size in every model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from math import prod
from typing import Any

from tests.tensor_tables.models import Fields

Term = tuple[tuple[str, int], ...]
"""A product of fields, each with its power."""


def fit(samples: Sequence[tuple[Fields, int]]) -> str | int | None:
    """Return the simplest expression over the fields that gives the size in every sample, None where there is none."""
    values = {value for _, value in samples}
    if len(values) == 1:
        return next(iter(values))
    names = moving(samples)
    if not names:
        return None
    known = [(f, v) for f, v in samples if all(whole(f.get(n)) and f[n] for n in names)]  # 0 may mean "by default"
    if len(known) < 3 or len(known) < len(samples) * 0.5:
        return None
    terms = monomials(names)
    tables = {term: [evaluated(term, f) for f, _ in known] for term in terms}
    tables = {term: column for term, column in tables.items() if all(each is not None for each in column)}
    wanted = [Fraction(value) for _, value in known]
    for count in (1, 2, 3):
        if count == 3 and len(tables) > 40:
            break
        for chosen in itertools.combinations([*tables, ()] if count > 1 else tables, count):
            factors = solved([tables[t] if t else [Fraction(1)] * len(known) for t in chosen], wanted)
            if factors is not None:
                return written(chosen, factors)
    return None


def whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def moving(samples: Sequence[tuple[Fields, int]]) -> list[str]:
    """Return the integer fields whose change alone changes the size."""
    first_fields, first = samples[0]
    found: dict[str, None] = {}
    for fields, value in samples[1:]:
        if value == first:
            continue
        differing = [n for n in fields if n in first_fields and fields[n] != first_fields[n]]
        numbers = [n for n in differing if whole(fields[n]) and whole(first_fields.get(n))]
        if len(numbers) == 1 == len(differing):
            found[numbers[0]] = None
    if not found:  # a field that another one follows
        for fields, value in samples[1:]:
            if value != first:
                found.update(
                    dict.fromkeys(
                        n for n in fields if fields[n] == value and first_fields.get(n) == first and whole(fields[n])
                    )
                )
    return list(found)[:5]


def monomials(names: Sequence[str]) -> list[Term]:
    found: list[Term] = []
    for size in range(1, min(3, len(names)) + 1):
        for chosen in itertools.combinations(names, size):
            signs = itertools.product((1, -1), repeat=size)
            found.extend(tuple(zip(chosen, powers, strict=True)) for powers in signs if 1 in powers)
    return sorted(found, key=lambda term: (len(term), sum(power < 0 for _, power in term)))


def evaluated(term: Term, fields: Fields) -> Fraction | None:
    if any(power < 0 and not fields[name] for name, power in term):
        return None
    return prod((Fraction(fields[name]) ** power for name, power in term), start=Fraction(1))


def solved(columns: Sequence[Sequence[Any]], wanted: Sequence[Fraction]) -> list[Fraction] | None:
    """Return the factors of the columns whose sum is `wanted` in every row, None where there are none."""
    rows = [[*(column[at] for column in columns), wanted[at]] for at in range(len(wanted))]
    size = len(columns)
    reduced: list[list[Fraction]] = []
    for row in rows:
        rest = row
        for pivot, done in enumerate(reduced):
            rest = [a - rest[pivot] * b for a, b in zip(rest, done, strict=True)]
        if len(reduced) < size and rest[len(reduced)]:
            lead = rest[len(reduced)]
            reduced.append([a / lead for a in rest])
        elif any(rest) and (len(reduced) == size or not any(rest[:size])):
            return None
    if len(reduced) < size:
        return None
    factors = [Fraction(0)] * size
    for at in reversed(range(size)):
        factors[at] = reduced[at][size] - sum((reduced[at][n] * factors[n] for n in range(at + 1, size)), Fraction(0))
    if any(not f or abs(f.numerator) > 64 or f.denominator > 8 for f in factors):
        return None
    checked = all(sum((f * row[n] for n, f in enumerate(factors)), Fraction(0)) == row[size] for row in rows)
    return factors if checked else None


def written(terms: Sequence[Term], factors: Sequence[Fraction]) -> str:
    return "+".join(_term(term, factor) for term, factor in zip(terms, factors, strict=True))


def _term(term: Term, factor: Fraction) -> str:
    above = [name for name, power in term if power > 0]
    below = [name for name, power in term if power < 0]
    if factor.numerator != 1 or not above:
        above.insert(0, str(factor.numerator))
    if factor.denominator != 1:
        below.append(str(factor.denominator))
    return "/".join(["*".join(above), *below])
