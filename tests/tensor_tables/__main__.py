"""Writes `model_tensors.jsonl`: which tensors a class of transformers has, and their shapes by its config's fields.

    python -m tests.tensor_tables [MODEL_TYPE…]

Each class of a directly stored architecture is built on the meta device under many small configs: every field of the
config is changed by itself, inner configs are null, switches come in pairs with what they change, and some changes
several at a time. `sampled` says which values the fields had on which anything depends. A name that is there under all of them is always
there; names that come and go together are one group. A dimension is the simplest product or sum of fields that gives
its size in all of the models; where there is none, it stays unknown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import torch
from transformers.utils import logging

from lora_tool.models import ARCHITECTURES
from lora_tool.models.model_tensors import TABLE
from tests.tensor_tables.classes import apart
from tests.tensor_tables.description import described
from tests.tensor_tables.sampling import sampled

_LEFT_OUT = frozenset(
    {
        "blt",  # several models in one
        "funnel",  # lists of blocks of layers
        "perceiver",  # its config lists sizes
        "reformer",  # `attn_layers` says how many layers there are
    }
)


def row(model_type: str) -> str:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    try:
        models = sampled(model_type)
        return json.dumps(described(models), separators=(",", ":")) if models else ""
    except Exception as error:  # noqa: BLE001 - a type that cannot be described has no row
        print(model_type, "is left out:", repr(error)[:300], file=sys.stderr)
        return ""


def main(asked: Sequence[str]) -> None:
    kept = (
        {} if not TABLE.exists() else {json.loads(line)["model_type"]: line for line in TABLE.read_text().splitlines()}
    )
    with ProcessPoolExecutor(2) as pool:
        wanted = [name for name in asked or ARCHITECTURES if name not in _LEFT_OUT]
        for model_type, line in zip(wanted, pool.map(row, wanted), strict=True):
            print(model_type, len(line), file=sys.stderr, flush=True)
            if line:
                kept[model_type] = line
            TABLE.write_text("".join(f"{kept[name]}\n" for name in sorted(kept)))
    for entry in [json.loads(kept[name]) for name in wanted if name in kept]:
        names = apart(entry["model_type"], entry["classes"])
        kept[entry["model_type"]] = json.dumps(entry | ({"apart": names} if names else {}), separators=(",", ":"))
    TABLE.write_text("".join(f"{kept[name]}\n" for name in sorted(kept)))


if __name__ == "__main__":
    main(sys.argv[1:])
