"""What modules are called, and in what order they stand, in tables and pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

_ORDER = (
    ("wte", "embed_tokens", "word_embeddings", "embeddings"),
    ("qkv_proj", "query_key_value", "qkv", "Wqkv", "c_attn", "in_proj", "att_proj"),
    ("q_proj", "query", "q", "wq", "q_lin", "to_q"),
    ("q_a_proj",),
    ("q_b_proj",),
    ("kv_a_proj_with_mqa",),
    ("kv_b_proj",),
    ("k_proj", "key", "k", "wk", "k_lin", "to_k"),
    ("v_proj", "value", "v", "wv", "v_lin", "to_v"),
    ("o_proj", "out_proj", "dense", "o", "wo", "out_lin", "attn_out", "to_out", "attn.c_proj"),
    ("gate_up_proj",),
    ("gate_proj", "w1", "wi_0"),
    ("up_proj", "w3", "wi_1", "wi", "fc1", "fc_in", "c_fc", "lin1", "dense_h_to_4h"),
    ("down_proj", "w2", "fc2", "fc_out", "lin2", "dense_4h_to_h", "mlp.c_proj"),
)
"""Modules as a layer computes them, each place with the names that architectures give it."""
_PLACES = {name: place for place, names in enumerate(_ORDER) for name in names}


def place(target: str) -> int:
    """Return what sorts targets as a layer computes them: q, k, v, o, gate, up, down; those of other names come last.

    A `target` is a path or its end, perhaps with a parameter's name, and with anything in brackets behind it.
    """
    parts = target.partition(" ")[0].removesuffix(".weight").removesuffix(".bias").split(".")
    ends = (".".join(parts[at:]) for at in range(max(len(parts) - 2, 0), len(parts)))
    return min((_PLACES[end] for end in ends if end in _PLACES), default=len(_ORDER))


def short_names(paths: Iterable[str]) -> Mapping[str, str]:
    """Return for each dotted path its shortest suffix that no other path ends with, keeping what a `*` numbers."""
    listed = set(paths)
    endings = Counter(suffix for path in listed for suffix in _suffixes(path))
    return {path: next((suffix for suffix in _suffixes(path) if endings[suffix] == 1), path) for path in listed}


def _suffixes(path: str) -> Iterator[str]:
    parts = path.split(".")
    # `experts.*.gate_proj` says more than `gate_proj`: begin before the last number that is not the layer's
    stars = [at for at, part in enumerate(parts) if part == "*"]
    begin = min(stars[-1] - 1, len(parts) - 1) if len(stars) > 1 else len(parts) - 1
    yield from (".".join(parts[at:]) for at in range(max(begin, 0), -1, -1))
