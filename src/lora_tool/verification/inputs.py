"""What both models are asked: the user's prompts, ours, or random token ids where no tokenizer was found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from lora_tool.core.errors import MissingDependency
from lora_tool.formats.files import is_file
from lora_tool.formats.tokenizer import FILE_NAMES
from lora_tool.verification.prompts import asked_of

try:
    import torch
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoTokenizer
except ImportError as error:
    raise MissingDependency("transformers", extra="merge") from error

LONGEST = 64
"""Tokens of a prompt that are used: its last ones."""


class Inputs(Struct, frozen=True, kw_only=True):
    """Token ids, right-padded, [prompts, tokens]; `mask` is 1 where there is a token. `what` says it in words."""

    ids: torch.Tensor
    mask: torch.Tensor
    what: str


def tokenized(folders: Sequence[Path], prompts: Sequence[str] | None, *, vocab_size: int, pad_id: int) -> Inputs:
    """Return the inputs by the first tokenizer that is in one of the folders; without one, random ids."""
    wanted, whose = asked_of(prompts)
    tokenizer = tokenizer_in(folders)
    rows: list[list[int]] = []
    if tokenizer is not None:
        rows = [[i for i in tokenizer(text)["input_ids"][-LONGEST:] if 0 <= i < vocab_size] for text in wanted]
    if not rows or not all(rows):
        shape = (len(wanted), min(16, LONGEST))
        ids = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(0))
        ids[ids == pad_id] = (pad_id + 1) % vocab_size
        why = (
            "no tokenizer was found"
            if tokenizer is None
            else "the tokenizer's tokens are not in the model's vocabulary"
        )
        return Inputs(ids=ids, mask=torch.ones_like(ids), what=f"random token ids instead of {whose}: {why}")
    ids = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=pad_id)
    mask = pad_sequence([torch.ones(len(row), dtype=torch.long) for row in rows], batch_first=True)
    return Inputs(ids=ids, mask=mask, what=whose)


def tokenizer_in(folders: Sequence[Path]) -> Any:
    """Return the first tokenizer that is in one of the folders and can be loaded without its code; None without one."""
    for folder in folders:
        if not any(is_file(folder / name) for name in FILE_NAMES):
            continue  # transformers would make one without words
        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception:  # noqa: BLE001, S112 - whatever is wrong with it, there is another, or random ids
            continue
    return None
