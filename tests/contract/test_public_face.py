"""What `from lora_tool import …` gives: documented, typed, and the same as its `__all__` says."""

from __future__ import annotations

import inspect
import typing

import pytest

import lora_tool

FUNCTIONS = [name for name in lora_tool.__all__ if inspect.isfunction(getattr(lora_tool, name))]


def test_every_name_is_there() -> None:
    assert dir(lora_tool) == sorted(lora_tool.__all__)
    assert len(FUNCTIONS) == len(lora_tool.__all__) - len(("LoraToolError", "__version__"))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_says_what_it_returns_and_raises_and_its_types_resolve(name: str) -> None:
    function = getattr(lora_tool, name)
    assert "return" in typing.get_type_hints(function)
    assert "Raises" in (function.__doc__ or "")
