"""Dialects of names: LoRA under the names that training programs have for modules, and PEFT does not know.

Read in their sources of 2026-08: tinker-cookbook `weights/_adapter.py`, NeMo Automodel `moe/state_dict_mixin.py`. Tinker
has a factor of all experts in one tensor, [experts, r, in] and [experts, out, r], whose first dimension is 1 where all
experts share it; `w1`, `w3` and `w2` are gate, up and down.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.adapters.mlx import EXPERTS
from lora_tool.adapters.view import AdapterView, view_of
from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core import keys
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.keys import PREFIX, AdapterKey, Part
from lora_tool.core.records import kept
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.adapter_config import adapter_config
from lora_tool.formats.files import read_object

_STACK = 3
_STACKED = re.compile(r"(?P<before>.+\.experts)\.(?P<matrix>w[123])")
_MATRICES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


class Dialect(Struct, frozen=True, kw_only=True):
    """Names of one program that stand for something else than in PEFT."""

    program: str
    pattern: re.Pattern[str]
    """Of a module's path, or of a tensor that is no part of LoRA to PEFT."""
    means: str
    """What a module of the pattern is."""
    renamed: str | None = None
    """The path that PEFT has for it, as `re.sub` takes it; None where its tensors become others."""
    way_out: str | None = None
    """What to do where `translated` has no exact form for it."""


_CUT = "merge it with the program that trained it, and give the merged model"
DIALECTS = (
    Dialect(
        program="Tinker",
        pattern=re.compile(r"(?:model\.)?unembed_tokens"),
        means="the output layer `lm_head`",
        renamed="lm_head",
    ),
    Dialect(program="Tinker", pattern=_STACKED, means="a matrix of all experts"),
    Dialect(
        program="Tinker",
        pattern=re.compile(r".+\.linear_attn\.in_proj_[qkv]"),
        means="some of the rows of `in_proj_qkv`",
        way_out=_CUT,
    ),
    Dialect(
        program="NeMo Automodel",
        pattern=re.compile(r".+\.experts\.lora_(?:gate_and_up|down)_[AB]"),
        means="a factor of all experts",
        way_out="save it again with a version of it that writes the LoRA of this model by transformers' names",
    ),
)


class Foreign(Struct, frozen=True, kw_only=True):
    """What an adapter has under the names of a dialect."""

    dialect: Dialect
    path: str
    tensor: str
    """The name of one tensor of it."""


@kept
def foreign_in(adapter: AdapterDir) -> tuple[Foreign, ...]:
    """Return the first of an adapter's modules under the names of each dialect."""
    view = view_of(adapter)
    held = {layer.target: layer.any_tensor for layer in view.kinds}
    held |= {item.name: item.tensor for item in view.parts(Part.PLAIN)}
    return tuple(
        Foreign(dialect=dialect, path=path, tensor=held[path].name)
        for dialect in DIALECTS
        if (path := next((path for path, tensor in held.items() if _is_of(dialect, path, tensor)), None)) is not None
    )


def _is_of(dialect: Dialect, path: str, tensor: StoredTensor) -> bool:
    stacked = dialect.pattern is not _STACKED or len(tensor.shape) == _STACK
    return stacked and dialect.pattern.fullmatch(path) is not None


class Translated(Struct, frozen=True, kw_only=True):
    """An adapter of a dialect under PEFT's names, and its fields of PEFT's config."""

    adapter: AdapterDir
    fields: Mapping[str, Any]


def translated(view: AdapterView, base: ModelDir | None) -> Translated:
    """Return the adapter under PEFT's names, with the bits of every factor.

    `base` names the matrices of its experts. Raises `UnsupportedAdapter` for a dialect without an exact form, and
    where experts are missing.
    """
    for each in foreign_in(view.adapter):
        if each.dialect.way_out is not None:
            raise UnsupportedAdapter(
                f"{view.adapter.root}: `{each.path}` is {each.dialect.program}'s name of {each.dialect.means}",
                hint=each.dialect.way_out,
            )
    adapter, table = view.adapter, dict[str, StoredTensor]()
    counts = _counts(view)
    for name, key in adapter.keys.items():
        for new, tensor in _in_peft(view, key, adapter.tensors[name], counts, base):
            table[new] = replace(tensor, spec=replace(tensor.spec, name=new))
    parsed = {name: keys.parse(name) for name in table}
    path = view.config.path
    fields = {**read_object(path), "target_modules": _targets(parsed, base)}
    return Translated(
        adapter=replace(
            adapter,
            config=adapter_config(fields, path),
            weights=replace(adapter.weights, tensors=table),
            keys=parsed,
        ),
        fields=fields,
    )


def _counts(view: AdapterView) -> Mapping[str, int]:
    """Return how many experts each module of experts has, by the largest of its factors."""
    counts: dict[str, int] = {}
    for layer in view.layers:
        if match := _STACKED.fullmatch(layer.target):
            sizes = (tensor.shape[0] for tensor in layer.parts.values() if len(tensor.shape) == _STACK)
            counts[match["before"]] = max(*sizes, counts.get(match["before"], 0), 0)
    return counts


def _in_peft(
    view: AdapterView, key: AdapterKey, tensor: StoredTensor, counts: Mapping[str, int], base: ModelDir | None
) -> Iterator[tuple[str, StoredTensor]]:
    """Yield PEFT's name and tensor, or those of each expert."""
    path = view.paths[key.module]
    match = _STACKED.fullmatch(path)
    if match is None or len(tensor.shape) != _STACK:
        for dialect in DIALECTS:
            if dialect.renamed is not None and dialect.pattern.fullmatch(path):
                path = dialect.renamed
        yield replace(key, module=path).canonical, tensor
        return
    before, count = match["before"], counts[match["before"]]
    if tensor.shape[0] not in (1, count):
        raise UnsupportedAdapter(
            f"{tensor.path}: `{tensor.name}` is of {tensor.shape[0]} experts, and other factors of `{before}` of {count}",
            hint="save it again where it was trained, with all of its experts",
        )
    named = _names(before, count, tensor, base)
    each = tensor.nbytes // tensor.shape[0]
    spec = replace(tensor.spec, shape=tensor.shape[1:])
    for expert in range(count):
        own = StoredTensor(spec=spec, spans=tuple(tensor.part(expert * each if tensor.shape[0] > 1 else 0, each)))
        yield f"{PREFIX}{before}.{expert}.{named[_MATRICES[match['matrix']]]}.{key.part.value}.{key.leaf}", own


def _names(before: str, count: int, tensor: StoredTensor, base: ModelDir | None) -> Mapping[str, str]:
    """Return what the base calls the matrices of its experts, of which it must have as many."""
    held = base.modules if base is not None else frozenset()
    named = next((each for each in EXPERTS if f"{before}.0.{each['gate_proj']}" in held), None)
    if named is None:
        why = "only the base has their names" if base is None else f"{base.root} has no single experts there"
        raise UnsupportedAdapter(
            f"{tensor.path}: `{tensor.name}` is Tinker's LoRA on all experts of `{before}`, and {why}",
            hint="give the model that it was trained on: `base=MODEL`",
        )
    whole = sum(name.startswith(f"{before}.") and name.endswith(f".{named['gate_proj']}") for name in held)
    if whole != count:
        raise UnsupportedAdapter(
            f"{tensor.path}: `{before}` has LoRA on {count} experts, but the base has {whole}",
            hint="save it again where it was trained, with all of its experts",
        )
    return named


def _targets(parsed: Mapping[str, AdapterKey], base: ModelDir | None) -> list[str]:
    """Return the ends of the modules' names where the base has no other module that ends so, else their paths.

    Tinker writes "all-linear", by which PEFT means no output layer.
    """
    modules = {key.module for key in parsed.values() if key.part in (Part.LORA_A, Part.EMBEDDING_A)}
    ends = {module.rpartition(".")[2] for module in modules}
    others = (name for name in (base.modules if base is not None else ()) if name not in modules)
    exact = base is not None and all(name.rpartition(".")[2] not in ends for name in others)
    return sorted(ends if exact else modules)
