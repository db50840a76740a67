"""A README beside an adapter names no path of this machine."""

from __future__ import annotations

from pathlib import Path

from lora_tool.train.saving import clean_card

CARD = """---
base_model: {base}
library_name: peft
tags:
- base_model:adapter:{base}
- trl
---
This model is a fine-tuned version of [{base}](https://huggingface.co/{base}), or [None](https://huggingface.co/None).
See {base}/config.json.
"""


def test_a_local_base_is_named_by_its_last_part(tmp_path: Path) -> None:
    base = tmp_path / "models" / "mine"
    base.mkdir(parents=True)
    (tmp_path / "README.md").write_text(CARD.format(base=base))
    assert clean_card(tmp_path, str(base))
    text = (tmp_path / "README.md").read_text()
    assert str(tmp_path) not in text
    assert "base_model" not in text
    assert "None" not in text
    assert "fine-tuned version of `mine`, or `mine`." in text
    assert "- trl" in text
    assert not clean_card(tmp_path, str(base))


def test_a_base_from_the_hub_stays(tmp_path: Path) -> None:
    card = CARD.format(base="owner/name").replace(", or [None](https://huggingface.co/None)", "")
    (tmp_path / "README.md").write_text(card)
    assert not clean_card(tmp_path, "owner/name")
    assert (tmp_path / "README.md").read_text() == card


def test_no_card_is_no_error(tmp_path: Path) -> None:
    assert not clean_card(tmp_path, str(tmp_path))
