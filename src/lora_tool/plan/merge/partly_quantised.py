"""Parameters of which only some rows are quantised on disk, as a stack of experts of which one is not.

Where no adapter changes them, each tensor is written as it would be alone. W + ΔW of them would be rounded twice.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from lora_tool.errors import UnsupportedAdapter
from lora_tool.formats.quantised.encodings import encoding_of, rounded
from lora_tool.names.model import RowMapping
from lora_tool.tensors import TensorTable


def of_one_type(made: RowMapping, disk: TensorTable) -> tuple[TensorTable, bool]:
    """Return the tensors that a parameter is made of, and whether only some of them are quantised.

    Those are rounded to the type of the others when they are read.
    """
    held = {piece.name: disk[piece.name] for piece in made.pieces or ()}
    plain = {tensor.dtype for tensor in held.values() if encoding_of(tensor) is None}
    if len(plain) != 1 or all(tensor.dtype in plain for tensor in held.values()):
        return disk, False
    (dtype,) = plain
    return {name: rounded(tensor, dtype) for name, tensor in held.items()}, True


def require_unchanged(root: Path, changed: Collection[str]) -> None:
    """Raise `UnsupportedAdapter` for LoRA on such parameters of the base in `root`."""
    if changed:
        raise UnsupportedAdapter(
            f"{root}: the adapter changes `{min(changed)}`, which transformers makes of tensors of which some are quantised "
            "and some are not",
            hint="merge into the 16-bit model that it was made from: `base=MODEL`",
        )
