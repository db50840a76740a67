"""Whether documents that share a row see each other, found by behaviour: names of attentions and models tell too little.

Two rows are made by the trainer's own collator. They differ in the first document alone; if the logits of the second
differ, it sees the first. Mask-aware models give differences of 1e-6, leaking ones of 1 and more.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

LEAKING = frozenset(("opt", "falcon", "mpt", "bloom", "mamba", "mamba2", "falcon_mamba", "rwkv", "xlm", "ctrl"))
"""Model types that leaked when they were probed; asked only where a model cannot be probed itself."""

_LENGTH = 16
_TOLERANCE = {torch.float32: 1e-2, torch.float64: 1e-2}
_HALF_TOLERANCE = 5e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What the probe saw. `difference` is the largest change of a logit of the second document, in their deviations."""

    difference: float | None = None
    leaks: bool = False
    why_not: str | None = None


def probe(model: Any, collator: Any, *, packing: bool, sharded: bool) -> Probe:
    """Return whether documents leak in the rows that `collator` makes; `why_not` where the model cannot be run here."""
    training, why_not = model.training, "its weights are sharded"
    if not sharded:
        model.eval()
        try:
            with torch.no_grad():
                first, second = (_logits(model, collator, seed, packing=packing) for seed in (1, 2))
            difference = float((first - second).abs().max()) / (float(first.std()) or 1.0)
            limit = _TOLERANCE.get(next(model.parameters()).dtype, _HALF_TOLERANCE)
            return Probe(difference=difference, leaks=difference > limit)
        except Exception as error:  # noqa: BLE001 - remote code may raise anything; that is no reason not to train
            why_not = next(iter(str(error).splitlines()), type(error).__name__)
        finally:
            model.train(training)
    return Probe(leaks=model.config.model_type in LEAKING, why_not=why_not)


def _logits(model: Any, collator: Any, seed: int, *, packing: bool) -> torch.Tensor:
    """Return the logits of the second document, in float32; `seed` chooses the first one."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    vocabulary = min(inner.config.get_text_config().vocab_size, 1000)
    before, after = (
        torch.randint(0, vocabulary, (_LENGTH,), generator=torch.Generator().manual_seed(of)).tolist()
        for of in (seed, 0)
    )
    packed = [{"input_ids": before + after, "seq_lengths": [_LENGTH, _LENGTH]}]
    batch = collator(packed if packing else [{"input_ids": before}, {"input_ids": after}])
    taken = inspect.signature(inner.forward).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values())
    given = {
        name: value.to(inner.device) if isinstance(value, torch.Tensor) else value
        for name, value in batch.items()
        if name != "labels" and (anything or name in taken)
    }
    logits: torch.Tensor = inner(**given).logits
    return logits[0, -_LENGTH:].float()
