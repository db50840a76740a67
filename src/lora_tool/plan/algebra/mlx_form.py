"""An adapter as MLX-LM reads it: factors transposed, one rank, one scale, and its own `adapter_config.json`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lora_tool.adapter.mlx import transposed
from lora_tool.checkpoint import ModelDir
from lora_tool.formats.adapter_config import FILE_NAME
from lora_tool.formats.files import json_bytes
from lora_tool.keys import split_layer
from lora_tool.plan.algebra.factor_steps import step_of
from lora_tool.plan.algebra.serving_steps import padded, zero_rows
from lora_tool.plan.algebra.terms import Factors
from lora_tool.plan.core.factor_ops import Beside, Columns, Mix, SmallMatrix
from lora_tool.plan.core.ops import Assemble, Op, RowOp, copied_as
from lora_tool.plan.core.steps import SideFile, Step
from lora_tool.tensors import DType

_ALL_LAYERS = -1
"""MLX-LM puts LoRA on so many layers, counted from the last; a module without factors in the file stays as it is."""


def common_scale(sums: Sequence[Factors]) -> float:
    """Return the scaling that all modules have, which MLX-LM's config can say; 1 where they have several."""
    scales = {term.scale for each in sums for term in each.terms}
    return (scales.pop() or 1.0) if len(scales) == 1 else 1.0


def unscaled(factors: Factors, scale: float) -> Factors:
    """Return the module without the scaling that the config says."""
    return replace(factors, terms=tuple(replace(term, scale=term.scale / scale) for term in factors.terms))


def mlx_steps(
    factors: Factors, dtype: DType, turned: tuple[SmallMatrix, SmallMatrix] | None, rank: int
) -> Iterator[Step]:
    """Yield the steps that write lora_a, [in, rank], and lora_b, [rank, out], of zeros beyond the factors' rank."""
    missing = rank - (turned[0].columns if turned else factors.rank)
    a, b = (tuple(map(transposed, parts)) for parts in (factors.a_parts, factors.b_parts))
    if turned:
        down: Op = Mix(parts=a, matrix=padded(turned[1], missing))
        up: tuple[RowOp, ...] = (Mix(parts=b, matrix=turned[0], below=True),)
    else:
        alone = len(a) == 1 and not missing
        columns = tuple(Columns(tensor=part, count=part.shape[1]) for part in a)
        down = copied_as(dtype, a[0]) if alone else Beside(parts=columns, zeros=missing)
        up = tuple(
            copied_as(dtype, part)
            if term.scale == 1
            else Beside(parts=(Columns(tensor=part, count=factors.out, scale=term.scale),))
            for part, term in zip(b, factors.terms, strict=True)
        )
    rows = (*up, *zero_rows(b[0], missing))
    yield step_of(f"{factors.module}.lora_a", dtype, (factors.width, rank), down)
    yield step_of(
        f"{factors.module}.lora_b", dtype, (rank, factors.out), rows[0] if len(rows) == 1 else Assemble(parts=rows)
    )


def mlx_config(sums: Sequence[Factors], rank: int, scale: float) -> SideFile:
    """Return what `mlx_lm.tuner.utils.load_adapters` reads: it puts LoRA on the modules that `keys` names."""
    keys = sorted({_in_layer(each.module) for each in sums})
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys}
    content = {"fine_tune_type": "lora", "num_layers": _ALL_LAYERS, "lora_parameters": parameters}
    return SideFile(filename=FILE_NAME, content=json_bytes(content, indent=2), reason="written for MLX-LM")


def rope_notes(base: ModelDir | None) -> Iterator[str]:
    """Yield what of the base's config MLX-LM does not find where newer versions of transformers write it."""
    raw = base.config.raw if base and base.config else {}
    inner = raw.get("rope_parameters")
    if isinstance(inner, dict) and "rope_theta" in inner and "rope_theta" not in raw:
        yield f'mlx-lm reads "rope_theta" at the top level of config.json; add it there, as {base and base.root} does not have it'


def _in_layer(module: str) -> str:
    """Return a module's path inside its layer, which MLX-LM knows it by; outside of layers its whole path."""
    number, _ = split_layer(module)
    return module if number is None else module.partition(f".{number}.")[2]
