"""What the data tells before training: the columns, and the rows from which nothing can be learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lora_tool.report import Finding
from lora_tool.train.codes import error, warning
from lora_tool.train.methods import Feedback, Method

SCANNED = 20_000
"""Rows that are looked at, spread over the data: seconds, whatever its size."""

_DATA = "train data"
_PREPARED = ("input_ids", "prompt_ids", "chosen_ids", "prompt_input_ids", "chosen_input_ids")
"""Columns of data that was tokenised beforehand; TRL takes it as it is."""

_PAIRS = (("chosen", "rejected"), ("chosen_ids", "rejected_ids"), ("chosen_input_ids", "rejected_input_ids"))
"""Columns of a pair: as text or messages, and as TRL's trainers tokenise them."""


def column_findings(method: Method, columns: Sequence[str], *, text_field: str | None = None) -> Iterator[Finding]:
    """Yield a finding if the columns are none of the sets that the method reads."""
    wanted = tuple(
        tuple(text_field if text_field and name == "text" else name for name in names) for names in method.columns
    )
    if set(columns) & set(_PREPARED) or any(set(names) <= set(columns) for names in wanted):
        return
    if method.name == "sft" and "conversations" in columns:  # ShareGPT's name for `messages`, which TRL converts
        return
    expected = ", or ".join(" + ".join(names) for names in sorted(wanted, key=len))
    missing = min((set(names) - set(columns) for names in wanted), key=len)
    message = f"{method.name} reads {expected}; the data has {', '.join(columns) or 'no columns'}"
    hint = f"rename or add: {', '.join(sorted(missing))} (dataset.rename_column, or another dataset_name)"
    yield error("columns", message, hint=hint, where=_DATA)


def row_findings(method: Method, data: Any) -> Iterator[Finding]:
    """Yield what is wrong with the rows themselves; nothing for streamed data, which has no length."""
    total = len(data) if hasattr(data, "__len__") else None
    if total == 0:
        yield error("no-rows", "has no rows", hint="another dataset_name or split", where=_DATA)
    if not total:
        return
    rows = data.select(range(0, total, -(-total // SCANNED)))
    columns = set(data.column_names)
    unreadable = _value_findings(method, rows, columns)
    if unreadable:  # what follows reads them
        yield from unreadable
        return
    for chosen, rejected in _PAIRS:
        if {chosen, rejected} <= columns:
            yield from _pairs(rows[chosen], rows[rejected])
            break
    for name in sorted({"completion", "text", "messages", "prompt"} & columns):
        if name != "prompt" or method.feedback is Feedback.REWARD:
            yield from _empty(name, rows[name], "are empty: nothing is learned from them")
    if method.name == "kto" and "label" in columns and len(set(rows["label"])) == 1:
        message = f"label is {rows['label'][0]} in all of {len(rows)} rows: KTO learns from the difference"
        yield warning("one-label", message, hint="add rows of the other label", where=_DATA, subject="label")


def _value_findings(method: Method, rows: Any, columns: set[str]) -> list[Finding]:
    """Return what no text or messages in the columns that the method reads; TRL would end in an AttributeError."""
    if columns & set(_PREPARED):
        return []
    matching = [names for names in method.columns if set(names) <= columns]
    read = [names for names in matching if not any(set(names) < set(others) for others in matching)]
    found = [list(_unreadable(rows, names)) for names in read]
    return min(found, key=len) if found else []


def _unreadable(rows: Any, names: Sequence[str]) -> Iterator[Finding]:
    kinds = {name: Counter(map(_kind, rows[name])) for name in names if name != "label"}
    for name, counts in kinds.items():
        if set(counts) - {"text", "messages"}:
            others = {kind: count for kind, count in counts.items() if kind not in ("text", "messages")}
            seen = ", ".join(f"{kind} in {count} of {len(rows)} rows" for kind, count in others.items())
            yield _values(name, f"is {seen}; expected text or messages", "fill or filter these rows out of the data")
    if not any(set(counts) - {"text", "messages"} for counts in kinds.values()):
        mixed = {name: " and ".join(sorted(counts)) for name, counts in kinds.items()}
        if len(set(mixed.values())) > 1:
            kinds_seen = ", ".join(f"{name} is {kind}" for name, kind in mixed.items())
            yield _values(
                names[-1], f"{kinds_seen}: TRL reads all of them as one or the other", "make all of them the same"
            )
    if "label" in names:
        labels = sorted({str(type(label).__name__) for label in rows["label"]} - {"bool", "int", "float"})
        if labels:
            yield _values("label", f"is {labels[0]}; expected true or false", "dataset.map to true and false")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return "text"
    if isinstance(value, list):
        return "messages" if all(isinstance(item, Mapping) for item in value) else "a list"
    return type(value).__name__


def _values(subject: str, message: str, hint: str) -> Finding:
    return error("values", message, hint=hint, where=_DATA, subject=subject)


def _pairs(chosen: Sequence[Any], rejected: Sequence[Any]) -> Iterator[Finding]:
    same = sum(one == other for one, other in zip(chosen, rejected, strict=True))
    what = "equal rejected: they have no preference, and no gradient"
    yield from _share("chosen-equals-rejected", same, len(chosen), "chosen", what)
    for name, column in (("chosen", chosen), ("rejected", rejected)):
        yield from _empty(name, column, "are empty")


def _empty(name: str, column: Sequence[Any], what: str) -> Iterator[Finding]:
    yield from _share("empty-completions", sum(map(_is_empty, column)), len(column), name, what)


def _share(code: str, count: int, total: int, subject: str, what: str) -> Iterator[Finding]:
    if count:
        made = error if count == total else warning
        hint = f"filter them out of the data, or lora_tool: {{guard: {{ignore: [{code}]}}}}"
        yield made(code, f"{count} of {total} rows {what}", hint=hint, where=_DATA, subject=subject)


def _is_empty(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    if isinstance(value, list) and value and isinstance(value[0], int):
        return False
    if isinstance(value, list):
        last = value[-1] if value else None
        if isinstance(last, Mapping) and any(last.get(name) for name in last if name not in ("role", "content")):
            return False  # a tool call, or thoughts
        content = last.get("content") if isinstance(last, Mapping) else None
        return last is None or (content is not None and not isinstance(content, list) and not str(content).strip())
    return value is None


def length_findings(
    method: Method, given: Any, data: Any, max_length: int | None, *, packed: bool
) -> Iterator[Finding]:
    """Yield what TRL dropped or will cut: the rows `given` to it, and the prepared `data` it made of them."""
    if packed or not hasattr(data, "__len__") or not hasattr(given, "__len__"):
        return
    hint = f"max_length: {2 * max_length}, or shorter texts" if max_length else "max_length, or shorter texts"
    dropped = len(given) - len(data)  # KTO makes two rows of a pair, and has more than it was given
    if dropped > 0:
        message = f"{dropped} of {len(given)} rows were dropped: they are longer than max_length {max_length}"
        made, code = (warning, "rows-dropped") if len(data) else (error, "no-rows")
        yield made(code, message, hint=hint, where=_DATA, subject="max_length")
    if not max_length or not len(data):
        return
    cut, seen = _cut_rows(given, data, max_length)
    if cut:
        what = "ends" if method.feedback is Feedback.TEXT else "whole completions"
        message = f"{cut} of {seen} rows are cut at max_length {max_length}: {method.name} does not see their {what}"
        yield warning("rows-truncated", message, hint=hint, where=_DATA, subject="max_length")


def _cut_rows(given: Any, data: Any, max_length: int) -> tuple[int, int]:
    """Return how many of the rows looked at are cut, and how many those are."""
    if "input_ids" in given.column_names:  # tokenised beforehand, perhaps into blocks of just this length
        lengths = [len(ids) for ids in given.select(range(0, len(given), -(-len(given) // SCANNED)))["input_ids"]]
        return sum(length > max_length for length in lengths), len(lengths)
    rows = data.select(range(0, len(data), -(-len(data) // SCANNED)))
    columns = set(data.column_names)
    if "prompt_ids" in columns:  # cut by the collator: prompt and completion together are too long
        ends = [name for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in columns]
        prompts = rows["prompt_ids"]
        over = [
            any(len(prompt) + len(end) > max_length for end in row)
            for prompt, row in zip(prompts, zip(*(rows[name] for name in ends), strict=True), strict=True)
        ]
        return sum(over), len(over)
    # cut when it was prepared: a row that fills the length exactly was cut, but for rare chance
    full = [name for name in ("input_ids", "chosen_input_ids", "rejected_input_ids") if name in columns]
    filled = [any(len(ids) >= max_length for ids in row) for row in zip(*(rows[name] for name in full), strict=True)]
    return sum(filled), len(filled)
