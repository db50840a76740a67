"""Texts as token ids in batches of like length, so that memory is bounded and little of it is padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lora_tool.core.errors import MissingDependency

try:
    import torch
    from torch.nn.utils.rnn import pad_sequence
except ImportError as error:
    raise MissingDependency("torch", extra="merge") from error


class Batches:
    """Yields the numbers of the texts of each batch, their ids, and 1 where there is a token: [texts, tokens].

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
