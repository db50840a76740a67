"""What the data tells before training: the columns, and the rows from which nothing can be learned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lora_tool.report import Finding, Severity
from lora_tool.train.methods import Feedback, Method
from lora_tool.train.traps import trap

SCANNED = 20_000
"""Rows that are looked at, spread over the data: seconds, whatever its size."""

_DATA = "train data"
_PREPARED = frozenset(("input_ids", "prompt_ids", "chosen_ids", "prompt_input_ids", "chosen_input_ids"))
"""Columns of data that was tokenised beforehand; TRL takes it as it is."""

_PAIRS = (("chosen", "rejected"), ("chosen_ids", "rejected_ids"), ("chosen_input_ids", "rejected_input_ids"))
"""Columns of a pair: as text or messages, and as TRL's trainers tokenise them."""

_READABLE = frozenset(("text", "messages"))


def column_findings(method: Method, columns: Sequence[str], *, text_field: str | None) -> Iterator[Finding]:
    """Yield a finding if the columns are none of the sets that the method reads."""
    wanted = [[text_field if text_field and name == "text" else name for name in names] for names in method.columns]
    if _PREPARED & set(columns) or any(set(names) <= set(columns) for names in wanted):
        return
    if method.name == "sft" and "conversations" in columns:  # ShareGPT's name for `messages`, which TRL converts
        return
    expected = ", or ".join(" + ".join(names) for names in sorted(wanted, key=len))
    missing = min((set(names) - set(columns) for names in wanted), key=len)
    hint = f"rename or add: {', '.join(sorted(missing))} (dataset.rename_column, or another dataset_name)"
    seen = ", ".join(columns) or "no columns"
    yield trap("columns", hint, where=_DATA, method=method.name, expected=expected, columns=seen)


def row_findings(method: Method, data: Any) -> Iterator[Finding]:
    """Yield what is wrong with the rows themselves; nothing for streamed data, which has no length."""
    if not hasattr(data, "__len__"):
        return
    if not len(data):
        yield trap("no-rows", "another dataset_name or split", where=_DATA, why="has no rows")
        return
    rows, columns = _scanned(data), set(data.column_names)
    unreadable = _unreadable(method, rows, columns)
    yield from unreadable
    if unreadable:  # what follows reads them
        return
    chosen, rejected = next((pair for pair in _PAIRS if columns.issuperset(pair)), ("", ""))
    if chosen:
        same = sum(one == other for one, other in zip(rows[chosen], rows[rejected], strict=True))
        yield from _share("chosen-equals-rejected", same, rows, "chosen")
    text = {"completion", "text", "messages", *(("prompt",) if method.feedback is Feedback.REWARD else ())}
    for column in (*filter(None, (chosen, rejected)), *sorted(text & columns)):
        name = column.partition("_")[0]
        yield from _share("empty-completions", sum(map(_is_empty, rows[column])), rows, name)
    if method.name == "kto" and "label" in columns and len(set(rows["label"])) == 1:
        hint = "add rows of the other label"
        yield trap("one-label", hint, where=_DATA, subject="label", label=rows["label"][0], count=len(rows))


def _scanned(data: Any) -> Any:
    """Return the rows that are looked at."""
    return data.select(range(0, len(data), -(-len(data) // SCANNED)))


def _unreadable(method: Method, rows: Any, columns: set[str]) -> list[Finding]:
    """Return what is neither text nor messages in the columns that the method reads; TRL would say AttributeError."""
    if columns & _PREPARED:
        return []
    matching = [names for names in method.columns if set(names) <= columns]
    read = [names for names in matching if not any(set(names) < set(others) for others in matching)]
    return min((list(_unreadable_in(rows, names)) for names in read), key=len, default=[])


def _unreadable_in(rows: Any, names: Sequence[str]) -> Iterator[Finding]:
    kinds = {name: Counter(map(_kind, rows[name])) for name in names if name != "label"}
    strange = {name: {kind: n for kind, n in counts.items() if kind not in _READABLE} for name, counts in kinds.items()}
    for name, others in strange.items():
        if others:
            seen = ", ".join(f"{kind} in {count} of {len(rows)} rows" for kind, count in others.items())
            yield _value(name, f"is {seen}; expected text or messages", "fill or filter these rows out of the data")
    mixed = {name: " and ".join(sorted(counts)) for name, counts in kinds.items()}
    if not any(strange.values()) and len(set(mixed.values())) > 1:
        seen = ", ".join(f"{name} is {kind}" for name, kind in mixed.items())
        yield _value(names[-1], f"{seen}: TRL reads all of them as one or the other", "give all of them the same form")
    labels = {type(label).__name__ for label in rows["label"]} - {"bool", "int", "float"} if "label" in names else None
    if labels:
        yield _value("label", f"is {min(labels)}; expected true or false", "dataset.map to true and false")


def _value(subject: str, why: str, hint: str) -> Finding:
    return trap("values", hint, where=_DATA, subject=subject, why=why)


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "messages" if all(isinstance(item, Mapping) for item in value) else "a list"
    return "null" if value is None else "text" if isinstance(value, str) else type(value).__name__


def _share(code: str, count: int, rows: Any, subject: str) -> Iterator[Finding]:
    """Yield a finding if it is so of any of the `rows`: an error if of all."""
    if count:
        hint = f"filter them out of the data, or lora_tool: {{guard: {{ignore: [{code}]}}}}"
        severity = Severity.ERROR if count == len(rows) else Severity.WARNING
        share = f"{count} of {len(rows)}"
        yield trap(code, hint, where=_DATA, subject=subject, severity=severity, share=share)


def _is_empty(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    if not isinstance(value, list) or not value:
        return not value
    last = value[-1]
    if not isinstance(last, Mapping):
        return False  # tokens
    if any(last.get(name) for name in last if name not in ("role", "content")):
        return False  # a tool call, or thoughts
    content = last.get("content")
    return content is not None and not isinstance(content, list) and not str(content).strip()


def length_findings(method: Method, given: Any, data: Any, limit: int | None, *, packed: bool) -> Iterator[Finding]:
    """Yield what TRL dropped or will cut at `limit`: the rows `given` to it, and the prepared `data` it made of them."""
    if packed or not hasattr(data, "__len__") or not hasattr(given, "__len__"):
        return
    hint = f"max_length above {limit}, or shorter texts" if limit else "max_length, or shorter texts"
    dropped = len(given) - len(data)  # KTO makes two rows of a pair, and has more than it was given
    if dropped > 0:
        lost = trap(
            "rows-dropped", hint, where=_DATA, subject="max_length", share=f"{dropped} of {len(given)}", limit=limit
        )
        yield lost if len(data) else trap("no-rows", hint, where=_DATA, subject="max_length", why=lost.message)
    cut = _cut(given, data, limit) if limit and len(data) else []
    if any(cut):
        what = "ends" if method.feedback is Feedback.TEXT else "whole completions"
        share, name = f"{sum(cut)} of {len(cut)}", method.name
        yield trap(
            "rows-truncated", hint, where=_DATA, subject="max_length", share=share, limit=limit, method=name, what=what
        )


def _cut(given: Any, data: Any, limit: int) -> list[bool]:
    """Return of each row looked at whether it is cut."""
    if "input_ids" in given.column_names:  # tokenised beforehand, perhaps into blocks of just this length
        return [len(ids) > limit for ids in _scanned(given)["input_ids"]]
    rows, columns = _scanned(data), data.column_names
    if "prompt_ids" in columns:  # cut by the collator: prompt and completion together are too long
        ends = [rows[name] for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in columns]
        both = zip(rows["prompt_ids"], zip(*ends, strict=True), strict=True)
        return [any(len(prompt) + len(end) > limit for end in row) for prompt, row in both]
    # cut when it was prepared: a row that fills the length exactly was cut, but for rare chance
    full = [rows[name] for name in ("input_ids", "chosen_input_ids", "rejected_input_ids") if name in columns]
    return [any(len(ids) >= limit for ids in row) for row in zip(*full, strict=True)]
