"""A report as GitHub-flavoured Markdown: for a job summary (`$GITHUB_STEP_SUMMARY`) or a comment.

Names from files are nobody's: every character that Markdown, HTML or GitHub acts on is written as an entity, and
mentions and issue numbers are broken up, so that a tensor's name can neither make a link nor call a person.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from lora_tool.core.display import and_more, printable
from lora_tool.core.report.findings import Finding, Run, Severity
from lora_tool.core.report.model import Page, Report, by_subject
from lora_tool.core.report.text import by_reason, by_rule, run_cells, spans

MOST_CHARACTERS = 900_000
"""What a summary has; GitHub refuses a summary above 1 MiB."""

_SHOWN = 3
_LONGEST = 600
_SPECIAL = re.compile(r"[^\w\s.,:;/=+'\"%^?()-]|(?<![^\W_])_|_(?![^\W_])|:(?=\S)|(?<=\bwww)\.")
"""All that is no letter, digit, blank or harmless sign; `_` inside a word and `:` at its end are harmless, too."""
_MARKS = {Severity.ERROR: "❌ error", Severity.WARNING: "⚠️ warning", Severity.INFO: "note"}


def report_markdown(report: Report, *, pages: Mapping[str, Page], heading: Sequence[str] = ()) -> str:
    """Return the report as Markdown of at most `MOST_CHARACTERS` characters; what does not fit is said to be missing.

    `heading` are lines that stand in the place of the report's own first.
    """
    lines: list[str] = []
    left = MOST_CHARACTERS
    for line in (*(heading or _heading(report)), *_lines(report, pages)):
        left -= len(line) + 1
        if left < 0:
            lines += ["", "The rest is omitted because a summary has limited space; `--format json` gives all of it."]
            break
        lines.append(line)
    return "\n".join(lines)


def _heading(report: Report) -> Iterator[str]:
    failed = report.unread or report.count(Severity.ERROR)
    yield f"### {'❌' if failed else '✅'} lora-tool validate"


def _lines(report: Report, pages: Mapping[str, Page]) -> Iterator[str]:
    yield ""
    yield text(report.summary())
    if report.unread:
        yield from ("", "| cannot be read | why |", "|---|---|")
        for unread in report.unread:
            yield f"| {code(unread.path)} | {text(unread.message)} |"
    for run in report.runs:
        yield from ("", *_run(run))
    for checked, mine in by_subject(report):
        if mine:
            yield from ("", f"**{text(checked.kind)}** {code(checked.path)}", "")
            yield from ("| | rule | where | what |", "|---|---|---|---|")
            for group in by_rule(mine):
                yield from _rows(group, pages)
    yield from _left_out(report)


def _rows(group: Sequence[Finding], pages: Mapping[str, Page]) -> Iterator[str]:
    first = group[0]
    mark = _MARKS[first.severity]
    for finding in group[:_SHOWN]:
        where = ", ".join(code(name) for name in (finding.path.rpartition("/")[2], finding.subject) if name)
        yield f"| {mark} | {finding.code} | {where} | {text(finding.message)} |"
    more = f"and {len(group) - _SHOWN} more like it. " if len(group) > _SHOWN else ""
    page = pages.get(first.code)
    about = f"<b>{text(page.title)}</b>. " if page else ""
    yield f"| | | | {more}{about}{text(first.hint or '')} |"


def _run(run: Run) -> Iterator[str]:
    yield f"**run** {code(run.path)}"
    yield ""
    yield f"| | step | epoch | loss | {text(run.metric or '(not evaluated)')} | size | verdict |"
    yield "|---|--:|--:|--:|--:|--:|---|"
    for row in run.checkpoints:
        best = "**best** " if row.path == run.best else ""
        yield f"| {' | '.join((best + code(row.name), *run_cells(row)))} |"
    if run.best is not None:
        yield from ("", f"Best complete checkpoint: {code(run.best)} ({text(run.why_best or '')})")


def _left_out(report: Report) -> Iterator[str]:
    if report.skipped:
        yield from ("", "Not checked:", "")
        for codes, paths, reason in by_reason(report.skipped):
            more = and_more(len(paths) - 1)
            yield f"- {spans(codes)} on {code(paths[0])}{more}: {text(reason)}"
    if report.ignored:
        yield from ("", "Ignored:", "")
        for ignored in report.ignored:
            yield f"- {ignored.code}: {text(ignored.reason or 'no reason given')}"


def text(untrusted: str) -> str:
    """Return the text for a table cell or line; what stands between backticks is shown as code."""
    parts = _cut(printable(untrusted)).split("`")
    return "".join(code(part) if at % 2 and at < len(parts) - 1 else _plain(part) for at, part in enumerate(parts))


def code(untrusted: str) -> str:
    """Return the text as code, whatever is in it."""
    return f"<code>{_entities(_cut(printable(untrusted)))}</code>" if untrusted else ""


def _plain(part: str) -> str:
    # a space of no width after it, and GitHub sees neither a person nor an issue
    return re.sub("(&#64;|&#35;)", "\\1\u200b", _entities(part))


def _entities(part: str) -> str:
    return _SPECIAL.sub(lambda match: f"&#{ord(match[0])};", part)


def _cut(long: str) -> str:
    return long if len(long) <= _LONGEST else f"{long[: _LONGEST - 1]}…"
