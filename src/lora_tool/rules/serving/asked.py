"""What a running server answered with an adapter and without it, which LT823 and LT824 judge."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from msgspec import Struct

from lora_tool.checkpoints import AdapterDir
from lora_tool.rules.engine.subjects import Subject

ROUNDING = 1e-6
"""What log probabilities may differ by where nothing differs: they are float32, written as decimals."""
COARSE = 0.02
"""What a server that computes in 16 bits may move log probabilities by."""
_TIMES = 4
"""How far the adapter's answers may be from PEFT's, in multiples of the distance that the base's have."""
_EXACT = 1e-4
"""What two programs may differ by in float32, whatever the base's answers do."""


class PeftEvidence(Struct, frozen=True, kw_only=True):
    """How far the server's answers are from those of transformers and PEFT, computed in float32."""

    expected: float
    """The largest difference that PEFT's adapter makes."""
    adapter: float
    """The largest distance of the server's answers with the adapter."""
    base: float
    """The largest distance of the server's answers without it."""

    @property
    def allowed(self) -> float:
        """What the server's arithmetic explains, by what it does to the base's answers."""
        return _TIMES * self.base + _EXACT

    @property
    def decides(self) -> bool:
        """Whether the adapter does more than the server's arithmetic explains."""
        return 2 * self.allowed < self.expected


class ServedEvidence(Struct, frozen=True, kw_only=True):
    """What a server gave with an adapter, and with the base of it.

    Each was asked twice, so `noise` is what the server's answers to one request differ by.
    """

    url: str
    adapter: str
    """What the server calls the adapter."""
    base: str
    program: str | None
    """The server's program, as `--for` calls it; None for one that is unknown."""
    what: str
    """What it gave: "log probabilities" of next tokens, or "scores"."""
    inputs: str
    """What was asked, in words."""
    values: int
    moved: float
    """The largest difference of an answer with the adapter from that of the base."""
    noise: float
    no_effect: bool = False
    """Whether ΔW is zero, so that nothing tells the two apart."""
    peft: PeftEvidence | None = None
    why_no_peft: str = ""

    @property
    def indistinct(self) -> float:
        """The largest difference that tells nothing."""
        return max(2 * self.noise, ROUNDING)

    @property
    def applied(self) -> bool:
        """Whether the answers differ by more than two answers to one request."""
        return self.moved > self.indistinct


class ServedSubject(Subject, frozen=True, kw_only=True, eq=False):
    """An adapter, and what a server that serves it answered."""

    checkpoint: AdapterDir
    served: ServedEvidence
    base: str | None = None
    """The path of its base, where that is here."""

    @property
    def named(self) -> Mapping[str, str]:
        """See `Subject`."""
        known = {"BASE": self.base, "SERVER": self.served.program, "ADAPTER": str(self.checkpoint.root)}
        return {name: shlex.quote(value) for name, value in known.items() if value is not None}
