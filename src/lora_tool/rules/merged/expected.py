"""What a merged model should be, as a plan tells the rules: apart from them, because most plans are not judged by it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from msgspec import Struct

from lora_tool.core.tensors import TensorSpec


class ExpectedFile(Protocol):
    """A file beside the weights: copied from `source`, or with `content`."""

    @property
    def filename(self) -> str: ...
    @property
    def source(self) -> Path | None: ...
    @property
    def content(self) -> bytes | None: ...


class Expected(Struct, frozen=True, kw_only=True, eq=False):
    """What base and adapter give: the merged model's tensors by name, and the files beside them."""

    tensors: Mapping[str, TensorSpec]
    files: tuple[ExpectedFile, ...]
