"""Planning the form of an adapter that a server reads, equal in ΔW: scalings in B, one rank, plain names."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from lora_tool.adapter.mlx import MLX_WEIGHTS
from lora_tool.adapter.view import AdapterView, view_of
from lora_tool.architectures.ends import is_end
from lora_tool.architectures.heads import PEFT_CLASSIFIERS, head_of
from lora_tool.checkpoint import ADAPTER_WEIGHTS, ModelDir
from lora_tool.display import counted
from lora_tool.errors import UnsupportedAdapter
from lora_tool.formats.adapter_config import FILE_NAME, TOKENS_FIELDS
from lora_tool.formats.files import json_bytes, parse_json
from lora_tool.plan.algebra.changes import changes_of
from lora_tool.plan.algebra.factor_steps import bias_steps, exact_type
from lora_tool.plan.algebra.fit import require_known
from lora_tool.plan.algebra.mlx_form import (
    common_scale,
    is_of_expert,
    mlx_config,
    mlx_steps,
    rope_notes,
    stacked_steps,
    unscaled,
)
from lora_tool.plan.algebra.peft_config import config_of_sum
from lora_tool.plan.algebra.ranks import ModuleRank, rank_lines
from lora_tool.plan.algebra.serving_forms import FORMS, ServingForm, in_the_way
from lora_tool.plan.algebra.serving_steps import padded_steps
from lora_tool.plan.algebra.spool import OpenSpool
from lora_tool.plan.algebra.terms import Factors
from lora_tool.plan.algebra.turning import Ranks, Turned, turned_to
from lora_tool.plan.algebra.whole import whole_tensors
from lora_tool.plan.algebra.whole_model import SAME, beginnings_of
from lora_tool.plan.algebra.whole_plan import adapter_plan
from lora_tool.plan.core.plan import Plan
from lora_tool.plan.core.steps import SideFile, Step
from lora_tool.rules.engine.subjects import Server
from lora_tool.rules.merging import MergeJudge
from lora_tool.sources import Reference, opened_adapter, opened_model
from lora_tool.tensors import DType, float_type

_NOTHING_LOST = 1e-13
"""A share of ‖ΔW‖² that float64 cannot distinguish from zero."""


def plan_prepare(
    adapter: Reference,
    server: Server | str,
    *,
    base: Reference | None = None,
    max_rank: int | None = None,
    approximate: bool = False,
    dtype: DType | str | None = None,
    ignore: Iterable[str] = (),
    spool: OpenSpool | None = None,
) -> Plan:
    """Return the plan of `adapter` in the form that `server` reads, equal in ΔW. The rules judge the adapter first.

    Scalings go into B, so that the server need not know rsLoRA or `alpha_pattern`; except for PEFT, ranks are padded
    with zeros to one rank; targets become plain names; for MLX-LM the factors are transposed and renamed. `max_rank` is
    the largest rank that the server takes: modules with a higher rank are lowered to it where that loses nothing, or,
    with `approximate`, to the best approximation; `approximate` does the same to DoRA. The rules compare the adapter
    with a given `base`, and the new config names it. With it, PiSSA and OLoRA become plain LoRA of twice the rank, and
    trained tokens and changed rows of embeddings become LoRA on those; `spool` opens the file that keeps the factors
    computed this way. `dtype` None means the adapter's own dtype where nothing is rounded, else float32. `ignore` are
    codes of rules. For vLLM, which loads the whole of a multimodal base, an adapter of its text class gets the names
    that its modules have there. Raises `FindingsFound`, and `UnsupportedAdapter` naming what the server has no exact
    form for.
    """
    server = Server(server)
    kind = None if dtype is None else float_type(dtype)
    opened = opened_adapter(adapter)
    model = None if base is None else opened_model(base)
    report = MergeJudge(ignore=tuple(ignore)).as_stored((opened,), model)
    view, form = view_of(opened), FORMS[server]
    _require_form(view, server, based=model is not None, approximate=approximate)
    names = beginnings_of(view, model) if form.whole_models else SAME
    changes = changes_of(view, form, None if model is None else names.base(model), spool, max_rank=max_rank)
    targets = {layer.module: layer.target for layer in view.layers}
    fused = frozenset(each.module for each in changes.sums if _is_fused(view, each, targets))
    turned = _within(Ranks(rank=max_rank), changes.sums, fused, view, approximate=approximate)
    ranks = {
        each.module: view.config.rank(targets[each.module])
        if each.module in fused
        else turned.matrices[each.module][0].columns
        if each.module in turned.matrices
        else each.rank
        for each in changes.sums
    }
    one = max(ranks.values()) if form.one_rank else None
    _require_one_form_of_experts(view, ranks, fused, one)
    # turning a module to a lower rank puts its scaling into the factors
    scale = common_scale(changes.sums) if form.mlx and not turned.matrices else 1.0
    sums = changes.sums if scale == 1 else tuple(unscaled(each, scale) for each in changes.sums)
    out = kind or exact_type(sums, turned=bool(turned.matrices))
    steps: list[Step] = []
    for each in sums:
        if form.mlx and is_of_expert(each.module):
            continue
        rank = each.rank if each.module in fused or one is None else one
        matrices = turned.matrices.get(each.module)
        rank = matrices[0].columns if matrices and one is None else rank
        steps += mlx_steps(each, out, matrices, rank) if form.mlx else padded_steps(each, out, matrices, rank)
        steps += bias_steps(each, out)
    steps += stacked_steps(sums, out, turned.matrices, one or 1) if form.mlx else ()
    whole = whole_tensors((view,))
    settled = {(record.path, record.name) for record in changes.records}
    named = {targets.get(each.module, each.module): one or ranks[each.module] for each in sums}
    config = config_of_sum((view,), named, base=model.root if model else None)
    plain = [targets.get(each.module, each.module) for each in sums if each.module not in fused]
    return adapter_plan(
        (opened,),
        (1.0,),
        names.steps(
            (*steps, *(step for step in whole.steps if (step.op.source.path, step.op.source.name) not in settled))
        ),
        mlx_config(sums, one or 1, scale) if form.mlx else config if form.whole else _served(config, view, one, plain),
        dropped=(*whole.dropped, *changes.records),
        findings=report.findings,
        notes=_notes(view, form, sums, (*changes.ranks, *turned.ranks), one, scale, model),
        ranks=(*changes.ranks, *turned.ranks),
        filename=MLX_WEIGHTS if form.mlx else ADAPTER_WEIGHTS,
        base=model if changes.from_base else None,
        computed=changes.spooled,
        manifest={
            "operation": "prepare",
            "for": server.value,
            "served_rank": one,
            "rank": max_rank if turned.matrices else None,
            "keep": None,
            "dtype": out.value,
            **({} if names == SAME else {"renamed": names.as_json()}),
        },
    )


def _require_form(view: AdapterView, server: Server, *, based: bool, approximate: bool) -> None:
    """Raise `UnsupportedAdapter` where the server has no form for the adapter, naming all that is in the way."""
    config, root, form = view.config, shlex.quote(str(view.adapter.root)), FORMS[server]
    require_known(view)
    found = list(in_the_way(view, form, based=based, approximate=approximate))
    if found:
        options = " ".join(dict.fromkeys(option for each in found for option in each.options))
        raise UnsupportedAdapter(
            f"{config.path}: {form.name} has no exact form for {'; '.join(each.text for each in found)}",
            hint=f"lora-tool prepare {root} --for {server.value} {options} -o OUT"
            if all(each.options for each in found)
            else f"merge it and serve the merged model: lora-tool merge {root}",
        )
    if not view.layers and (form.whole or not view.tokens):
        why = f", and {form.name} reads its trained tokens as they are" if view.tokens else ""
        raise UnsupportedAdapter(f"{view.adapter.root} has no LoRA layers{why}: there is nothing to prepare")


def _is_fused(view: AdapterView, factors: Factors, targets: Mapping[str, str]) -> bool:
    """Whether the factors hold those of several experts: more rows than the config's rank."""
    return (
        bool(view.config.target_parameters)
        and factors.module in targets
        and factors.rank != view.config.rank(targets[factors.module])
    )


def _require_one_form_of_experts(
    view: AdapterView, ranks: Mapping[str, int], fused: frozenset[str], one: int | None
) -> None:
    merge = f"merge it and serve the merged model: lora-tool merge {shlex.quote(str(view.adapter.root))}"
    patterns = [name for name in ("rank_pattern", "alpha_pattern") if getattr(view.config, name)]
    if fused and patterns:
        raise UnsupportedAdapter(
            f"{view.config.path}: `{patterns[0]}` may also match the fused experts of `target_parameters`, whose ranks cannot be changed",
            hint=merge,
        )
    for module in sorted(fused):
        if one is not None and ranks[module] != one:
            raise UnsupportedAdapter(
                f"{view.config.path}: `{module}` has rank {ranks[module]} for each expert, but other modules have {one}: the "
                "factors of fused experts lie interleaved and cannot be padded",
                hint=merge,
            )


def _within(
    asked: Ranks, sums: Sequence[Factors], fused: frozenset[str], view: AdapterView, *, approximate: bool
) -> Turned:
    """Return how the modules above the largest rank get to it. Raises `UnsupportedAdapter` where that loses something."""
    high = [] if asked.rank is None else [each for each in sums if each.rank > asked.rank and each.module not in fused]
    turned = turned_to(asked, high)
    lost = [each for each in turned.ranks if each.discarded > _NOTHING_LOST * each.energy]
    if lost and not approximate:
        worst = min(lost, key=lambda each: each.kept)
        raise UnsupportedAdapter(
            f"{view.config.path}: `{worst.module}` has rank {worst.before} and would keep {worst.kept:.2%} of ‖ΔW‖² at rank "
            f"{asked.rank}, the least of {counted(len(lost), 'module')}",
            hint=f"--approximate writes the best approximation; an exact one needs a server that takes rank {max(e.before for e in lost)}",
        )
    return turned


def _served(config: SideFile, view: AdapterView, rank: int | None, targets: Sequence[str]) -> SideFile:
    """Return the config for a server: one rank, and targets by the last parts of their names."""
    raw = parse_json(config.content or b"{}", view.config.path)
    heads = [name for name in view.config.modules_to_save if head_of(name) in PEFT_CLASSIFIERS]
    raw |= {
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": sorted({target.rpartition(".")[2] for target in targets}),
        "exclude_modules": None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "modules_to_save": heads or None,
        "peft_type": "LORA",
        "trainable_token_indices": None,
    }
    for name in TOKENS_FIELDS:
        raw.pop(name, None)
    return SideFile(filename=FILE_NAME, content=json_bytes(raw, indent=2, sort_keys=True), reason=config.reason)


def _notes(
    view: AdapterView,
    form: ServingForm,
    sums: Sequence[Factors],
    ranks: Sequence[ModuleRank],
    one: int | None,
    scale: float,
    base: ModelDir | None,
) -> Iterator[str]:
    scaling = f"scale {scale:g}" if form.mlx else f"alpha {one}"
    shape = f"rank {one}, {scaling}" if one is not None else "scaling 1"
    yield f"preparing {view.adapter.root} for {form.name}: {counted(len(sums), 'module')}, {shape}"
    if ranks:
        yield from rank_lines(ranks)
    if form.mlx:
        yield from rope_notes(base)
    ends = [each.module for each in sums if is_end(each.module)]
    if form.one_end and ends and base is None:
        yield f"right only if the base has an output layer of its own, because of LoRA on `{ends[0]}`: --base MODEL checks it"
    if form is FORMS[Server.VLLM] and view.saved:
        yield "vLLM takes the head only on a base that is itself a classifier: --reward-base writes one"
