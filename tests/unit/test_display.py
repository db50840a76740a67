from __future__ import annotations

import json
from typing import Any

import pytest

from lora_tool.core.display import json_text

TABLE: dict[str, Any] = {"a": [{"b": [1, {"c": "é\n"}], "d": {}}, []], "e": None, "f": {}}


@pytest.mark.parametrize("spread", range(6))
def test_json_text_is_the_same_table_however_it_is_laid_out(spread: int) -> None:
    assert json.loads(json_text(TABLE, spread=spread)) == TABLE


def test_json_text_is_that_of_json_where_every_level_has_its_lines() -> None:
    assert json_text(TABLE, spread=9) == json.dumps(TABLE, indent=2)
    assert json_text(TABLE, spread=2).splitlines()[2] == '    {"b": [1, {"c": "\\u00e9\\n"}], "d": {}},'
