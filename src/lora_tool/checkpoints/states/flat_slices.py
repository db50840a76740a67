"""The shapes of tensors whose files hold only their elements: FSDP1's local state dicts.

`FullyShardedDataParallel` lays the parameters of a unit one after the other and cuts what that makes in equal parts
(torch 2.13 `distributed/fsdp/_flat_param.py`). With LOCAL_STATE_DICT and `use_orig_params` each rank saves what it has
of each parameter, as a vector; their shapes stand nowhere. Those of LoRA follow: of a module with a weight of
out · in elements the factors have r · in and out · r, so that r² is their product divided by the weight's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from lora_tool.checkpoints.states.frozen_heads import is_new_head
from lora_tool.core import keys
from lora_tool.core.keys import AdapterKey, Part
from lora_tool.models.ends import is_end

Shape = tuple[int, ...]
_VECTOR = re.compile(r"(bias|norm\w*\.weight|layernorm\w*\.weight|ln_\w+\.weight)\Z", re.IGNORECASE)


def flat_shapes(numels: Mapping[str, int], *, hidden: int | None) -> dict[str, Shape]:
    """Return the shapes of those tensors for which they are known, from how many elements each has.

    `hidden` is the model's hidden size, from which those of heads and embeddings saved whole follow. Where the base's
    weight is there as well, r is known, and every shape of the module with it; nothing is guessed.
    """
    parsed = {name: keys.parse(keys.unwrapped(name)) for name in numels}
    by_part: dict[tuple[str, Part, str | None], str] = {}
    for name, key in parsed.items():
        if key.leaf == "weight" or key.part in (Part.EMBEDDING_A, Part.EMBEDDING_B):
            by_part[key.module, key.part, key.adapter_name] = name
    shapes: dict[str, Shape] = {}
    for name, key in parsed.items():
        if _is_vector(key):
            shapes[name] = (numels[name],)
        elif key.part in (Part.LORA_A, Part.EMBEDDING_A):
            other = Part.LORA_B if key.part is Part.LORA_A else Part.EMBEDDING_B
            below = by_part.get((key.module, other, key.adapter_name))
            base = by_part.get((key.module, Part.BASE_LAYER, None))
            if below is not None and base is not None:
                shapes |= _of_pair(name, below, base, numels)
        elif hidden and _is_wide(key) and numels[name] % hidden == 0:
            shapes[name] = (numels[name] // hidden, hidden)
    vectors = (name for name, key in parsed.items() if key.part is Part.MAGNITUDE)  # of matrices: one for each row
    return shapes | {
        name: (numels[name],) for name in vectors if _has_rows(parsed[name], numels[name], shapes, by_part)
    }


def _is_vector(key: AdapterKey) -> bool:
    if key.part is Part.LORA_B:
        return key.leaf == "bias"
    whole = key.part in (Part.PLAIN, Part.SAVED_MODULE, Part.BASE_LAYER)
    return whole and _VECTOR.search(f"{key.module}.{key.leaf}") is not None


def _has_rows(
    key: AdapterKey,
    rows: int,
    shapes: Mapping[str, Shape],
    by_part: Mapping[tuple[str, Part, str | None], str],
) -> bool:
    """Return whether the lora_B beside a magnitude is a matrix of so many rows."""
    below = by_part.get((key.module, Part.LORA_B, key.adapter_name))
    return below is not None and shapes.get(below, ())[:1] == (rows,)


def _is_wide(key: AdapterKey) -> bool:
    """Return whether it is a matrix with a column for each element of a hidden state: of a head, an embedding, or the
    tokens of one.
    """
    if key.part is Part.TOKENS_DELTA:
        return is_end(key.module)
    if key.part is not Part.SAVED_MODULE:
        return False
    return key.leaf is not None and key.leaf.endswith("weight") and (is_new_head(key.module) or is_end(key.module))


def _of_pair(above: str, below: str, base: str, numels: Mapping[str, int]) -> dict[str, Shape]:
    """Return the shapes [r, in], [out, r] and [out, in], nothing where no whole r explains the numbers."""
    if not numels[base]:
        return {}
    square, rest = divmod(numels[above] * numels[below], numels[base])
    rank = math.isqrt(square)
    if rest or rank * rank != square or not rank or numels[above] % rank or numels[below] % rank:
        return {}
    inner, outer = numels[above] // rank, numels[below] // rank
    return {above: (rank, inner), below: (outer, rank), base: (outer, inner)}
