"""What a base answers with an adapter and without it, next tokens or scores, as transformers and PEFT compute it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core.errors import MissingDependency, UnsupportedAdapter
from lora_tool.plans.merge.provenance import Provenance
from lora_tool.rules.adapter.lt3_head import head_weight, saved_heads
from lora_tool.rules.judging import Judge
from lora_tool.rules.serving.asked import PeftEvidence
from lora_tool.verification.inputs import tokenized, tokenizer_in
from lora_tool.verification.models import Models, asking
from lora_tool.verification.openai_server import MOST, NextTokens, farthest

try:
    import torch
    from peft.tuners.lora import LoraLayer
    from transformers import AutoModelForSequenceClassification
except ImportError as error:
    raise MissingDependency("torch", extra="merge") from error

_OPTION = "--served"
_HOLE = "\ufffd"
"""What a token is written as that is a part of a character."""


def prepare(adapter: AdapterDir, base: ModelDir, prompts: Sequence[str] | None, *, scores: bool) -> Predictions:
    """Return the prompts for `base`, ready for next tokens or `scores` to be compared.

    Raises `UnsupportedAdapter` where transformers or PEFT cannot build the models, and as `plan_merge`.
    """
    made = _Scores if scores else Predictions
    return asking(lambda: made(adapter, base, prompts), base.root, _OPTION)


class Predictions(Models):
    """The prompts as token ids, and the log probabilities of every token after each."""

    def __init__(self, adapter: AdapterDir, base: ModelDir, prompts: Sequence[str] | None) -> None:
        provenance = Provenance(merged=base, base=base, adapters=(adapter,))
        super().__init__(provenance, provenance.plan_or_why_not()[0], _OPTION)
        self._set_task(adapter)
        text = self._config.get_text_config()
        if getattr(text, "pad_token_id", None) is None:
            text.pad_token_id = 0
        self._folders = [adapter.root, base.root]
        found = tokenized(self._folders, prompts, vocab_size=text.vocab_size, pad_id=text.pad_token_id)
        self.what = found.what
        self.ids: list[list[int]] = [
            row[:length].tolist() for row, length in zip(found.ids, found.mask.sum(dim=1).tolist(), strict=True)
        ]

    def _set_task(self, adapter: AdapterDir) -> None:
        """Return if the base predicts tokens. Raises `UnsupportedAdapter`."""
        if self._classifier:
            raise UnsupportedAdapter(f"{self._provenance.base.root} is a classifier, {adapter.root} is of none")

    def compared(self, served: Sequence[NextTokens], served_base: Sequence[NextTokens]) -> PeftEvidence:
        """Return how far a server's answers to the `ids` are from those of PEFT, which runs both models for this.

        Raises `UnsupportedAdapter` as `asking`, and for tokens that are said by a text that more than one has.
        """
        one, other = self._by_id(served), self._by_id(served_base)
        (adapter, base), _ = asking(lambda: self._run(self._both), self._provenance.base.root, _OPTION)
        known = adapter.shape[1]
        if any(max(answer) >= known for answer in (*one, *other)):
            raise UnsupportedAdapter(f"the server's answers have more than the {known} of {self._provenance.base.root}")
        return PeftEvidence(
            expected=farthest(_likeliest(adapter), _likeliest(base)),
            adapter=_farthest(one, adapter),
            base=_farthest(other, base),
        )

    def _both(self, *, streamed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return self._unmerged(None, streamed=streamed), self._merged(streamed=streamed)

    def _answers(self, model: Any) -> torch.Tensor:
        """Return the log probabilities of the next token, [prompts, vocabulary]."""
        found = [model(input_ids=torch.tensor([ids])).logits[0, -1].float().log_softmax(-1) for ids in self.ids]
        return torch.stack(found)

    def _by_id(self, answers: Sequence[NextTokens]) -> list[dict[int, float]]:
        """Return the answers with the ids of tokens. Raises `UnsupportedAdapter` where one has none that is known."""
        texts: dict[str, int] = {}
        if any(isinstance(token, str) for answer in answers for token in answer):
            tokenizer = tokenizer_in(self._folders)
            written = tokenizer.batch_decode([[at] for at in range(len(tokenizer))]) if tokenizer else []
            times = Counter(written)
            texts = {text: at for at, text in enumerate(written) if _HOLE not in text and times[text] == 1}
        found = [{texts.get(str(token), token): value for token, value in answer.items()} for answer in answers]
        known = [{at: value for at, value in answer.items() if isinstance(at, int)} for answer in found]
        if not all(known):
            raise UnsupportedAdapter("the server says tokens by their text, and more than one token has such a text")
        return known


class _Scores(Predictions):
    """The prompts as token ids, and the scores of each: with LoRA, and with the adapter's head alone."""

    def _set_task(self, adapter: AdapterDir) -> None:
        head = head_weight(saved_heads(Judge(rules=()).subject(adapter)))
        if head is None:
            raise UnsupportedAdapter(f"{adapter.root} has no classifier head")
        self._classifier, self._auto = True, AutoModelForSequenceClassification
        self._config.num_labels = head.shape[0]

    def _both(self, *, streamed: bool) -> tuple[torch.Tensor, torch.Tensor]:
        adapter, base = self._unmerged(None, streamed=streamed)
        return adapter, base

    def _answers(self, model: Any) -> torch.Tensor:
        """Return the scores with LoRA and those without, [2, prompts, labels]."""
        found = [self._scores(model)]
        for module in model.modules():
            if isinstance(module, LoraLayer):
                module.scaling = dict.fromkeys(module.scaling, 0.0)
        return torch.stack([*found, self._scores(model)])

    def _scores(self, model: Any) -> torch.Tensor:
        return torch.stack([model(input_ids=torch.tensor([ids])).logits[0].float() for ids in self.ids])


def _likeliest(rows: torch.Tensor) -> list[NextTokens]:
    """Return of each row what a server would say of it."""
    values, tokens = rows.topk(min(MOST, rows.shape[1]))
    return [dict(zip(*pair, strict=True)) for pair in zip(tokens.tolist(), values.tolist(), strict=True)]


def _farthest(answers: Sequence[dict[int, float]], rows: torch.Tensor) -> float:
    """Return the largest distance of a server's log probability from that in the row of the same prompt."""
    pairs = zip(answers, rows, strict=True)
    return max(abs(value - float(row[at])) for answer, row in pairs for at, value in answer.items())
