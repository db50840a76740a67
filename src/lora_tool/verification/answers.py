"""Asking a merged model, and its base with the adapter unmerged, the same; and measuring what rounding explains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lora_tool.core.errors import MissingDependency
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.merge.provenance import Provenance
from lora_tool.rules.merged.evidence import OutputEvidence
from lora_tool.verification.inputs import Inputs, tokenized
from lora_tool.verification.models import Models, asking

try:
    import torch
except ImportError as error:
    raise MissingDependency("torch", extra="merge") from error

_BATCH = 8
_POSITIONS = 4
"""Last positions of each prompt whose logits are compared: a vocabulary of 150,000 takes 0.6 MB each."""
_NOISE = 1e-5
"""What float32 runs of one model may differ by, relative to the largest value; layers add roundoffs of 6e-8."""


def ask(provenance: Provenance, plan: Plan | None, *, prompts: Sequence[str] | None = None) -> OutputEvidence:
    """Return how far the answers of the merged model and of base + adapter are apart, both computed in float32.

    Where the base is stored as it is in memory, a layer at a time is read from the disk; else the models are loaded
    whole, one after the other. No code of a checkpoint is run. Raises `UnsupportedAdapter` where transformers or PEFT
    cannot build or run the models.
    """
    return asking(lambda: _Asking(provenance, plan, prompts).evidence(), provenance.merged.root, "--logits")


class _Asking(Models):
    """One comparison: the inputs, and a run for each model."""

    def __init__(self, provenance: Provenance, plan: Plan | None, prompts: Sequence[str] | None) -> None:
        super().__init__(provenance, plan, "--logits")
        text = self._config.get_text_config()
        if getattr(text, "pad_token_id", None) is None:
            text.pad_token_id = 0
        self._inputs = tokenized(self._folders, prompts, vocab_size=text.vocab_size, pad_id=text.pad_token_id)

    def evidence(self) -> OutputEvidence:
        runs, streamed = self._run(self._all)
        return _evidence(*runs, what="scores" if self._classifier else "logits", inputs=self._inputs, streamed=streamed)

    def _all(self, *, streamed: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the answers of base + adapter, of the merged model, and of base + adapter with rounding's noise."""
        unmerged, merged = self._unmerged(None, streamed=streamed), self._merged(streamed=streamed)
        return unmerged, merged, self._unmerged(self._noise(), streamed=streamed)

    def _answers(self, model: Any) -> torch.Tensor:
        """Return the scores, [texts, labels], or the last logits of each prompt, [positions, vocabulary]. Float32."""
        found = []
        for at in range(0, len(self._inputs.ids), _BATCH):
            ids, mask = self._inputs.ids[at : at + _BATCH], self._inputs.mask[at : at + _BATCH]
            logits = model(input_ids=ids, attention_mask=mask).logits.float()
            if self._classifier:
                found.append(logits)
                continue
            for row, length in zip(logits, mask.sum(dim=1).tolist(), strict=True):
                found.append(row[max(0, length - _POSITIONS) : length].clone())
        return torch.cat(found)


def _evidence(
    unmerged: torch.Tensor, merged: torch.Tensor, moved: torch.Tensor, *, what: str, inputs: Inputs, streamed: bool
) -> OutputEvidence:
    apart, explained = (merged - unmerged).abs(), (moved - unmerged).abs()
    causal = what == "logits"
    labels = unmerged.shape[-1]
    return OutputEvidence(
        what=what,
        inputs=inputs.what,
        values=unmerged.numel(),
        largest=float(apart.max()),
        mean=float(apart.mean()),
        explained_largest=float(explained.max()),
        explained_mean=float(explained.mean()),
        noise=_NOISE * max(1.0, float(unmerged.abs().max())),
        divergence=_divergence(unmerged, merged) if causal else None,
        explained_divergence=_divergence(unmerged, moved) if causal else None,
        same_choice=float((unmerged.argmax(-1) == merged.argmax(-1)).float().mean()) if labels > 1 else None,
        rank_agreement=_kendall(unmerged[:, 0], merged[:, 0]) if labels == 1 else None,
        streamed=streamed,
    )


def _divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """Return the mean over positions of KL(p ‖ q) of the next token, in nats."""
    log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())


def _kendall(first: torch.Tensor, second: torch.Tensor) -> float | None:
    """Return Kendall's tau-b of two lists; None where one of them is all ties."""
    one, other = (torch.sign(values[:, None] - values[None, :]) for values in (first, second))
    untied = float(one.count_nonzero() * other.count_nonzero()) ** 0.5
    return float((one * other).sum()) / untied if untied else None
