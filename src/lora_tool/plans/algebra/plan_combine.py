"""Planning a sum of adapters, and a smaller one of one adapter: from the factors, without ever forming ΔW."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from lora_tool.adapters.view import AdapterView, TrainedTokens, view_of
from lora_tool.adapters.weighted import all_weighted, averaged, place_of
from lora_tool.checkpoints import AdapterDir
from lora_tool.checkpoints.sources import Reference, opened_adapter, opened_model
from lora_tool.core.display import counted, named
from lora_tool.core.errors import WrongValue
from lora_tool.core.keys import Part
from lora_tool.core.options import named_in_errors
from lora_tool.core.tensors import DType, float_type
from lora_tool.formats.stored import same_values
from lora_tool.plans.algebra.factor_steps import bias_steps, cancel_warnings, exact_type, padded_steps, small_warnings
from lora_tool.plans.algebra.peft_config import config_of_sum, require_one_base, require_sums
from lora_tool.plans.algebra.ranks import ModuleRank, Ranks, equal_for_experts, rank_lines, turned_to
from lora_tool.plans.algebra.terms import Factors, factors_of_sum
from lora_tool.plans.algebra.whole_plan import WholeTensors, adapter_plan, whole_tensors
from lora_tool.plans.core.factor_ops import SmallMatrix
from lora_tool.plans.core.manifest import input_name
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import Step
from lora_tool.rules.judging import MergeJudge

_OF_TOKENS = (Part.TOKENS_DELTA, Part.TOKENS_BASE)


@named_in_errors
def plan_combine(
    adapters: Reference | Sequence[Reference],
    *,
    weights: Sequence[float] | None = None,
    rank: int | None = None,
    keep: float | None = None,
    average: bool = False,
    head_of: Reference | None = None,
    base: Reference | None = None,
    dtype: DType | str | None = None,
    ignore: Iterable[str] = (),
) -> Plan:
    """Return the plan of the adapter whose ΔW is Σ weight·ΔW of `adapters`. The rules judge them first.

    `weights` are by default those in the names ("A=0.7"), or 1. Without `rank` and `keep` the sum is exact: it puts the
    factors side by side, so their ranks add up. `rank` is the largest rank of a module; `keep` is the smallest share of
    ‖ΔW‖² that each module keeps, at the lowest rank that keeps it. Both give the best approximation of that rank. The
    new B holds the scalings of all adapters. Heads and other whole tensors that differ come from `head_of`, one of the
    adapters; with `average` the weights are divided by their sum, and heads that differ are averaged, too, unless
    `head_of` chooses one. `base` is the model of all adapters, by default the one that their configs name; the rules compare them
    with a given one. `dtype` None means the adapters' own dtype where nothing is rounded, else float32. `ignore` are
    codes of rules. With `rank` or `keep`, planning reads all factors once. Raises `FindingsFound`,
    `UnsupportedAdapter` for what cannot be added up, `IncompatibleBase`, `WrongValue`.
    """
    names, given = all_weighted(adapters, weights)
    given = averaged(given) if average else given
    at = None if head_of is None else place_of(head_of, names)
    requested = Ranks(rank=rank, keep=keep)
    kind = None if dtype is None else float_type(dtype)
    opened = tuple(map(opened_adapter, names))
    return _planned("combine", opened, given, requested, kind, average=average, head_of=at, base=base, ignore=ignore)


@named_in_errors
def plan_resize(
    adapter: Reference,
    *,
    rank: int | None = None,
    keep: float | None = None,
    dtype: DType | str | None = None,
    ignore: Iterable[str] = (),
) -> Plan:
    """Return the plan of an adapter with lower ranks: the best approximation of `adapter`'s ΔW at those ranks.

    Give one of the two: `rank`, the largest rank of a module, or `keep`, the smallest share of ‖ΔW‖² that each module
    keeps, at the lowest rank that keeps it. `dtype` None means float32; `ignore` are codes of rules. Planning reads all
    factors once. Raises as `plan_combine`.
    """
    requested = Ranks(rank=rank, keep=keep)
    if requested.exact:
        raise WrongValue("rank, keep: give one of the two", hint="`rank=16`, or `keep=0.99`")
    kind = None if dtype is None else float_type(dtype)
    return _planned(
        "resize", (opened_adapter(adapter),), (1.0,), requested, kind, head_of=None, base=None, ignore=ignore
    )


def _planned(
    operation: str,
    adapters: tuple[AdapterDir, ...],
    weights: tuple[float, ...],
    requested: Ranks,
    dtype: DType | None,
    *,
    head_of: int | None,
    base: Reference | None,
    ignore: Iterable[str],
    average: bool = False,
) -> Plan:
    model = None if base is None else opened_model(base)
    mean = average and head_of is None
    judge = MergeJudge(ignore=tuple(ignore), average=mean)
    report = judge.as_stored(adapters, model, beside=_without_repeats(adapters, head_of))
    views = tuple(map(view_of, adapters))
    for view in views:
        require_sums(view)
    if model is None:
        require_one_base(views)
    sums = factors_of_sum(views, weights)
    lowered = turned_to(requested, sums)
    out = dtype or exact_type(sums, turned=bool(lowered.matrices))
    whole = whole_tensors(views, head_of=None if head_of is None else views[head_of], weights=weights if mean else None)
    matrices = lowered.matrices
    written = equal_for_experts(
        {each.module: matrices[each.module][0].columns if each.module in matrices else each.rank for each in sums}
    )
    steps = (*_steps(sums, out, matrices, written), *whole.steps)
    targets = {layer.module: layer.path for view in views for layer in view.layers}
    ranks = {targets[module]: rank for module, rank in written.items()}
    plan = adapter_plan(
        adapters,
        weights,
        steps,
        config_of_sum(
            views, ranks, base=model.root if model else None, head_of=None if head_of is None else views[head_of]
        ),
        dropped=whole.dropped,
        findings=report.findings,
        notes=_notes(operation, adapters, weights, sums, lowered.ranks, whole),
        ranks=lowered.ranks,
        manifest={
            "operation": operation,
            "rank": requested.rank,
            "keep": requested.keep,
            **({"average": True} if average else {}),
            "dtype": out.value,
            "head_of": None if head_of is None else input_name(head_of + 1),
        },
    )
    return replace(plan, warnings=(*plan.warnings, *cancel_warnings(sums), *small_warnings(sums, out, lowered.ranks)))


def _steps(
    sums: Sequence[Factors],
    dtype: DType,
    matrices: Mapping[str, tuple[SmallMatrix, SmallMatrix]],
    ranks: Mapping[str, int],
) -> Iterator[Step]:
    for each in sums:
        yield from padded_steps(each, dtype, matrices.get(each.module), ranks[each.module])
        yield from bias_steps(each, dtype)


def _without_repeats(adapters: Sequence[AdapterDir], head_of: int | None) -> tuple[AdapterDir, ...]:
    """Return the adapters as they are judged together: each whole tensor that `head_of` has, and equal trained tokens, once."""
    views = tuple(map(view_of, adapters))
    chosen = None if head_of is None else views[head_of]
    known = {} if chosen is None else dict(chosen.tokens)
    lighter = []
    for adapter, view in zip(adapters, views, strict=True):
        gone: set[str] = set()
        if chosen is not None and view is not chosen:
            gone |= {tensor.name for name, tensor in view.saved.items() if name in chosen.saved}
        repeated = {
            module
            for module, held in view.tokens.items()
            if _is_known(held, known.setdefault(module, held), view, chosen)
        }
        gone |= {item.tensor.name for item in view.parts(*_OF_TOKENS) if item.module in repeated}
        lighter.append(_without(adapter, gone))
    return tuple(lighter)


def _is_known(held: TrainedTokens, first: TrainedTokens, view: AdapterView, chosen: AdapterView | None) -> bool:
    """Return whether other tokens are taken instead of those of `view`: those of the chosen adapter, or the same ones."""
    if held is first:
        return False
    of_chosen = chosen is not None and view is not chosen and first in chosen.tokens.values()
    return of_chosen or (held.indices == first.indices and same_values(held.rows, first.rows))


def _without(adapter: AdapterDir, gone: Collection[str]) -> AdapterDir:
    if not gone:
        return adapter
    left = {name: tensor for name, tensor in adapter.tensors.items() if name not in gone}
    known = {name: key for name, key in adapter.keys.items() if name not in gone}
    return replace(adapter, weights=replace(adapter.weights, tensors=left), keys=known)


def _notes(
    operation: str,
    adapters: Sequence[AdapterDir],
    weights: Sequence[float],
    sums: Sequence[Factors],
    ranks: Sequence[ModuleRank],
    whole: WholeTensors,
) -> Iterator[str]:
    sources = " + ".join(
        str(each.root) if weight == 1 else f"{weight:g}·{each.root}"
        for each, weight in zip(adapters, weights, strict=True)
    )
    verb = "resizing" if operation == "resize" else "combining"
    yield f"{verb} {sources}: {counted(len(sums), 'module')}"
    if ranks:
        yield from rank_lines(ranks)
    else:
        largest = max(sums, key=lambda each: each.rank)
        yield f"exact: rank {largest.rank} = {' + '.join(str(term.rank) for term in largest.terms)}, nothing left out"
    kept = [step.out.name for step in whole.steps if step.out.name not in whole.means]
    if whole.means:
        yield f"averaged, too: {named(whole.means)}"
    if kept and any(weight != 1 for weight in weights):
        yield f"weights scale only ΔW: {counted(len(kept), 'whole tensor')}, such as {kept[0]}, stay as they are"
