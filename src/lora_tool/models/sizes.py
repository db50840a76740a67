"""The sizes that a config means: products and sums of its fields, under the names that its model type has for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from lora_tool.formats.model_config import ModelConfig


class Sizes:
    """The fields of one config that decide shapes, and those that follow others where they are left out."""

    def __init__(self, row: Mapping[str, Any], config: ModelConfig) -> None:
        self._raw = config.raw
        self._row = row

    @property
    def tied(self) -> bool | None:
        """Return whether the config ties the embeddings to the output layer."""
        text = self._raw.get("text_config")
        said = self._raw.get("tie_word_embeddings", (text if isinstance(text, dict) else {}).get("tie_word_embeddings"))
        told: bool | None = said if isinstance(said, bool) else self._row["tie_word_embeddings"]
        return told

    @property
    def doubtful(self) -> bool:
        """Whether the config has a field that the class reads, and that the table does not know."""
        head_dim = self._raw.get("head_dim")
        usual = self.value("hidden_size/num_attention_heads")
        return any(
            self._raw.get(name) is not None and not (name == "head_dim" and head_dim == usual)
            for name in self._row["undeclared"]
        )

    def value(self, expression: str | int | None, *, deep: bool = True) -> int | None:
        """Return the size that an expression of the table means under this config, None where it is not known."""
        if not isinstance(expression, str):
            return expression
        total = 0
        for term in expression.split("+"):
            above, *below = term.split("/")
            factors = [self._field(name, deep=deep) for name in above.split("*")]
            divisors = [self._field(name, deep=deep) for name in below]
            known = [each for each in (*factors, *divisors) if each is not None]
            if len(known) < len(factors) + len(divisors) or 0 in known[len(factors) :]:
                return None
            total += prod(known[: len(factors)]) // prod(known[len(factors) :])
        return total

    def left_out(self, expressions: Iterable[str | int | None]) -> list[str]:
        """Return the config's own fields that decide these sizes, follow no other, and have no number in it."""
        words = (word for each in expressions if isinstance(each, str) for word in re.split(r"[+*/]", each))
        fields = {word for word in words if not word.lstrip("-").isdecimal() and word != "num_labels"}
        # of an inner config transformers itself leaves out what has its default
        return sorted(each for each in fields if "." not in each and self._field(each, deep=True) is None)

    def _field(self, name: str, *, deep: bool) -> int | None:
        if name.lstrip("-").isdecimal():
            return int(name)
        if name == "num_labels":
            return None
        found: Any = self._raw
        for part in name.split("."):
            found = found.get(part, found.get(self._row["aliases"].get(part))) if isinstance(found, dict) else None
        if type(found) is int:
            return found
        follows = self._row["follows"].get(name) if found is None and deep else None
        return self.value(follows, deep=False)
