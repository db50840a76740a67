"""Options of a use case: what a manifest keeps of them, and how they come back from it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from lora_tool.core.choices import flag, positive
from lora_tool.core.errors import WrongValue
from lora_tool.core.options import Options, Recorded, called_with, inferred, on_command_line, option, recorded, replayed
from lora_tool.plans.core.ops import Precision


@dataclass(frozen=True, kw_only=True)
class Tiny(Options):
    precision: Precision | str = option(Precision.FLOAT32, "Arithmetic.", parse=Precision, recorded=Recorded.AS_DECIDED)
    untie: bool = option(default=False, text="Untie.", parse=flag, recorded=Recorded.ALWAYS, inferred=str.isupper)
    labels: int | None = option(None, "Labels.", parse=positive, recorded=Recorded.IF_GIVEN)
    jobs: int | None = option(None, "Workers.", parse=positive, library_only=True)


def test_a_manifest_keeps_what_decides_the_bytes_and_was_given() -> None:
    assert recorded(Tiny(jobs=3)) == {"untie": False}
    assert recorded(Tiny(labels=2, precision="peft")) == {"untie": False, "labels": 2}


def test_a_manifest_gives_options_back_and_unknown_words_are_left_to_the_default() -> None:
    record = {"precision": "float64", "untie": True, "labels": None, "jobs": 8, "another": 1}
    assert replayed(Tiny, record) == {"precision": Precision.FLOAT64, "untie": True}
    assert replayed(Tiny, {"precision": "of another release", "untie": "no", "labels": 0}) == {}


def test_an_output_without_a_manifest_shows_some_options() -> None:
    assert inferred(Tiny, "UNTIED") == {"untie": True}


def test_an_option_of_the_library_is_no_option_of_a_command() -> None:
    assert list(on_command_line(Tiny)) == ["precision", "untie", "labels"]


def test_a_function_takes_its_options_as_keywords() -> None:
    @called_with(Tiny)
    def doubled(number: int, options: Tiny) -> int:
        """Return twice the number."""
        return 2 * number + (options.labels or 0)

    assert doubled(2, labels=1) == 5
    assert "`labels`: Labels." in (doubled.__doc__ or "")
    with pytest.raises(WrongValue, match="labels: expected a whole number"):
        doubled(2, labels=0)
