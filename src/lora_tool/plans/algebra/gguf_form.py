"""An adapter as llama.cpp reads it: one GGUF file with its names, its order of rows, and its one alpha for all."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterator, Mapping

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.adapters.experts import EXPERT
from lora_tool.adapters.fused_experts import FusedExperts
from lora_tool.adapters.gguf import OF_PARAMETER, GgufLayout
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.tensors import DType
from lora_tool.formats.gguf import ARCHITECTURE, KIND, GgufFields, gguf_header
from lora_tool.formats.stored import transposed
from lora_tool.models.gguf_names import ALPHA, GGUF_WEIGHTS
from lora_tool.plans.algebra.factor_steps import factor_ops, padded_steps, step_of, zero_rows
from lora_tool.plans.algebra.served import ServedFactors
from lora_tool.plans.algebra.terms import Factors
from lora_tool.plans.core.factor_ops import Beside, Columns, Mix, SmallMatrix
from lora_tool.plans.core.operation import rows_of
from lora_tool.plans.core.ops import Assemble, Op, RowOp, copied_as, row_ops
from lora_tool.plans.core.steps import Shard, Step

_ALIKE = 1e-7
"""llama.cpp keeps alpha as float32: a scaling that near to another is the same to it."""


class GgufShard(Shard, frozen=True, kw_only=True):
    """An output file in GGUF, with its fields."""

    fields: GgufFields

    @property
    def header(self) -> bytes:
        return gguf_header([step.out for step in self.steps], self.fields)


class GgufFactors(Struct, frozen=True, kw_only=True):
    """The factors of every module, as llama.cpp's file has them."""

    served: ServedFactors
    layout: GgufLayout
    dtype: DType
    ranks: Mapping[str, int]
    """Module → the rank of its tensors: all experts of a stack have that of the largest."""
    alpha: float
    """What over a tensor's rank scales it, as float32 has it: the scaling of most modules. Never 0, which llama.cpp takes
    for a scaling of 1.
    """

    @property
    def shard(self) -> GgufShard:
        """The file. Raises `UnsupportedAdapter` where rows are not those of the base's heads."""
        fields: GgufFields = {
            ARCHITECTURE: self.layout.names.architecture,
            KIND: "adapter",
            "adapter.type": "lora",
            ALPHA: self.alpha,
        }
        return GgufShard(filename=GGUF_WEIGHTS, steps=tuple(self._steps()), fields=fields)

    def _steps(self) -> Iterator[Step]:
        stacks: dict[str, dict[int, Factors]] = {}
        for each in self.served.sums:
            match, stack = EXPERT.fullmatch(each.module), self.served.fused.get(each.module)
            if match:
                stacks.setdefault(str(self.layout.name(each.module)), {})[int(match["number"])] = each
            elif stack:
                yield from self._fused(each, stack)
            else:
                yield from self._of_module(each)
        for name, held in stacks.items():
            yield from self._stacked(name, held)

    def _of_module(self, each: Factors) -> Iterator[Step]:
        name, rank = str(self.layout.name(each.module)), self.ranks[each.module]
        scaled, lowering = self._scaled(each)
        below, across = factor_ops(scaled, self.dtype, lowering)
        shape: tuple[int, ...] = (rank, each.width)
        if each.embedding:
            below, shape = _transposed_a(scaled, self.dtype, lowering), shape[::-1]
        yield step_of(f"{name}.weight.lora_a", self.dtype, shape, below)
        yield step_of(f"{name}.weight.lora_b", self.dtype, (each.out, rank), across)

    def _scaled(self, each: Factors) -> tuple[Factors, tuple[SmallMatrix, SmallMatrix] | None]:
        """Return the factors with llama.cpp's order of rows, scaled for its alpha, and the matrices that lower their rank."""
        rank = self.ranks[each.module]
        try:
            terms = tuple(
                replace(term, b=self.layout.turned(each.module, term.b), scale=self._share(term.scale, rank))
                for term in each.terms
            )
        except ValueError as error:
            raise UnsupportedAdapter(f"{each.terms[0].b.path}: {error}: give the base that it was trained on") from None
        lowering = self.served.turned.matrices.get(each.module)
        if lowering is not None:  # with the scaling in it
            lowering = SmallMatrix.of(lowering[0].values * self._share(1.0, rank)), lowering[1]
        return replace(each, terms=terms), lowering

    def _share(self, scale: float, rank: int) -> float:
        """Return what B is multiplied by, since llama.cpp multiplies B·A by alpha / rank."""
        share = scale * rank / self.alpha
        return 1.0 if math.isclose(share, 1.0, rel_tol=_ALIKE) else share

    def _fused(self, each: Factors, stack: FusedExperts) -> Iterator[Step]:
        """Yield the stacks of fused experts: A's rows are one expert's after the other's, B's columns theirs in turn."""
        (term,), count, rank = each.terms, stack.count, stack.rank
        share = self._share(term.scale, rank)
        experts, _, parameter = stack.path.rpartition(".")
        projections = OF_PARAMETER[parameter]
        height = each.out // len(projections)
        for at, projection in enumerate(projections):
            name, rows = self.layout.name(f"{experts}.0.{projection}"), rows_of(term.b, at * height, height)
            columns = (Columns(tensor=rows, count=rank, scale=share, first=at, step=count) for at in range(count))
            across = Assemble(parts=tuple(Beside(parts=(column,)) for column in columns))
            yield step_of(f"{name}.weight.lora_a", self.dtype, (count, rank, each.width), copied_as(self.dtype, term.a))
            yield step_of(f"{name}.weight.lora_b", self.dtype, (count, height, rank), across)

    def _stacked(self, name: str, held: Mapping[int, Factors]) -> Iterator[Step]:
        """Yield the stacks of experts that have LoRA one by one, of zeros where one has none."""
        first = next(iter(held.values()))
        rank, count = self.ranks[first.module], max(self.layout.experts, 1 + max(held))
        below: list[RowOp] = []
        across: list[RowOp] = []
        for number in range(count):
            each = held.get(number)
            if each is None:
                below += zero_rows(first.a_parts[0], rank)
                across += zero_rows(first.b_parts[0], first.out, rank)
                continue
            scaled, lowering = self._scaled(each)
            a, b = padded_steps(scaled, self.dtype, lowering, rank)
            below += row_ops(a.op)
            across += row_ops(b.op)
        yield step_of(f"{name}.weight.lora_a", self.dtype, (count, rank, first.width), Assemble(parts=tuple(below)))
        yield step_of(f"{name}.weight.lora_b", self.dtype, (count, first.out, rank), Assemble(parts=tuple(across)))


def gguf_factors(served: ServedFactors, layout: GgufLayout, dtype: DType) -> GgufFactors:
    """Return the factors for llama.cpp, under the names and in the order of the base's `layout`."""
    ranks = _written_ranks(served.ranks)
    lowered = served.turned.matrices
    scales = ((1.0 if each.module in lowered else each.terms[0].scale, ranks[each.module]) for each in served.sums)
    found = Counter(scale * rank for scale, rank in scales)
    alpha = next((alpha for alpha, _ in found.most_common() if alpha), 1.0)
    (rounded,) = struct.unpack("<f", struct.pack("<f", alpha))
    return GgufFactors(served=served, layout=layout, dtype=dtype, ranks=ranks, alpha=float(rounded) or 1.0)


def _written_ranks(ranks: Mapping[str, int]) -> dict[str, int]:
    matches = {module: EXPERT.fullmatch(module) for module in ranks}
    stacks = {module: (match["experts"], match["projection"]) for module, match in matches.items() if match}
    largest: dict[tuple[str, str], int] = {}
    for module, stack in stacks.items():
        largest[stack] = max(ranks[module], largest.get(stack, 0))
    return {module: largest[stacks[module]] if module in stacks else rank for module, rank in ranks.items()}


def _transposed_a(each: Factors, dtype: DType, lowering: tuple[SmallMatrix, SmallMatrix] | None) -> Op:
    """Return what makes the lora_A of an embedding as llama.cpp has it, [vocabulary, r]."""
    parts = tuple(map(transposed, each.a_parts))
    if lowering:
        return Mix(parts=parts, matrix=lowering[1])
    if len(parts) == 1:
        return copied_as(dtype, parts[0])
    return Beside(parts=tuple(Columns(tensor=part, count=part.shape[1]) for part in parts))
