"""The keys of `rank_pattern` and `alpha_pattern` are matched as PEFT matches them, however many there are."""

from __future__ import annotations

import re
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from lora_tool.formats import patterns
from lora_tool.formats.patterns import Patterns, ignores_numbers

WORDS = st.sampled_from(["a", "b", "ab", "a_b", "a-b", "0", "1", "10", "é"])
MODULES = st.lists(WORDS, min_size=1, max_size=4).map(".".join) | st.text("ab.\n_", min_size=1, max_size=5)
KEYS = st.builds(
    lambda start, words, between, end: start + between.join(words) + end,
    st.sampled_from(["", "", "^", ".*", r".*\.", "(a|b)"]),
    st.lists(WORDS, min_size=1, max_size=3),
    st.sampled_from([".", ".", r"\.", "_", "[.]", ""]),
    st.sampled_from(["", "", "$", ".", r"\.", "?"]),
)


@given(st.lists(KEYS, max_size=6), MODULES)
def test_the_first_key_that_peft_finds_is_found(keys: list[str], module: str) -> None:
    keys = [key for key in keys if key != module]  # PEFT returns the module itself where no key matches
    found = get_pattern_key(keys, module)
    assert Patterns(keys).first(module) == (None if found == module else found)


PLAIN = st.lists(st.sampled_from([".*", r"\.", ".", "a", "b", "|", "(a|b)", "$", "^", "a1", "?"]), min_size=1).map(
    "".join
)
FORMS = st.lists(st.sampled_from(["a", "b", "ab", "a1", "*", "*"]), min_size=1, max_size=4).map(".".join)
NUMBERS = st.sampled_from(["0", "7", "10", "123"])


@given(KEYS | PLAIN, FORMS, NUMBERS, NUMBERS)
def test_a_key_that_ignores_numbers_matches_whatever_they_are(key: str, form: str, one: str, other: str) -> None:
    if not ignores_numbers(key):
        return
    modules = [form.replace("*", number) for number in (one, other)]
    try:
        patterns.compiled(key)
        table = Patterns([key])
    except ValueError:
        return
    first, second = ((table.first(each), patterns.compiled(key).fullmatch(each) is None) for each in modules)
    assert first == second


def test_keys_that_are_paths_are_not_tried_one_after_the_other() -> None:
    modules = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(40) for expert in range(64)]
    with mock.patch.object(patterns, "compiled", side_effect=AssertionError("a regex for a path")):
        table = Patterns([*(module.removeprefix("model.") for module in modules), "^" + re.escape(modules[0])])
        assert [table.first(module) for module in modules] == [module.removeprefix("model.") for module in modules]
