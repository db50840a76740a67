"""Where factors wait that are computed from whole weights, until they are written into an adapter."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from lora_tool.core.tensors import FileStamp, StoredTensor

if TYPE_CHECKING:
    import numpy.typing as npt


class Spool(Protocol):
    """Keeps computed factors until they are written into the adapter."""

    def add(self, name: str, values: npt.NDArray[Any]) -> StoredTensor:
        """Store a float32 array, and return it as a tensor of that name."""

    def stamps(self) -> tuple[FileStamp, ...]:
        """Return the stamps of its files, once every array is added."""


OpenSpool: TypeAlias = Callable[[], Spool]
"""Gives the spool of a plan: opened only where something is computed from whole weights."""
