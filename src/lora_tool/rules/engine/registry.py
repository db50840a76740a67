"""A rule: a code, a severity, a page, and a small generator of faults over one opened folder."""

from __future__ import annotations

import enum
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.core.choices import closest
from lora_tool.core.display import named
from lora_tool.core.errors import Defect, UnknownRule
from lora_tool.core.report import Checked, Finding, Report, Severity
from lora_tool.rules.engine.subjects import AdapterSubject, Matter, Subject

SECTIONS = ("What it does", "Why it matters", "Example", "What to do")
"""The headings of every rule's page, in order."""

_WIDTH = 116
_COMMAND = re.compile(r"`lora-tool [^`]*`")
_WORD = re.compile(r"(?<![\w-])[A-Z]{2,}(?![\w-])")
_CODE = re.compile(r"[A-Z]{2,8}\d{3}\Z")
"""LT is lora-tool's own: the rules of another package have letters of its own."""
_BEGINNING = re.compile(r"[A-Z]{2,8}\d*\Z")


@enum.unique
class Need(str, enum.Enum):
    """An input without which a rule would report wrong findings."""

    WEIGHTS = "weights"
    """Every tensor header can be believed."""
    CONFIG = "config"
    """`adapter_config.json` can be read, has no wrong field, and is LoRA's."""
    LORA = "lora"
    """The adapter is not of another kind, as far as its config says."""
    BASE = "base"
    """A base model whose names can be compared with the adapter's."""
    SAME_NAMES = "same names"
    """With `BASE`: where the base's names may mean other modules, the rule checks only those with the same name in
    both, and the report lists that it saw no others."""
    NAMES = "names"
    """A base model, whatever its names mean in memory."""
    BASE_IN_PART = "base in part"
    """Without a base model the rule checks only part, and the report lists that."""
    CLASS = "class"
    """The tensors of the model's class; without them the rule checks only part, and the report lists that."""
    ALL_NAMES = "all names"
    """Every file that lists tensors of a sharded checkpoint; without one the rule checks the others, and the report
    lists that."""
    VALUES = "values"
    """The weights themselves are read, not only their headers."""
    SERVER = "server"
    """The user named a server for the adapter."""
    PLAN = "plan"
    """A plan or ledger gives the expected tensors of a merged model."""
    COMPARED = "compared"
    """The values of a merged model were compared with its base's."""
    RECOMPUTED = "recomputed"
    """The changed tensors of a merged model were computed a second time."""
    OUTPUTS = "outputs"
    """The merged model and its base with the adapter answered the same prompts."""
    PAIRS = "pairs"
    """A reward model ranked pairs of a preferred and a rejected text."""


class Fault(Struct, frozen=True, kw_only=True, eq=False):
    """A fault of a rule: `subject` is the tensor or field; path, hint and severity default to the rule's own."""

    message: str
    subject: str | None = None
    path: str | Path | None = None
    hint: str | None = None
    severity: Severity | None = None
    mergeable: bool = False
    """Whether a merge can go on where the rule is ignored, though other faults of an `unmergeable` rule leave nothing."""


def doubted(fault: Fault, doubt: str | None) -> Fault:
    """Return the fault as a warning that says why there may be none; the fault as it is without a doubt."""
    if doubt is None:
        return fault
    return replace(fault, severity=Severity.WARNING, message=f"{fault.message}; {doubt}")


_FEW = 3


def as_one(faults: Iterable[Fault]) -> Iterator[Fault]:
    """Yield the faults that have one cause as one, which counts them and names a few; up to three as they are."""
    listed = tuple(faults)
    if len(listed) <= _FEW:
        yield from listed
        return
    first, *others = listed
    like_it = named([each.subject for each in others if each.subject], most=2)
    yield replace(first, message=f"{first.message}; {len(others)} others are like it: {like_it}")


def alike_as_one(faults: Iterable[Fault]) -> Iterator[Fault]:
    """Yield those that say the same as one, as `as_one` does."""
    groups: dict[str, list[Fault]] = {}
    for fault in faults:
        groups.setdefault(fault.message, []).append(fault)
    for group in groups.values():
        yield from as_one(group)


class Unchecked(Struct, frozen=True, kw_only=True, eq=False):
    """Yielded instead of a fault where an input is missing: the report then lists the rule as skipped."""

    reason: str


class Rule(Struct, frozen=True, kw_only=True, eq=False):
    """One registered rule. Its docstring is its page: the title, then paragraphs that begin as `SECTIONS` say."""

    code: str
    severity: Severity
    on: type[Subject]
    needs: frozenset[Need]
    check: Callable[[Any], Iterator[Fault | Unchecked]]
    about: Matter | Defect | None = None
    """What it judges, of things that few folders have; without it in a folder the rule has run there and found nothing."""
    unmergeable: bool = False
    """Whether its errors leave a merge nothing to compute, so that ignoring the rule does not help one."""

    @property
    def title(self) -> str:
        """The first line of the page, without its full stop."""
        return self._page[0].rstrip(".")

    @property
    def text(self) -> str:
        """The whole page, as Markdown."""
        return "\n\n".join([self._page[0], *(f"## {heading}\n{text}" for heading, text in self.sections().items())])

    @property
    def deep(self) -> bool:
        """Whether it reads the weights themselves."""
        return Need.VALUES in self.needs

    @property
    def compares(self) -> bool:
        """Whether it compares an adapter with its base by names and headers."""
        return Need.BASE in self.needs and not self.deep

    def seen(self, subject: Subject) -> Subject:
        """Return the subject in the names of memory if the rule compares and they are known, else as it is on disk."""
        return (self.compares and isinstance(subject, AdapterSubject) and subject.in_memory) or subject

    @property
    def hint(self) -> str | None:
        """The first paragraph under "What to do", as one line."""
        paragraph = self.sections().get(SECTIONS[-1], "").partition("\n\n")[0]
        return " ".join(paragraph.split()) or None

    def sections(self) -> Mapping[str, str]:
        """Return the page's sections: heading → text."""
        from textwrap import fill  # only pages and hints need it

        found: dict[str, str] = {}
        heading = ""
        for paragraph in self._page[1:]:
            first, _, rest = paragraph.partition(": ")
            heading, text = (first, rest) if first in SECTIONS else (heading, paragraph)
            filled = fill(text, _WIDTH, break_on_hyphens=False, break_long_words=False)
            found[heading] = f"{found[heading]}\n\n{filled}" if heading in found else filled
        return found

    def _hint_about(self, subject: Subject) -> str:
        """Return the page's hint, its commands with the paths of the subject; "" for a page without one."""
        paths = subject.named
        return _COMMAND.sub(
            lambda command: _WORD.sub(lambda word: paths.get(word[0], word[0]), command[0]), self.hint or ""
        )

    @property
    def _page(self) -> list[str]:
        """The paragraphs of the docstring; each section begins one."""
        text = inspect.cleandoc(self.check.__doc__ or page_in_source(self.check))
        return re.sub(rf"\n+(?=(?:{'|'.join(SECTIONS)}): )", "\n\n", text).split("\n\n")

    def run(self, subject: Subject, *, ignored: bool = False) -> Iterator[Finding | Unchecked]:
        """Yield the rule's findings on a subject of its kind, and the checks that it could not make; of an `ignored`
        rule only the findings that make a merge impossible.
        """
        if self.about is not None and not subject.has(self.about):
            return
        advice, home = "", ""
        for fault in self.check(subject):
            if isinstance(fault, Unchecked):
                yield fault
                continue
            if ignored and fault.mergeable:
                continue
            # read off the page and the folder once: a hostile file gives a million findings
            advice, home = advice or self._hint_about(subject), home or subject.home
            yield self.finding(fault, home=home, advice=advice)

    def findings(self, subject: Subject) -> Iterator[Finding]:
        """Yield the rule's findings on a subject of its kind, without the checks that it could not make."""
        return (found for found in self.run(subject) if isinstance(found, Finding))

    def finding(self, fault: Fault, *, home: str = "", advice: str = "") -> Finding:
        """Return the finding of a fault; one without a path is in `home`, one without a hint has `advice`."""
        return Finding(
            code=self.code,
            severity=fault.severity or self.severity,
            path=str(fault.path or home),
            subject=fault.subject,
            message=fault.message,
            hint=fault.hint or advice or None,
        )


RULES: dict[str, Rule] = {}
"""Every rule by its code. A code is permanent and is never given to another rule."""

S = TypeVar("S", bound=Subject)
F = TypeVar("F", bound=Fault | Unchecked)


def rule(
    code: str,
    severity: Severity,
    *,
    on: type[S],
    needs: Iterable[Need] = (),
    about: Matter | Defect | None = None,
    deep: bool = False,
    unmergeable: bool = False,
) -> Callable[[Callable[[S], Iterator[F]]], Callable[[S], Iterator[F]]]:
    """Register a generator of faults as the rule `code`. Raises ValueError for a malformed or used code."""
    if not _CODE.match(code) or code in RULES:
        raise ValueError(f"{code} is not a free rule code")

    def register(check: Callable[[S], Iterator[F]]) -> Callable[[S], Iterator[F]]:
        wanted = frozenset(needs) | (frozenset({Need.WEIGHTS, Need.VALUES}) if deep else frozenset())
        RULES[code] = Rule(
            code=code, severity=severity, on=on, needs=wanted, check=check, about=about, unmergeable=unmergeable
        )
        return check

    return register


def page_in_source(check: Callable[..., object]) -> str:
    """Return the docstring from the source, for `python -OO`, which leaves docstrings out."""
    import ast

    try:
        [function] = ast.parse(inspect.getsource(check)).body
    except (OSError, SyntaxError):
        return ""
    return (ast.get_docstring(function) if isinstance(function, ast.FunctionDef) else None) or ""


def expand(codes: Iterable[str]) -> frozenset[str]:
    """Return the rules that `codes` mean: each a code or the beginning of codes (``LT2``), in one text
    with commas or in several. Raises `UnknownRule`.
    """
    meant: set[str] = set()
    for code in codes.split(",") if isinstance(codes, str) else codes:
        wanted = code.strip().upper()
        matching = [known for known in RULES if known.startswith(wanted)] if _BEGINNING.match(wanted) else []
        if not matching:
            close = _meant_by(wanted)
            nearest = f" Did you mean {close}?" if close else ""
            family = wanted[: len("LT0")]
            listed = f" {family}" if any(known.startswith(family) for known in RULES) else ""
            raise UnknownRule(f"There is no rule {code!r}.{nearest}", hint=f"lora-tool rules{listed}")
        meant.update(matching)
    return frozenset(meant)


_READ_AS_DIGITS = str.maketrans("OQDILSB", "0001158")
"""Letters that are typed, or read off a screen, for digits."""


def _meant_by(wanted: str) -> str | None:
    """Return the code that was probably meant; None for another number, as near to one code as to the next."""
    read = f"LT{wanted.removeprefix('LT').translate(_READ_AS_DIGITS)}"
    if read in RULES or _CODE.match(wanted):
        return read if read in RULES else None
    return closest(wanted, RULES, likeness=0.75)


def chosen(select: Iterable[str] = (), ignore: Iterable[str] = ()) -> tuple[Rule, ...]:
    """Return the rules to run, by code: those selected (all without a selection) less those ignored."""
    selected = expand(select) or frozenset(RULES)
    return tuple(RULES[code] for code in sorted(selected - expand(ignore)))


def unopened(path: str, message: str, rules: Iterable[Rule], *, code: str = "LT115") -> Report:
    """Return the one finding about a folder that is not opened: by default that it has no weights."""
    broken = RULES[code]
    finding = Finding(code=code, severity=broken.severity, path=path, subject=None, message=message, hint=broken.hint)
    return Report(
        subjects=(Checked(path=path, kind="unknown folder", rules=(code,)),),
        findings=(finding,) if broken in tuple(rules) else (),
    )
