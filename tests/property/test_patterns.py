"""The keys of `rank_pattern` and `alpha_pattern` are matched as PEFT matches them, however many there are."""

from __future__ import annotations

import re
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st
from peft.utils.other import get_pattern_key

from lora_tool.formats import patterns
from lora_tool.formats.patterns import Patterns

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


def test_keys_that_are_paths_are_not_tried_one_after_the_other() -> None:
    modules = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(40) for expert in range(64)]
    with mock.patch.object(patterns, "compiled", side_effect=AssertionError("a regex for a path")):
        table = Patterns([*(module.removeprefix("model.") for module in modules), "^" + re.escape(modules[0])])
        assert [table.first(module) for module in modules] == [module.removeprefix("model.") for module in modules]
