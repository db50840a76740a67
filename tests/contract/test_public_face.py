"""What `from lora_tool import …` gives: documented, typed, with every type that it takes or returns."""

from __future__ import annotations

import enum
import inspect
import typing
from collections.abc import Iterator

import pytest

import lora_tool

FUNCTIONS = [name for name in lora_tool.__all__ if inspect.isfunction(getattr(lora_tool, name))]


def classes(annotation: object) -> Iterator[type]:
    """Yield the classes of ours that an annotation is made of."""
    if isinstance(annotation, type) and annotation.__module__.startswith("lora_tool"):
        yield annotation
    for part in typing.get_args(annotation):
        for inner in part if isinstance(part, list) else [part]:
            yield from classes(inner)


def test_every_name_is_there() -> None:
    assert dir(lora_tool) == sorted(lora_tool.__all__)
    assert {"merge", "consolidate", "inspect", "diff", "ls", "validate", "verify", "execute"} <= set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_returns_and_raises_and_its_types_can_be_imported(name: str) -> None:
    function = getattr(lora_tool, name)
    signature = inspect.signature(function, eval_str=True)
    assert signature.return_annotation is not inspect.Signature.empty
    assert "Raises" in (function.__doc__ or "")
    annotations = [signature.return_annotation, *(each.annotation for each in signature.parameters.values())]
    for found in {inner for annotation in annotations for inner in classes(annotation)}:
        assert getattr(lora_tool, found.__name__, None) is found, f"{name}: {found} cannot be imported from lora_tool"


def test_enums_of_the_face_refuse_by_name() -> None:
    for name in lora_tool.__all__:
        words = getattr(lora_tool, name)
        if inspect.isclass(words) and issubclass(words, enum.Enum) and words is not lora_tool.DType:
            with pytest.raises(lora_tool.LoraToolError, match=r"expected one of .*, found 'poetry'"):
                words("poetry")
