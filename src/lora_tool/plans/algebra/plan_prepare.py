"""Planning the form of an adapter that a server reads, equal in ΔW: one scaling, one rank, plain names."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from lora_tool.adapters.gguf import layout_of
from lora_tool.adapters.mlx import MLX_WEIGHTS
from lora_tool.adapters.view import AdapterView, view_of, with_prefix
from lora_tool.checkpoints import ADAPTER_WEIGHTS, ModelDir
from lora_tool.checkpoints.sources import Reference, opened_adapter, opened_model
from lora_tool.core.display import counted, named
from lora_tool.core.errors import UnsupportedAdapter, WrongValue
from lora_tool.core.options import named_in_errors
from lora_tool.core.tensors import FLOAT_NAMES, DType, float_type
from lora_tool.formats.adapter_config import FILE_NAME, TOKENS_FIELDS
from lora_tool.formats.files import json_bytes, parse_json
from lora_tool.models.ends import PEFT_CLASSIFIERS, head_of, is_end
from lora_tool.plans.algebra.changes import changes_of
from lora_tool.plans.algebra.factor_steps import exact_type, small_warnings
from lora_tool.plans.algebra.gguf_form import GgufFactors, gguf_factors
from lora_tool.plans.algebra.mlx_form import mlx_beginnings, mlx_config, rope_notes
from lora_tool.plans.algebra.peft_config import all_but, config_of_sum, is_narrowed, require_known, with_experts
from lora_tool.plans.algebra.ranks import ModuleRank, rank_lines
from lora_tool.plans.algebra.served import Idle, ServedFactors, idle_modules, served_factors, served_steps
from lora_tool.plans.algebra.spool import OpenSpool
from lora_tool.plans.algebra.terms import factors_of_sum
from lora_tool.plans.algebra.whole_plan import (
    SAME,
    Beginnings,
    adapter_plan,
    beginnings_of,
    magnitude_steps,
    whole_tensors,
)
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import SideFile
from lora_tool.rules.bases import named_base
from lora_tool.rules.judging import MergeJudge
from lora_tool.rules.serving.forms import ServingForm, form_of
from lora_tool.rules.serving.named import server_named
from lora_tool.rules.serving.obstacles import (
    alone_text,
    class_in_the_way,
    experts_in_the_way,
    in_the_way,
    names_in_the_way,
    not_applied,
    stacks_in_the_way,
)
from lora_tool.rules.serving.together import lacking, model_types_of, outside_language, path_with


@named_in_errors
def plan_prepare(
    adapter: Reference,
    server: str,
    *,
    base: Reference | None = None,
    max_rank: int | None = None,
    approximate: bool = False,
    dtype: DType | str | None = None,
    ignore: Iterable[str] = (),
    spool: OpenSpool | None = None,
) -> Plan:
    """Return the plan of `adapter` in the form that `server` reads, equal in ΔW. The rules judge the adapter first.

    A scaling that all modules have stays in the config where a whole `lora_alpha` gives it; others go into B, so that the
    server need not know rsLoRA or `alpha_pattern`. Except for PEFT and llama.cpp, ranks are padded with zeros to one rank;
    targets become plain names; for MLX-LM the factors are transposed and renamed; for llama.cpp they are one GGUF file,
    with the names and the order of rows that its base has; for SGLang, with a base, modules that it reads only together
    get LoRA of zeros where they have none. `max_rank` is the largest rank that the server takes: modules with a higher
    rank are lowered to it where that loses nothing, or, with `approximate`, to the best approximation; `approximate` with
    a `base` does the same to DoRA, which for PEFT stays DoRA without it. The rules compare the adapter with the `base`, by
    default the one that its config names if it is on this disk; the new config names a given one. With it, PiSSA and
    OLoRA become plain LoRA of twice the rank, and trained tokens and changed rows of embeddings become LoRA on those;
    `spool` opens the file that keeps the factors computed this way. `dtype` None means the adapter's own dtype where
    nothing is rounded, else float32; for llama.cpp float32, because with factors of 16 bits it rounds the activations, too.
    `ignore` are codes of rules. For vLLM, which loads the whole of a multimodal base, an adapter of its text class gets
    the names that its modules have there. Raises `FindingsFound`, and `UnsupportedAdapter` naming what the server has no
    exact form for.
    """
    chosen = server_named(server)
    form, kind = form_of(chosen), None if dtype is None else float_type(dtype)
    opened = opened_adapter(adapter)
    model = None if base is None else opened_model(base)
    judged = model or named_base(opened)[0]
    seen = with_prefix(opened) if form.bare_names else opened
    report = MergeJudge(ignore=tuple(ignore)).as_stored((seen,), judged, computing=False)
    view = view_of(opened)
    _require_form(view, chosen, model, judged, approximate=approximate)
    names = _names(view, form, model, judged)
    layout = layout_of(judged.config) if form.gguf and judged and judged.config else None
    as_dora = form.dora and not (approximate and model is not None)
    based = None if model is None else names.base(model)
    changes = changes_of(view, form, based, spool, max_rank=max_rank, as_dora=as_dora)
    # MLX-LM's config has module paths, too
    sums = tuple(replace(each, module=names.path(each.module)) for each in changes.sums) if form.mlx else changes.sums
    served = served_factors(view, form, sums, max_rank=max_rank, approximate=approximate)
    _require_rank(view, form, served, model)
    lowered = bool(served.turned.matrices)
    out = kind or (DType.F32 if layout else exact_type(served.sums, turned=lowered))
    whole = whole_tensors((view,))
    in_products = {(record.path, record.name) for record in changes.records}
    as_they_are = (step for step in whole.steps if (step.op.source.path, step.op.source.name) not in in_products)
    ranks = (*changes.ranks, *served.turned.ranks)
    # from the adapter's own factors, which `verify` reads too: those computed with the base are rounded
    idle: tuple[Idle, ...] = ()
    if form.together and model:
        idle = tuple(idle_modules(factors_of_sum((view,), (1.0,)), based or model, form.together))
    zeros = (step for each in idle for step in each.steps(out, served.rank_of_idle))
    gguf = None if layout is None else gguf_factors(served, layout, out)
    if gguf and out is DType.F64:
        raise WrongValue(f"{form.name} does not load factors of float64", hint="`dtype=float32`")
    made = gguf.shard.steps if gguf else served_steps(served, form, out)
    steps = (*made, *zeros, *(magnitude_steps(view) if as_dora else ()), *as_they_are)
    plan = adapter_plan(
        (opened,),
        (1.0,),
        steps if form.mlx or gguf else names.steps(steps),
        None if gguf else _config(view, form, served, idle, model, names, as_dora=as_dora),
        dropped=(*whole.dropped, *changes.records),
        findings=report.findings,
        notes=_notes(view, form, served, ranks, model, idle, gguf),
        ranks=ranks,
        filename=MLX_WEIGHTS if form.mlx else ADAPTER_WEIGHTS,
        base=model if changes.from_base else None,
        computed=changes.spooled,
        manifest={
            "operation": "prepare",
            "for": str(chosen),
            "served_rank": served.one_rank,
            "scale": served.scale,
            "rank": max_rank if lowered else None,
            "keep": None,
            "dtype": out.value,
            **({} if names == SAME else {"renamed": names.as_json()}),
            **({"gguf": gguf.layout.as_json()} if gguf else {}),
        },
    )
    plan = replace(plan, shards=(gguf.shard,)) if gguf else plan
    return replace(plan, warnings=(*plan.warnings, *_warnings(form, served, model, out)))


def _names(view: AdapterView, form: ServingForm, base: ModelDir | None, judged: ModelDir | None) -> Beginnings:
    """Return what the server calls the modules of the `base`, or of the one that the rules compare the adapter with."""
    names = beginnings_of(view, base) if form.whole_models else mlx_beginnings(view, base) if form.mlx else SAME
    own = form.names(model_types_of(judged))
    used = {
        ours: theirs
        for ours, theirs in own.items()
        if theirs and any(path_with(layer.target, {ours: theirs}) != layer.target for layer in view.layers)
    }
    return replace(names, parts=used) if used else names


def _require_form(
    view: AdapterView, server: str, base: ModelDir | None, judged: ModelDir | None, *, approximate: bool
) -> None:
    """Raise `UnsupportedAdapter` where the server has no form for the adapter, naming all that is in the way."""
    config, root, form = view.config, shlex.quote(str(view.adapter.root)), form_of(server)
    require_known(view)
    of_form = in_the_way(view, form, based=base is not None, approximate=approximate)
    of_base = (found(view, form, judged) for found in (class_in_the_way, not_applied, names_in_the_way))
    found = [*of_form, *stacks_in_the_way(view, form, base), *(each for some in of_base for each in some)]
    found += [each for each in experts_in_the_way(view, form, judged) if base is None or not each.options]
    if found:
        options = " ".join(dict.fromkeys(option for each in found for option in each.options))
        raise UnsupportedAdapter(
            f"{config.path}: {form.name} has no exact form for {'; '.join(each.text for each in found)}",
            hint=f"lora-tool prepare {root} --for {shlex.quote(server)} {options} -o OUT"
            if all(each.options for each in found)
            else found[0].hint
            if all(each.hint for each in found)
            else f"merge it and serve the merged model: lora-tool merge {root}",
        )
    if not view.layers and (form.whole or not view.tokens):
        why = f", and {form.name} reads its trained tokens as they are" if view.tokens else ""
        raise UnsupportedAdapter(f"{view.adapter.root} has no LoRA layers{why}: there is nothing to prepare")


def _require_rank(view: AdapterView, form: ServingForm, served: ServedFactors, base: ModelDir | None) -> None:
    """Raise `UnsupportedAdapter` where no option of the server allows the rank."""
    if form.ranks and served.largest > form.ranks[-1]:
        root, most = shlex.quote(str(view.adapter.root)), form.ranks[-1]
        given = "" if base is None else f" --base {shlex.quote(str(base.root))}"
        highest = max(served.ranks, key=served.ranks.__getitem__)
        raise UnsupportedAdapter(
            f"{view.config.path}: `{highest}` has rank {served.largest}, but {form.name} takes ranks up to {most}",
            hint=f"lora-tool prepare {root} --for {form.word}{given} --max-rank {most} --approximate -o OUT",
        )


def _config(
    view: AdapterView,
    form: ServingForm,
    served: ServedFactors,
    idle: Sequence[Idle],
    base: ModelDir | None,
    names: Beginnings,
    *,
    as_dora: bool,
) -> SideFile:
    """Return the config that the server reads: its own, or PEFT's with the new ranks."""
    if form.mlx:
        return mlx_config(served.sums, served.largest, served.scale)
    layers = {layer.module: layer for layer in view.layers}
    modules = [each.module for each in served.sums]
    ranks = {layers[each].path if each in layers else each: served.rank(each) for each in modules}
    config = config_of_sum((view,), ranks, scale=served.scale, base=base.root if base else None, as_dora=as_dora)
    if form.whole:
        return with_experts(config, [each.module for each in idle]) if idle else config
    plain = [layers[each].target if each in layers else each for each in modules if each not in served.fused]
    return _served(config, view, served, list(map(names.path, [*plain, *(each.module for each in idle)])))


def _served(config: SideFile, view: AdapterView, served: ServedFactors, targets: Sequence[str]) -> SideFile:
    """Return the config for a server: one rank, targets by the last parts of their names, experts by parameters."""
    raw = parse_json(config.content or b"{}", view.config.path)
    paths = [stack.path for stack in served.fused.values()]
    parameters = view.config.target_parameters or ()
    experts = [name for name in parameters if any(f".{path}".endswith(f".{name}") for path in paths)]
    heads = [name for name in view.config.modules_to_save if view.saved and head_of(name) in PEFT_CLASSIFIERS]
    raw |= {
        "bias": "none",
        "r": served.one_rank,
        "lora_alpha": served.alpha,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": sorted({target.rpartition(".")[2] for target in targets}),
        "target_parameters": experts or None,
        "exclude_modules": all_but(targets) if is_narrowed(view.config) else None,
        "layers_to_transform": None,
        "layers_pattern": None,
        "modules_to_save": heads or None,
        "peft_type": "LORA",
        "trainable_token_indices": None,
    }
    for name in TOKENS_FIELDS:
        raw.pop(name, None)
    return SideFile(filename=FILE_NAME, content=json_bytes(raw, indent=2, sort_keys=True), reason=config.reason)


def _warnings(form: ServingForm, served: ServedFactors, base: ModelDir | None, dtype: DType) -> Iterator[str]:
    yield from small_warnings(served.sums, dtype, served.turned.ranks)
    if form.together and base is None and (lone := lacking([each.module for each in served.sums], form.together)):
        yield f"{alone_text(lone)}, which {form.name} with transformers 5 does not load: --base MODEL adds LoRA of zeros"


def _notes(
    view: AdapterView,
    form: ServingForm,
    served: ServedFactors,
    ranks: Sequence[ModuleRank],
    base: ModelDir | None,
    idle: Sequence[Idle],
    gguf: GgufFactors | None,
) -> Iterator[str]:
    modules = [each.module for each in served.sums]
    scaling = f"scale {served.scale:g}" if form.mlx else f"alpha {served.alpha}"
    shape = f"scaling {served.scale:g}" if served.one_rank is None else f"rank {served.one_rank}, {scaling}"
    if gguf:
        shape = f"alpha {gguf.alpha:g} over the rank of each, as in a GGUF file of {gguf.layout.names.architecture}"
    yield f"preparing {view.adapter.root} for {form.name}: {counted(len(modules), 'module')}, {shape}"
    if ranks:
        yield from rank_lines(ranks)
    if form.mlx:
        yield from rope_notes(base)
    if gguf and gguf.dtype is not DType.F32:
        yield f"{form.name} rounds activations to {FLOAT_NAMES[gguf.dtype]}, too, where the factors have that type; float32 does not"
    if idle:
        names = named(sorted({each.module.rpartition(".")[2] for each in idle}))
        yield f"LoRA of zeros on {counted(len(idle), 'module')} ({names}), beside which {form.name} reads that on others"
    ends = [module for module in modules if is_end(module)]
    if form.one_end and ends and base is None:
        yield f"right only if the base has an output layer of its own, because of LoRA on `{ends[0]}`: --base MODEL checks it"
    outside = outside_language(view.layers)
    if form.towers and outside:
        yield f"{form.name} reads LoRA on {named(outside, 3)} only with {form.towers}, which some of its models support"
    if form.heads and not form.whole and view.saved:
        yield f"{form.name} takes the head only on a base that is itself a classifier: --reward-base writes one"
