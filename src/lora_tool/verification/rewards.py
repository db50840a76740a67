"""Ranking pairs of texts with a reward model, merged and unmerged: batches of texts, of which only rewards are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lora_tool.checkpoints import ModelDir
from lora_tool.core.errors import LoraToolError, MissingDependency, UnsupportedAdapter
from lora_tool.core.progress import StageWatch
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.merge.provenance import Provenance
from lora_tool.rules.merged.pairs import PairEvidence, Ranking
from lora_tool.verification.models import TextModels, asking
from lora_tool.verification.pairs import Pair, Pairs, Text, at_line

try:
    import torch
    from torch.nn.utils.rnn import pad_sequence
except ImportError as error:
    raise MissingDependency("torch", extra="merge") from error

LONGEST = 2048
"""Tokens of a text that are used: its last ones, where causal models read their reward. TRL trains on 1,024."""
_BATCH_TOKENS = 8192
"""Tokens of a batch, padding counted: enough that computing takes longer than reading weights, 0.5 GB in a 7B model."""


def prepare(provenance: Provenance, plan: Plan | None, pairs: Pairs) -> Callable[[StageWatch], PairEvidence]:
    """Return what ranks the pairs with the merged model, and with base + adapter where there are adapters.

    What cannot be asked is refused here, before long work: raises `UnsupportedAdapter` for a model that gives no reward
    or has no tokenizer, `BadConfig` for a pair that the chat template does not take.
    """
    root = provenance.merged.root
    ranking = asking(lambda: _Ranking(provenance, plan, pairs), root, "--pairs")
    return lambda watch: asking(lambda: ranking.evidence(watch), root, "--pairs")


def rank_alone(model: ModelDir, pairs: Pairs, watch: StageWatch) -> PairEvidence:
    """Return how a model that was not merged ranks the pairs; `watch` is asked for the progress. Raises as `prepare`."""
    return prepare(Provenance(merged=model, base=model, adapters=()), None, pairs)(watch)


class _Ranking(TextModels):
    """One comparison: the token ids of both texts of every pair, and a run for each model."""

    def __init__(self, provenance: Provenance, plan: Plan | None, pairs: Pairs) -> None:
        super().__init__(provenance, plan, "--pairs")
        root = provenance.merged.root
        if not self._classifier or self._config.num_labels != 1:
            has = f"has {self._config.num_labels} labels" if self._classifier else "has no head"
            raise UnsupportedAdapter(f"{root} {has}: --pairs ranks texts by the one reward of a reward model")
        tokenizer, self._longest = self._tokenizer(LONGEST)
        text = self._config.get_text_config()
        self._pairs = pairs
        self._cut = 0
        known: dict[bytes, int] = {}
        sides = [(pair, side) for pair in pairs.rows for side in (pair.chosen, pair.rejected)]
        self._ids: list[torch.Tensor] = []
        self._at = [self._place(self._tokens(tokenizer, *side, text.vocab_size), known) for side in sides]
        if getattr(text, "pad_token_id", None) is None:
            # padding begins after the last token that is not this one: it must not be what a text ends with
            ends = {int(ids[-1]) for ids in self._ids}
            text.pad_token_id = next((unused for unused in range(text.vocab_size) if unused not in ends), 0)
        self._batches = Batches(self._ids, pad=text.pad_token_id, most=_BATCH_TOKENS)

    def _tokens(self, tokenizer: Any, pair: Pair, side: Text, vocabulary: int) -> torch.Tensor:
        """Return the token ids of a text, as TRL's `RewardTrainer` makes them, the last ones of a long text."""
        end = tokenizer.eos_token or ""
        try:
            if isinstance(side, str):
                text, how = side.removesuffix(end) + end, {"add_special_tokens": True}
            else:
                text = tokenizer.apply_chat_template(side, tokenize=False, **pair.template)
                how = {"add_special_tokens": False}
            ids = tokenizer(text, **how)["input_ids"]
            if len(ids) > self._longest:
                self._cut += 1
                tokenizer.truncation_side = "left"
                ids = tokenizer(text, truncation=True, max_length=self._longest, **how)["input_ids"]
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            raise self._wrong(pair, f"the tokenizer does not take this pair: {reason}") from error
        if not ids or max(ids) >= vocabulary:
            found = f"token {max(ids)}, which is outside the model's vocabulary of {vocabulary}," if ids else "no token"
            raise self._wrong(pair, f"the tokenizer makes {found} of this pair")
        return torch.tensor(ids, dtype=torch.int32)

    def _place(self, ids: torch.Tensor, known: dict[bytes, int]) -> int:
        """Return where the text is among those that are run: the same text twice is one, and a pair of it is a tie."""
        place = known.setdefault(ids.numpy().tobytes(), len(known))
        if place == len(self._ids):
            self._ids.append(ids)
        return place

    def _wrong(self, pair: Pair, message: str) -> LoraToolError:
        return at_line(self._pairs.path, pair.line, message)

    def evidence(self, watch: StageWatch) -> PairEvidence:
        """Return how the models rank the pairs; `watch` is asked for the progress, in bytes of weights that are run."""
        models = 2 if self._provenance.adapters else 1
        total = self._provenance.merged.weights.nbytes * len(self._batches) * models
        with watch("ranking pairs", total) as self._advance:
            (unmerged, merged), streamed = self._run(self._both)
        return PairEvidence(
            source=str(self._pairs.path),
            lines=tuple(pair.line for pair in self._pairs.rows),
            merged=_ranked(merged),
            unmerged=None if unmerged is None else _ranked(unmerged),
            longest=self._longest,
            cut=self._cut,
            least=self._pairs.least,
            streamed=streamed,
        )

    def _both(self, *, streamed: bool) -> tuple[torch.Tensor | None, torch.Tensor]:
        unmerged = self._unmerged(None, streamed=streamed) if self._provenance.adapters else None
        return unmerged, self._merged(streamed=streamed)

    def _answers(self, model: Any) -> torch.Tensor:
        """Return the rewards of all texts, chosen and rejected in turn, in float32."""
        rewards = torch.empty(len(self._ids))
        for at, ids, mask in self._batches:
            rewards[at] = model(input_ids=ids, attention_mask=mask).logits.float().squeeze(-1)
            self._advance(self._provenance.merged.weights.nbytes)
        return rewards[self._at]


def _ranked(rewards: torch.Tensor) -> Ranking:
    both: Sequence[float] = rewards.tolist()
    return Ranking(chosen=tuple(both[::2]), rejected=tuple(both[1::2]))


class Batches:
    """Texts as token ids, in batches of like length: memory is bounded, and little of it is padding.

    It yields the numbers of the texts of each batch, their ids, and 1 where there is a token: [texts, tokens].

    A batch has up to `most` tokens, padding with `pad` counted, and one text at least; the longest texts come first.
    """

    def __init__(self, ids: Sequence[torch.Tensor], *, pad: int, most: int) -> None:
        self._ids = ids
        self._pad = pad
        self._numbers: list[list[int]] = []
        for text in sorted(range(len(ids)), key=lambda text: -len(ids[text])):
            batch = self._numbers[-1] if self._numbers else []
            if batch and (len(batch) + 1) * len(ids[batch[0]]) <= most:
                batch.append(text)
            else:
                self._numbers.append([text])

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
        for at in self._numbers:
            rows = [self._ids[text].long() for text in at]
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            yield at, pad_sequence(rows, batch_first=True, padding_value=self._pad), mask
