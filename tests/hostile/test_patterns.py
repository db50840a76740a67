"""Regular expressions in `adapter_config.json` that would run for ever, or are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_tool.formats.adapter_config import read_adapter_config
from tests.hostile.folders import Pair, assert_refused, copy_pair

CATASTROPHIC = [
    "(a+)+$",
    "(a|a)*$",
    "((a*)*)*b",
    "(.*a){20}",
    "(x+x+)+y",
    ".*" * 30 + "z",
    "(?:(?:.+)+)+!",
    "(a?){40}a{40}",
    "a" * 300_000,
]
BROKEN = ["(", "[", "*", "(?P<x", "\\", "a{2,1}", "(" * 5000]


def change(pair: Pair, **fields: object) -> Path:
    path = pair.adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return path


@pytest.mark.parametrize("pattern", [*CATASTROPHIC, *BROKEN], ids=lambda pattern: pattern[:20])
@pytest.mark.parametrize("field", ["target_modules", "rank_pattern"])
def test_a_pattern_that_cannot_be_trusted_is_refused(field: str, pattern: str, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    path = change(pair, **{field: pattern if field == "target_modules" else {pattern: 2}})
    assert_refused(pair, str(path), field, "regular expression")


HARMLESS = {
    "unsloth": r"(?:.*?(?:vision|language|text).*?(?:self_attn|attn|mlp).*?(?:q_proj|v_proj|fc1).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|v_proj)))",
    "llama-factory": r"^(?!.*(?:visual|multi_modal_projector)).*(?:q_proj|v_proj).*",
    "ms-swift": "^(model(?=\\.).*\\.(q_proj|v_proj)|"
    + "|".join(rf"visual\.part{part}(?=\.).*\.(qkv|proj)" for part in range(12))
    + ")$",
    "every-path": "|".join(
        rf"model\.layers\.{layer}\.(self_attn|mlp)\.({name})_proj" for layer in range(126) for name in "qkvo"
    ),
    "optional": r"(model\.)?(language_model\.)?layers\.\d+\.self_attn\.[qv]_proj|model.*[qv]_proj",
}


@pytest.mark.parametrize("name", HARMLESS)
def test_patterns_as_training_programs_write_them_are_read(name: str, tmp_path: Path) -> None:
    """Branches are tried one after the other: what they repeat does not multiply."""
    pair = copy_pair(tmp_path)
    config = read_adapter_config(change(pair, target_modules=HARMLESS[name]))
    assert not config.problems
    assert config.targets("model.layers.1.self_attn.q_proj")
    assert not config.targets("lm_head")


@pytest.mark.parametrize("field", ["exclude_modules", "alpha_pattern"])
def test_the_other_fields_are_judged_alike(field: str, tmp_path: Path) -> None:
    pair = copy_pair(tmp_path)
    path = change(pair, **{field: "(a+)+$" if field == "exclude_modules" else {"(a+)+$": 2}})
    assert_refused(pair, str(path), field, "regular expression")
