"""Options of a use case, declared once: a field of a dataclass that says what it does and how it is written.

The library takes the fields as keywords (`called_with`), a command line as options, a file as keys.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar, get_args, get_type_hints, overload

from msgspec import Struct

from lora_tool.core.choices import suggestion
from lora_tool.core.display import counted
from lora_tool.core.errors import WrongCall, WrongValue

_SHOWN = 3
"""Arguments that a hint names before it stops."""
Keywords = ParamSpec("Keywords")
_Chosen = TypeVar("_Chosen", bound="Options")
_First = TypeVar("_First")
_Second = TypeVar("_Second")
_Result = TypeVar("_Result")


class Recorded(enum.Enum):
    """What the manifest of an output records of an option."""

    ALWAYS = enum.auto()
    IF_GIVEN = enum.auto()
    AS_DECIDED = enum.auto()
    """What the plan decided where the option left it open; the plan records that itself."""


@enum.unique
class Section(str, enum.Enum):
    """Where an option stands in the help of a command, in this order."""

    FIRST = "Options"
    """What most calls need."""
    INPUT = "Input"
    MODEL = "Model"
    ARITHMETIC = "Arithmetic"
    QUANTISED = "Quantised base"
    CHECKS = "Checks"
    OUTPUT = "Output"
    WORKERS = "Workers and cluster"
    HUB = "Hub"
    PRINTED = "What is printed"


class Option(Struct, frozen=True, kw_only=True):
    """One option: its effect, in a sentence, its spelling on a command line, and how a manifest keeps it.

    `parse` makes a value of the given one, and raises `WrongValue`; None takes it unchanged.
    """

    help: str
    parse: Callable[[Any], Any] | None = None
    name: str | None = None
    """Without its dashes; None takes the name of the field."""
    short: tuple[str, ...] = ()
    metavar: str | None = None
    off: str | None = None
    """The spelling of a flag's opposite, such as ``no-verify``."""
    many: bool = False
    """Whether it may be repeated: `parse` makes each value of a tuple."""
    existing: bool = False
    """Whether a command line takes only a path that exists."""
    library_only: bool = False
    """Whether no command has it."""
    recorded: Recorded | None = None
    """None where no manifest has it under its name."""
    inferred: Callable[..., Any] | None = None
    """Gives its value for an output that has no manifest, from the output and what it was made of."""


def option(default: object, text: str, **spelling: Any) -> Any:  # noqa: ANN401 - as `dataclasses.field`
    """Return a dataclass field that is an option; `spelling` is that of `Option`."""
    return field(default=default, metadata={"option": Option(help=text, **spelling)})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The base of the options of a use case. Raises `WrongValue` for a bad value, naming its field."""

    common: ClassVar[bool] = False
    """Whether the class declares what several use cases share; such options are listed last."""
    section: ClassVar[Section] = Section.FIRST
    """Where help has the options that the class itself declares."""

    def __post_init__(self) -> None:
        for name, (how, _) in declared(type(self)).items():
            given = getattr(self, name)
            if given is not None and how.parse is not None:
                try:
                    object.__setattr__(self, name, tuple(map(how.parse, given)) if how.many else how.parse(given))
                except WrongValue as error:
                    raise WrongValue(f"{name}: {str(error).partition(': ')[2] or error}", hint=error.hint) from error


def declared(options: type[Options]) -> dict[str, tuple[Option, object]]:
    """Return the declared options by the names of their fields, each with its default (`MISSING` for one that is
    required): those of the use case before the `common` ones.
    """
    common: set[str] = set()
    for kind in options.__mro__:
        if vars(kind).get("common"):
            common |= vars(kind)["__annotations__"].keys()
    in_order = sorted(fields(options), key=lambda each: each.name in common)
    return {each.name: (each.metadata["option"], each.default) for each in in_order}


def sections(options: type[Options]) -> dict[str, Section]:
    """Return where help has each option, by the name of its field: as the class says that declared it first."""
    found: dict[str, Section] = {}
    for kind in options.__mro__:
        found |= dict.fromkeys(vars(kind).get("__annotations__", ()), vars(kind).get("section", Section.FIRST))
    return found


def on_command_line(options: type[Options]) -> dict[str, tuple[Option, object]]:
    """Return the options that a command has, as `declared` does."""
    return {name: found for name, found in declared(options).items() if not found[0].library_only}


def recorded(options: Options) -> dict[str, Any]:
    """Return what a manifest records of the options as they were given."""
    values: dict[str, Any] = {}
    for name, (how, _) in declared(type(options)).items():
        value = getattr(options, name)
        if how.recorded is Recorded.ALWAYS or (how.recorded is Recorded.IF_GIVEN and value):
            values[name] = value.value if isinstance(value, enum.Enum) else value
    return values


def replayed(options: type[Options], record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a manifest recorded, without those whose value nobody knows any more."""
    values: dict[str, Any] = {}
    for name, (how, _) in declared(options).items():
        if how.recorded is None or record.get(name) is None:
            continue
        try:
            values[name] = how.parse(record[name]) if how.parse is not None else record[name]
        except WrongValue:  # "as in the base", or a word of another release
            continue
    return values


def inferred(options: type[Options], *seen: object) -> dict[str, Any]:
    """Return the options that an output without a manifest shows; `seen` are the output and what it was made of."""
    return {name: how.inferred(*seen) for name, (how, _) in declared(options).items() if how.inferred is not None}


def named_in_errors(function: Callable[Keywords, _Result]) -> Callable[Keywords, _Result]:
    """Return `function`, which answers a call with wrong arguments by a `WrongCall`."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*inputs: Keywords.args, **keywords: Keywords.kwargs) -> _Result:
        _bound(function.__name__, signature, inputs, keywords)
        return function(*inputs, **keywords)

    return call


def _bound(
    name: str, signature: inspect.Signature, inputs: tuple[object, ...], keywords: Mapping[str, object]
) -> dict[str, Any]:
    """Return the arguments by their names. Raises `WrongCall` where they are not those of the signature."""
    try:
        return signature.bind(*inputs, **keywords).arguments
    except TypeError:
        raise _wrong_call(name, signature, inputs, keywords) from None


def _wrong_call(
    name: str, signature: inspect.Signature, inputs: Sequence[object], keywords: Collection[str]
) -> WrongCall:
    """Return the error for a call that does not fit the signature of the function called `name`."""
    known = signature.parameters
    leading = [each.name for each in known.values() if each.kind is not each.KEYWORD_ONLY]
    unknown = next((each for each in keywords if each not in known), None)
    if unknown is not None:
        return WrongCall(f"{name}() has no argument `{unknown}`", hint=suggestion(unknown, known))
    if len(inputs) > len(leading):
        others = [f"{each}=…" for each in known if each not in leading]
        shown = [*leading, *others[:_SHOWN], *(["…"] if len(others) > _SHOWN else [])]
        return WrongCall(
            f"{name}() takes {counted(len(leading), 'argument')} without a name, found {len(inputs)}",
            hint=f"name the others: {name}({', '.join(shown)})",
        )
    twice = next((each for each in leading[: len(inputs)] if each in keywords), None)
    if twice is not None:
        return WrongCall(f"{name}() got `{twice}` twice, with its name and without")
    given = {*leading[: len(inputs)], *keywords}
    lacking = [each.name for each in known.values() if each.default is each.empty and each.name not in given]
    return WrongCall(f"{name}() needs {', '.join(f'`{each}`' for each in lacking)}")


class called_with(Generic[Keywords, _Chosen]):  # noqa: N801 - a decorator
    """Give a function that takes options those options as keywords instead, with their types and sentences.

    Its parameters after the options keep their defaults; those before that may be None are None by default.
    """

    def __init__(self, options: Callable[Keywords, _Chosen]) -> None:
        self.options = options

    @overload
    def __call__(
        self, function: Callable[[_First, _Second, _Chosen], _Result]
    ) -> Callable[Concatenate[_First, _Second, Keywords], _Result]: ...
    @overload
    def __call__(
        self, function: Callable[[_First, _Chosen], _Result]
    ) -> Callable[Concatenate[_First, Keywords], _Result]: ...

    def __call__(self, function: Callable[..., _Result]) -> Callable[..., _Result]:
        """Return `function` with keywords; its signature and docstring list them."""
        own = inspect.signature(function, eval_str=True)
        kinds = [each.annotation for each in own.parameters.values()]
        position = next(at for at, kind in enumerate(kinds) if isinstance(kind, type) and issubclass(kind, Options))
        kind = kinds[position]
        leading = [
            each.replace(default=None) if type(None) in get_args(each.annotation) else each
            for each in list(own.parameters.values())[:position]
        ]

        types = get_type_hints(kind)
        parameters = list(leading)
        for name, (_, default) in declared(kind).items():
            given = inspect.Parameter.empty if default is MISSING else default
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=given, annotation=types[name])
            )
        signature = inspect.Signature(parameters, return_annotation=own.return_annotation)

        @functools.wraps(function)
        def call(*inputs: Any, **keywords: Any) -> _Result:
            named = _bound(function.__name__, signature, inputs, keywords)
            given = [named.pop(each.name, None) for each in leading]
            return function(*given, self.options(**named))  # type: ignore[call-arg] # `named` are `Keywords`

        vars(call)["__signature__"] = signature
        del vars(call)["__wrapped__"]  # whose source has other parameters than a reader of the signature expects
        lines = [f"`{name}`: {how.help}".replace("*", r"\*") for name, (how, _) in declared(kind).items()]
        call.__doc__ = "\n\n    ".join([(function.__doc__ or "").rstrip(), *lines])
        return call
