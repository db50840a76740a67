"""Records with abstract methods: what msgspec's metaclass and the standard library's are together."""

from __future__ import annotations

from abc import ABCMeta

from msgspec import StructMeta


class AbstractRecord(StructMeta, ABCMeta):
    """The metaclass of records of which none can be made before all abstract methods are there."""
