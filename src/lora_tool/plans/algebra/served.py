"""The factors of an adapter as a server reads them: to which rank each is lowered or padded, and where its scaling is."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from lora_tool.adapters.experts import experts_of
from lora_tool.adapters.fused_experts import FusedExperts, fused_experts
from lora_tool.adapters.view import AdapterView
from lora_tool.checkpoints import ModelDir
from lora_tool.checkpoints.quantised import as_matrices
from lora_tool.core.display import counted
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.keys import PREFIX
from lora_tool.core.tensors import DType
from lora_tool.plans.algebra.factor_steps import bias_steps, padded_steps, step_of, zero_rows
from lora_tool.plans.algebra.mlx_form import is_of_expert, mlx_steps, stacked_steps
from lora_tool.plans.algebra.ranks import (
    Ranks,
    Turned,
    equal_for_experts,
    largest_of_experts,
    missing_experts,
    turned_to,
)
from lora_tool.plans.algebra.terms import Factors, alpha_for, common_scale, unscaled
from lora_tool.plans.core.factor_ops import Beside, Columns
from lora_tool.plans.core.operation import rows_of
from lora_tool.plans.core.ops import Assemble, RowOp, copied_as
from lora_tool.plans.core.steps import Step
from lora_tool.rules.serving.forms import ServingForm
from lora_tool.rules.serving.together import ReadTogether, lacking, weight_beside

_NOTHING_LOST = 1e-13
"""A share of ‖ΔW‖² that float64 cannot distinguish from zero."""


class ServedFactors(Struct, frozen=True, kw_only=True):
    """The factors of every module for one server."""

    sums: tuple[Factors, ...]
    """The factors, without `scale`."""
    turned: Turned
    """The matrices that lower the rank of some modules."""
    fused: Mapping[str, FusedExperts]
    """Modules whose factors hold those of several experts."""
    ranks: Mapping[str, int]
    """Module → its rank before it is padded; that of each expert where several are fused."""
    one_rank: int | None
    """The rank that all are padded to, for a server that has one for all modules."""
    scale: float
    """The scaling that the config says for all modules. All other scaling is in B."""

    @property
    def largest(self) -> int:
        """The largest rank."""
        return max(self.ranks.values())

    @property
    def alpha(self) -> int | None:
        """The `lora_alpha` that gives the scaling at the one rank of all modules; MLX-LM's may have none."""
        return alpha_for(self.scale, self.largest)

    @property
    def rank_of_idle(self) -> int:
        """The rank of LoRA of zeros: the one rank of all modules, else that of single experts, else the largest."""
        return self.one_rank or largest_of_experts(self.ranks) or self.largest

    def rank(self, module: str) -> int:
        """Return the rank that a config says of a module."""
        return self.one_rank or self.ranks[module]


def served_factors(
    view: AdapterView, form: ServingForm, sums: Sequence[Factors], *, max_rank: int | None, approximate: bool
) -> ServedFactors:
    """Return the factors for a server of the `form`, none of a higher rank than `max_rank`.

    Raises `UnsupportedAdapter` where a lower rank loses some of ΔW, unless `approximate`, and for fused experts of a
    higher rank.
    """
    fused = fused_experts(view)
    _require_low(fused.values(), max_rank, view)
    within = _within(max_rank, [each for each in sums if each.module not in fused], view, approximate=approximate)
    lowered = {module: of_b.columns for module, (of_b, _) in within.matrices.items()}
    of_experts = {module: stack.rank for module, stack in fused.items()}
    ranks = {each.module: each.rank for each in sums} | lowered | of_experts
    one_rank = max(ranks.values()) if form.one_rank else None
    if not form.one_rank:
        ranks = equal_for_experts(ranks)
    # lowering a module's rank puts its scaling into the factors
    scale = 1.0 if within.matrices else _said_by_config(common_scale(sums), form, ranks.values(), one_rank)
    return ServedFactors(
        sums=tuple(sums if scale == 1 else (unscaled(each, scale) for each in sums)),
        turned=within,
        fused=fused,
        ranks=ranks,
        one_rank=one_rank,
        scale=scale,
    )


def _said_by_config(scale: float, form: ServingForm, ranks: Iterable[int], one_rank: int | None) -> float:
    """Return the scaling of all modules where the server's config can say it, so that no factor changes; else 1."""
    if form.gguf:  # which has an alpha that the ranks divide, and no config
        return 1.0
    same = {one_rank} if one_rank else set(ranks)
    said = form.mlx or (len(same) == 1 and alpha_for(scale, *same) is not None)
    return scale if said else 1.0


def served_steps(served: ServedFactors, form: ServingForm, dtype: DType) -> Iterator[Step]:
    """Yield the steps that write the factors and the biases of lora_B.

    Raises `UnsupportedAdapter` where MLX-LM has no place for LoRA on experts.
    """
    matrices = served.turned.matrices
    for each in served.sums:
        if form.mlx and is_of_expert(each.module):
            continue
        lowering, rank = matrices.get(each.module), served.rank(each.module)
        if form.mlx:
            yield from mlx_steps(each, dtype, lowering, rank)
        else:
            stack = served.fused.get(each.module)
            yield from padded_steps(each, dtype, lowering, rank, experts=stack.count if stack else 1)
        yield from bias_steps(each, dtype)
    if form.mlx:
        yield from stacked_steps(served.sums, dtype, matrices, served.largest)


def _require_low(fused: Iterable[FusedExperts], max_rank: int | None, view: AdapterView) -> None:
    for stack in fused:
        if max_rank is not None and stack.rank > max_rank:
            root = shlex.quote(str(view.adapter.root))
            raise UnsupportedAdapter(
                f"{view.config.path}: `{stack.path}` has rank {stack.rank} for each expert, and the factors of fused experts "
                "cannot be recompressed as they are",
                hint=f"write the experts one by one first: lora-tool convert {root} --to peft-experts --base BASE -o EXPERTS",
            )


def _within(max_rank: int | None, sums: Sequence[Factors], view: AdapterView, *, approximate: bool) -> Turned:
    """Return how the modules above the largest rank get to it. Raises `UnsupportedAdapter` where that loses something."""
    above = [] if max_rank is None else [each for each in sums if each.rank > max_rank]
    within = turned_to(Ranks(rank=max_rank), above)
    lost = [each for each in within.ranks if each.discarded > _NOTHING_LOST * each.energy]
    if lost and not approximate:
        worst = min(lost, key=lambda each: each.kept)
        raise UnsupportedAdapter(
            f"{view.config.path}: `{worst.module}` has rank {worst.before} and would keep {worst.kept:.2%} of ‖ΔW‖² at rank "
            f"{max_rank}, the least of {counted(len(lost), 'module')}",
            hint=f"`approximate=True` writes the best approximation; an exact one needs a server that takes rank {max(e.before for e in lost)}",
        )
    return within


# LoRA of zeros on modules without LoRA, for a server that reads LoRA on some modules only together.


class Idle(Struct, frozen=True, kw_only=True):
    """A module whose weight, [out, in], stays as it is."""

    module: str
    out: int
    width: int
    beside: Factors
    """LoRA on the module that is read only together with this one."""

    def steps(self, dtype: DType, rank: int) -> Iterator[Step]:
        """Yield the steps that write a lora_A like the other module's, and a lora_B of zeros, as before training."""
        a, b = self.beside.a_parts[0], self.beside.b_parts[0]
        kept = min(rank, a.shape[0])
        rows, held = rows_of(a, 0, kept), min(self.width, a.shape[1])
        copied: RowOp = (
            copied_as(dtype, rows)
            if a.shape[1] == self.width
            else Beside(parts=(Columns(tensor=rows, count=held),), zeros=self.width - held)
        )
        above = Assemble(parts=(copied, *zero_rows(a, rank - kept, self.width)))
        across = Assemble(parts=tuple(zero_rows(b, self.out, rank)))
        yield step_of(f"{PREFIX}{self.module}.lora_A.weight", dtype, (rank, self.width), above)
        yield step_of(f"{PREFIX}{self.module}.lora_B.weight", dtype, (self.out, rank), across)


def idle_modules(sums: Sequence[Factors], base: ModelDir, reads: ReadTogether) -> Iterator[Idle]:
    """Yield the modules of the base without which LoRA on others is not read."""
    if not reads.is_of(base.whole_config.model_type):
        return
    known = [name.removesuffix(".weight") for name in as_matrices(base).tensors]
    for module, like in beside_which(sums, known, reads).items():
        weight = weight_beside(base, module, like.width)
        if weight is not None:
            yield Idle(module=module, out=weight.shape[0], width=weight.shape[1], beside=like)


def beside_which(sums: Sequence[Factors], known: Iterable[str], reads: ReadTogether) -> Mapping[str, Factors]:
    """Return the modules without LoRA, among those that are `known`, that others are read only together with, and one of
    those, with as many columns if there is one.
    """
    by_module = {each.module: each for each in sums}
    if not reads.stacks:
        return {module: by_module[held] for module, held in lacking(by_module, reads).items()}
    layers = {experts: each for each in sums if (experts := experts_of(each.module))}
    in_layers = {module: layers[experts] for module in known if (experts := experts_of(module)) in layers}
    missing = missing_experts(by_module, in_layers, as_peft=reads.as_peft)
    return {module: by_module[like] if like else in_layers[module] for module, like in missing}
