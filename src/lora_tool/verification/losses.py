"""The loss per token of a language model on a text: of the merged model, of base + adapter, and of the base alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lora_tool.errors import MissingDependency, UnsupportedAdapter
from lora_tool.plan.core.plan import Plan
from lora_tool.plan.merge.provenance import Provenance
from lora_tool.progress import StageWatch
from lora_tool.verification.batches import Batches
from lora_tool.verification.models import TextModels, asking
from lora_tool.verification.pairs import at_line
from lora_tool.verification.texts import LossEvidence, Texts

try:
    import torch
    from torch.nn.functional import cross_entropy
except ImportError as error:
    raise MissingDependency("torch", extra="merge") from error

WINDOW = 1024
"""Tokens that the models see at once."""
_LOGITS = 1 << 27
"""Logits of a batch: 0.5 GB in float32, or those of one window where the vocabulary is larger than 131,072."""


def prepare(provenance: Provenance, plan: Plan | None, texts: Texts) -> Callable[[StageWatch], LossEvidence]:
    """Return what measures the loss of all three models on the texts.

    What cannot be measured is refused here, before long work: raises `UnsupportedAdapter` for a model that is no causal
    language model or has no tokenizer, `BadConfig` for texts that are too short.
    """
    root = provenance.merged.root
    reading = asking(lambda: _Reading(provenance, plan, texts), root, "--text")
    return lambda watch: asking(lambda: reading.evidence(watch), root, "--text")


class _Reading(TextModels):
    """One comparison: the windows of all texts, and a run for each model."""

    def __init__(self, provenance: Provenance, plan: Plan | None, texts: Texts) -> None:
        super().__init__(provenance, plan, "--text")
        root = provenance.merged.root
        if self._classifier:
            raise UnsupportedAdapter(f"{root} is a classifier: --text measures the loss of language models")
        tokenizer, self._window = self._tokenizer(WINDOW)
        text = self._config.get_text_config()
        self._texts = texts
        ids = [window for line, words in texts.rows for window in self._windows(tokenizer, words)]
        if not ids:
            raise at_line(texts.path, texts.rows[0][0], "expected at least two tokens, so that one can be predicted")
        self._most = max(int(window.max()) for window in ids)
        if self._most >= text.vocab_size:
            raise UnsupportedAdapter(
                f"{root}: its tokenizer makes token {self._most}, but its vocabulary has {text.vocab_size}"
            )
        pad = getattr(text, "pad_token_id", None) or 0
        self._batches = Batches(ids, pad=pad, most=max(self._window, _LOGITS // text.vocab_size))
        self._tokens = sum(len(window) - 1 for window in ids)

    def _windows(self, tokenizer: Any, words: str) -> Iterator[torch.Tensor]:
        """Yield the token ids of a text in windows; a last token alone predicts nothing."""
        ids = torch.tensor(tokenizer(words, verbose=False)["input_ids"], dtype=torch.int32)
        return (window for window in torch.split(ids, self._window) if len(window) > 1)

    def evidence(self, watch: StageWatch) -> LossEvidence:
        """Return the losses; `watch` is asked for the progress, in bytes of weights that are run."""
        with watch(
            "reading the text", 3 * self._provenance.merged.weights.nbytes * len(self._batches)
        ) as self._advance:
            (base, unmerged, merged), streamed = self._run(self._all)
        return LossEvidence(
            source=str(self._texts.path),
            texts=len(self._texts.rows),
            tokens=self._tokens,
            window=self._window,
            merged=float(merged),
            unmerged=float(unmerged),
            base=None if base is None else float(base),
            streamed=streamed,
        )

    def _all(self, *, streamed: bool) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
        alone, config = self._provenance.base, self._base_config()
        known = self._most < config.get_text_config().vocab_size
        base = self._plain(alone, config, streamed=streamed) if known else None
        return base, self._unmerged(None, streamed=streamed), self._merged(streamed=streamed)

    def _answers(self, model: Any) -> torch.Tensor:
        """Return the mean loss of all tokens that can be predicted."""
        total = torch.zeros((), dtype=torch.float64)
        for _, ids, mask in self._batches:
            logits = model(input_ids=ids, attention_mask=mask).logits
            for row, words, length in zip(logits, ids, mask.sum(dim=1).tolist(), strict=True):
                total += cross_entropy(row[: length - 1].float(), words[1:length], reduction="sum")
            self._advance(self._provenance.merged.weights.nbytes)
        return total / self._tokens
