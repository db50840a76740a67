"""The factors of an adapter as a server reads them: to which rank each is lowered or padded, and where its scaling is."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lora_tool.adapter.view import AdapterView
from lora_tool.display import counted
from lora_tool.errors import UnsupportedAdapter
from lora_tool.plan.algebra.factor_steps import bias_steps
from lora_tool.plan.algebra.mlx_form import common_scale, is_of_expert, mlx_steps, stacked_steps, unscaled
from lora_tool.plan.algebra.serving_forms import ServingForm
from lora_tool.plan.algebra.serving_steps import padded_steps
from lora_tool.plan.algebra.terms import Factors
from lora_tool.plan.algebra.turning import Ranks, Turned, turned_to
from lora_tool.plan.core.steps import Step
from lora_tool.tensors import DType

_NOTHING_LOST = 1e-13
"""A share of ‖ΔW‖² that float64 cannot distinguish from zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedFactors:
    """The factors of every module for one server."""

    sums: tuple[Factors, ...]
    """The factors, without `scale`."""
    turned: Turned
    """What lowers the rank of some."""
    fused: frozenset[str]
    """Modules whose factors hold those of several experts, interleaved."""
    ranks: Mapping[str, int]
    """Module → its rank before it is padded; that of each expert where several are fused."""
    one_rank: int | None
    """The rank that all are padded to, for a server that has one for all modules."""
    scale: float
    """The scaling that MLX-LM's config says for all modules. All other scaling is in B."""

    @property
    def largest(self) -> int:
        """The largest rank."""
        return max(self.ranks.values())

    def rank(self, module: str) -> int:
        """Return the rank that a config says of a module."""
        return self.one_rank or self.ranks[module]


def served_factors(
    view: AdapterView, form: ServingForm, sums: Sequence[Factors], *, max_rank: int | None, approximate: bool
) -> ServedFactors:
    """Return the factors for a server of the `form`, none of a higher rank than `max_rank`.

    Raises `UnsupportedAdapter` where a lower rank loses some of ΔW, unless `approximate`, and for fused experts that
    cannot have the rank of the other modules.
    """
    targets = {layer.module: layer.target for layer in view.layers}
    fused = {each.module: view.config.rank(targets[each.module]) for each in sums if _is_fused(view, each, targets)}
    turned = _within(max_rank, [each for each in sums if each.module not in fused], view, approximate=approximate)
    lowered = {module: of_b.columns for module, (of_b, _) in turned.matrices.items()}
    ranks = {each.module: each.rank for each in sums} | lowered | fused
    one_rank = max(ranks.values()) if form.one_rank else None
    _require_one_form_of_experts(view, fused, one_rank)
    # turning a module to a lower rank puts its scaling into the factors
    scale = common_scale(sums) if form.mlx and not turned.matrices else 1.0
    return ServedFactors(
        sums=tuple(sums if scale == 1 else (unscaled(each, scale) for each in sums)),
        turned=turned,
        fused=frozenset(fused),
        ranks=ranks,
        one_rank=one_rank,
        scale=scale,
    )


def served_steps(served: ServedFactors, form: ServingForm, dtype: DType) -> Iterator[Step]:
    """Yield the steps that write the factors and the biases of lora_B.

    Raises `UnsupportedAdapter` where MLX-LM has no place for LoRA on experts.
    """
    matrices = served.turned.matrices
    written = mlx_steps if form.mlx else padded_steps
    for each in served.sums:
        if form.mlx and is_of_expert(each.module):
            continue
        rank = each.rank if each.module in served.fused else served.rank(each.module)
        yield from written(each, dtype, matrices.get(each.module), rank)
        yield from bias_steps(each, dtype)
    if form.mlx:
        yield from stacked_steps(served.sums, dtype, matrices, served.largest)


def _is_fused(view: AdapterView, factors: Factors, targets: Mapping[str, str]) -> bool:
    """Return whether the factors hold those of several experts: more rows than the config's rank."""
    return (
        bool(view.config.target_parameters)
        and factors.module in targets
        and factors.rank != view.config.rank(targets[factors.module])
    )


def _within(max_rank: int | None, sums: Sequence[Factors], view: AdapterView, *, approximate: bool) -> Turned:
    """Return how the modules above the largest rank get to it. Raises `UnsupportedAdapter` where that loses something."""
    asked = Ranks(rank=max_rank)
    turned = turned_to(asked, [] if max_rank is None else [each for each in sums if each.rank > max_rank])
    lost = [each for each in turned.ranks if each.discarded > _NOTHING_LOST * each.energy]
    if lost and not approximate:
        worst = min(lost, key=lambda each: each.kept)
        raise UnsupportedAdapter(
            f"{view.config.path}: `{worst.module}` has rank {worst.before} and would keep {worst.kept:.2%} of ‖ΔW‖² at rank "
            f"{max_rank}, the least of {counted(len(lost), 'module')}",
            hint=f"--approximate writes the best approximation; an exact one needs a server that takes rank {max(e.before for e in lost)}",
        )
    return turned


def _require_one_form_of_experts(view: AdapterView, fused: Mapping[str, int], one_rank: int | None) -> None:
    """Raise `UnsupportedAdapter` where fused experts, of the ranks `fused`, would be written at another rank."""
    merge = f"merge it and serve the merged model: lora-tool merge {shlex.quote(str(view.adapter.root))}"
    patterns = [name for name in ("rank_pattern", "alpha_pattern") if getattr(view.config, name)]
    if fused and patterns:
        raise UnsupportedAdapter(
            f"{view.config.path}: `{patterns[0]}` may also match the fused experts of `target_parameters`, whose ranks cannot be changed",
            hint=merge,
        )
    for module, rank in sorted(fused.items()):
        if one_rank not in (None, rank):
            raise UnsupportedAdapter(
                f"{view.config.path}: `{module}` has rank {rank} for each expert, but other modules have {one_rank}: the "
                "factors of fused experts lie interleaved and cannot be padded",
                hint=merge,
            )
