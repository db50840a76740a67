"""What the data tells before training: the columns, and the rows from which nothing can be learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lora_tool.report import Finding, Severity
from lora_tool.train.codes import finding
from lora_tool.train.methods import Feedback, Method

SCANNED = 20_000
"""Rows that are looked at, spread over the data: seconds, whatever its size."""

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
    yield finding(
        "columns",
        Severity.ERROR,
        f"{method.name} reads {expected}; the data has {', '.join(columns) or 'no columns'}",
        hint=f"rename or add: {', '.join(sorted(missing))} (dataset.rename_column, or another dataset_name)",
        where="train data",
    )


def row_findings(method: Method, data: Any) -> Iterator[Finding]:
    """Yield what is wrong with the rows themselves; nothing for streamed data, which has no length."""
    total = len(data) if hasattr(data, "__len__") else None
    if total == 0:
        yield finding(
            "no-rows", Severity.ERROR, "has no rows", hint="another dataset_name or split", where="train data"
        )
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
            yield from _share(
                "empty-completions",
                sum(map(_is_empty, rows[name])),
                len(rows),
                name,
                "are empty: nothing is learned from them",
            )
    if method.name == "kto" and "label" in columns and len(set(rows["label"])) == 1:
        yield finding(
            "one-label",
            Severity.WARNING,
            f"label is {rows['label'][0]} in all of {len(rows)} rows: KTO learns from the difference",
            hint="add rows of the other label",
            where="train data",
            subject="label",
        )


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
    return finding("values", Severity.ERROR, message, hint=hint, where="train data", subject=subject)


def _pairs(chosen: Sequence[Any], rejected: Sequence[Any]) -> Iterator[Finding]:
    same = sum(one == other for one, other in zip(chosen, rejected, strict=True))
    yield from _share(
        "chosen-equals-rejected",
        same,
        len(chosen),
        "chosen",
        "equal rejected: they have no preference, and no gradient",
    )
    for name, column in (("chosen", chosen), ("rejected", rejected)):
        empty = sum(map(_is_empty, column))
        yield from _share("empty-completions", empty, len(column), name, "are empty")


def _share(code: str, count: int, total: int, subject: str, what: str) -> Iterator[Finding]:
    if count:
        severity = Severity.ERROR if count == total else Severity.WARNING
        yield finding(
            code,
            severity,
            f"{count} of {total} rows {what}",
            hint=f"filter them out of the data, or lora_tool: {{guard: {{ignore: [{code}]}}}}",
            where="train data",
            subject=subject,
        )


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
    line = f"max_length: {2 * max_length}" if max_length else "max_length"
    raw_rows = len(given)
    dropped = raw_rows - len(data)
    # KTO makes two rows of a pair
    if dropped > 0:
        yield finding(
            "rows-dropped" if len(data) else "no-rows",
            Severity.WARNING if len(data) else Severity.ERROR,
            f"{dropped} of {raw_rows} rows were dropped: they are longer than max_length {max_length}",
            hint=f"{line}, or shorter texts",
            where="train data",
            subject="max_length",
        )
    if not max_length or not len(data):
        return
    cut, seen = _cut_rows(given, data, max_length)
    if cut:
        yield finding(
            "rows-truncated",
            Severity.WARNING,
            f"{cut} of {seen} rows are cut at max_length {max_length}: {method.name} does not see their "
            f"{'ends' if method.feedback is Feedback.TEXT else 'whole completions'}",
            hint=f"{line}, or shorter texts",
            where="train data",
            subject="max_length",
        )


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
