"""What of an adapter a server has no exact form for, each with the options or the command that make one."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from lora_tool.adapters.experts import EXPERT, IN_EXPERT, experts_of, is_taken_for_stacks
from lora_tool.adapters.fused_experts import fused_experts
from lora_tool.adapters.gguf import layout_of
from lora_tool.adapters.view import AdapterView
from lora_tool.checkpoints import ModelDir
from lora_tool.core.display import named
from lora_tool.core.keys import Part, is_under
from lora_tool.formats.adapter_config import INITS_RECOMPUTED, ExpertLayout
from lora_tool.models.ends import MATRIX, PEFT_CLASSIFIERS, head_of, is_end, is_tied
from lora_tool.models.gguf_names import NAMES
from lora_tool.rules.serving.forms import ServingForm
from lora_tool.rules.serving.together import (
    hides_experts,
    lacking,
    model_types_of,
    outside_language,
    packed_queries,
    path_with,
    without_names,
)

WITH_BASE = "--base MODEL"


class Obstacle(Struct, frozen=True, kw_only=True):
    """A part of an adapter that a server has no exact form for, and the options with which `prepare` writes it."""

    text: str
    options: tuple[str, ...] = ()
    """Empty where merging is the only way, or there is a `hint`."""
    hint: str | None = None
    """Another way to a form that the server reads."""


def in_the_way(view: AdapterView, form: ServingForm, *, based: bool, approximate: bool) -> Iterator[Obstacle]:
    """Yield the parts of the adapter that the server has no exact form for; `based`: the base is at hand."""
    options = {WITH_BASE: based, "--approximate": approximate}
    of_form = [] if form.whole else [*_no_place(view, form), *_no_layers(view, form)]
    for each in (*_no_products(view, form), *of_form):
        if not each.options or not all(options[name] for name in each.options):
            yield each


def _no_products(view: AdapterView, form: ServingForm) -> Iterator[Obstacle]:
    """Yield the features with which a weight changes by other than s·B·A."""
    config = view.config
    if config.init_lora_weights in INITS_RECOMPUTED:
        text = f"`init_lora_weights` {config.init_lora_weights}, which takes a part out of the base first"
        yield Obstacle(text=text, options=(WITH_BASE,))
    if not form.dora and (config.use_dora or any(layer.magnitude is not None for layer in view.layers)):
        text = "DoRA, which scales the rows of W + ΔW: its change is not a product of two factors"
        yield Obstacle(text=text, options=(WITH_BASE, "--approximate"))
    if config.target_parameters and config.expert_layout != ExpertLayout.RANK_MAJOR.value:
        if config.expert_layout is not None:
            yield Obstacle(
                text=f"`lora_B_layout` {config.expert_layout}: servers and PEFT read the experts' columns in turn"
            )
        elif config.by_unsloth:
            text = "fused experts by Unsloth without `lora_B_layout`: it packed their columns in another order until 2026-09"
            yield Obstacle(text=text)


def _no_place(view: AdapterView, form: ServingForm) -> Iterator[Obstacle]:
    """Yield the features that the server cannot read as they are stored."""
    config = view.config
    if config.lora_bias:
        yield Obstacle(text=f"`lora_bias`: {form.name} has no place for LoRA's change of biases")
    biases = trained_biases(view)
    if biases:
        text = f'`bias` "{config.bias}": {form.name} has no place for trained biases, {named(biases, 3)}'
        yield Obstacle(text=text)
    if view.tokens or config.token_indices:
        text = f"single trained tokens, which {form.name} only takes as LoRA on the embedding"
        yield Obstacle(text=text, options=(WITH_BASE,))
    if not form.fused and fused_experts(view):
        yield _one_by_one(view, form)
    of_biases = {name.removesuffix(".bias") for name in biases}
    saved = sorted({item.module for item in view.parts(Part.PLAIN, Part.SAVED_MODULE)} - of_biases)
    whole = [module for module in saved if not (form.heads and head_of(module) in PEFT_CLASSIFIERS)]
    for modules, options in (
        ([module for module in whole if is_end(module)], (WITH_BASE,)),
        ([module for module in whole if not is_end(module)], ()),
    ):
        if modules:
            text = f"{named(modules, 3)} saved whole, which {form.name} does not load with an adapter"
            yield Obstacle(text=text, options=options)


def trained_biases(view: AdapterView) -> list[str]:
    """Return the biases that were trained with `bias`; those of modules that were saved whole are no such."""
    whole = frozenset(map(str, view.config.modules_to_save))
    names = view.saved if view.config.bias != "none" else ()
    return [name for name in names if name.endswith(".bias") and not is_under(name.removesuffix(".bias"), whole)]


def _one_by_one(view: AdapterView, form: ServingForm, base: ModelDir | None = None) -> Obstacle:
    root = shlex.quote(str(view.adapter.root))
    there = "BASE" if base is None else shlex.quote(str(base.root))
    command = f"lora-tool convert {root} --to peft-experts --base {there} -o EXPERTS"
    has_them = base is None or any(map(IN_EXPERT.search, base.tensors))  # `convert` takes the names from there
    return Obstacle(
        text=f"LoRA on fused experts (`target_parameters`), which {form.name} reads as one tensor for each expert",
        hint=f"write the experts one by one first: {command}" if form.experts and has_them else None,
    )


def class_in_the_way(view: AdapterView, form: ServingForm, base: ModelDir | None) -> Iterator[Obstacle]:
    """Yield what the server's class for the base does not take."""
    classes = form.classes
    if classes is None:
        return
    if lacking_lora := classes.without_lora(base):
        yield Obstacle(text=f"any LoRA on a {lacking_lora}, a class that it loads no adapter for")
        return
    if ends := refused_ends([layer.target for layer in view.layers], form, base):
        yield Obstacle(text=f"LoRA on {named(ends)}, which its {classes.of(base)} does not take")
    stacks = classes.takes_stacks(base)
    if stacks is False and form.fused and fused_experts(view):
        yield _one_by_one(view, form, base)
    if single := refused_singles(view, form, base):
        text = f"LoRA on single experts, {named(single, 3)}, for its {classes.of(base)} reads only fused ones"
        yield Obstacle(text=text, hint=to_fused(view))


def refused_singles(view: AdapterView, form: ServingForm, base: ModelDir | None) -> list[str]:
    """Return the matrices of single experts, where the server's class for the base reads only LoRA on fused experts."""
    if form.classes is None or not form.classes.takes_stacks(base):
        return []
    return [layer.target for layer in view.layers if EXPERT.fullmatch(layer.target)]


def to_fused(view: AdapterView) -> str:
    """Return the command that makes LoRA on fused experts of that on single ones."""
    root = shlex.quote(str(view.adapter.root))
    return f"put the experts together first: lora-tool convert {root} --to peft-fused -o EXPERTS"


def refused_ends(modules: Iterable[str], form: ServingForm, base: ModelDir | None) -> list[str]:
    """Return the embeddings and output layers among modules that the server's class for the base takes no LoRA on."""
    if form.classes is None:
        return []
    return [each for each in modules if is_end(each) and form.classes.takes_end(base, each) is False]


def _no_layers(view: AdapterView, form: ServingForm) -> Iterator[Obstacle]:
    """Yield which layers' factors the server reads otherwise than as they are, or not at all."""
    if form.together and not form.together.stacks:
        modules = [layer.target for layer in view.layers]
        if any(without_names(modules)):
            yield Obstacle(text=f"LoRA on experts called w1, w2 and w3, which {form.name} does not find by these names")
        if unpaired := lacking(modules, form.together):
            yield Obstacle(text=f"{alone_text(unpaired)}, which {form.name} reads only together", options=(WITH_BASE,))
    heads = sorted({layer.target for layer in view.layers if head_of(layer.target)})
    if heads and not (form.heads or form.lora_on_heads):
        yield Obstacle(text=f"LoRA on {named(heads, 3)}, a head that {form.name} does not have")
    outside = outside_language(view.layers)
    if form.language_alone and outside:
        yield Obstacle(text=f"LoRA on {named(outside, 3)}, outside of the language model, which {form.name} leaves out")
    packed = packed_queries(view.layers)
    if form.unwrapped and packed:
        yield Obstacle(
            text=f"LoRA on {named(packed, 3)}, multi-query attention in one matrix, which {form.name} leaves out"
        )
    if any(len(factor.shape) > MATRIX for layer in view.layers for factor in layer.factors):
        yield Obstacle(text="LoRA on convolutions")


def alone_text(alone: Mapping[str, str]) -> str:
    """Return what `lacking` found, by the last parts of the names."""
    pairs = sorted({(held.rpartition(".")[2], module.rpartition(".")[2]) for module, held in alone.items()})
    return "LoRA on " + " and on ".join(f"`{held}` without `{module}`" for held, module in pairs)


def stacks_in_the_way(view: AdapterView, form: ServingForm, base: ModelDir | None) -> Iterator[Obstacle]:
    """Yield the LoRA that PEFT leaves out on a base whose experts it stacks."""
    config = base.config if base else None
    if base is None or config is None or form.together is None or not form.together.as_peft:
        return
    paths = [layer.target for layer in view.layers]
    single = [path for path in paths if EXPERT.fullmatch(path)] if hides_experts(base) else []
    if single:
        text = f"LoRA on single experts, {named(single, 3)}, none of which {form.name} finds in a {config.model_type} of transformers 5"
        root = shlex.quote(str(view.adapter.root))
        yield Obstacle(text=text, hint=f"put them together: lora-tool convert {root} --to peft-fused -o OUT")
    mistaken = [path for path in paths if is_taken_for_stacks(path, config.model_type)]
    if mistaken:
        text = f"LoRA on {named(mistaken, 3)}, which {form.name} with transformers 5 takes for LoRA on the stacked experts, and leaves out"
        yield Obstacle(text=text)


def names_in_the_way(view: AdapterView, form: ServingForm, base: ModelDir | None) -> Iterator[Obstacle]:
    """Yield what has no name in a file of llama.cpp, which has those of its base's file."""
    if not form.gguf:
        return
    if base is None or base.config is None:
        text = f"an adapter without its base, by which {form.name} names the modules and orders their rows"
        yield Obstacle(text=text, options=(WITH_BASE,))
        return
    layout = layout_of(base.config)
    if layout is None:
        known = ", ".join(NAMES)
        yield Obstacle(text=f"a {base.config.model_type}: lora-tool writes its files only for {known}")
        return
    unknown = [layer.path for layer in view.layers if layout.name_of_path(layer.target, layer.path) is None]
    if unknown:
        yield Obstacle(text=f"LoRA on {named(unknown, 3)}, which have no name in {form.name}'s {layout.model_type}")


def not_applied(view: AdapterView, form: ServingForm, base: ModelDir | None) -> Iterator[Obstacle]:
    """Yield the LoRA that the server loads and never applies, or refuses, for the type of its base."""
    types = model_types_of(base)
    names = form.names(types)
    found = [layer.target for layer in view.layers if path_with(layer.target, names) is None]
    if found:
        yield Obstacle(text=f"LoRA on {named(found, 3)}, which {form.name} does not apply{of_type(types)}")


def experts_in_the_way(view: AdapterView, form: ServingForm, base: ModelDir | None) -> Iterator[Obstacle]:
    """Yield that some matrices of a layer's experts have no LoRA, where the server stacks that on all of them."""
    reads, held = form.together, {layer.target for layer in view.layers}
    if reads is None or not reads.stacks or reads.as_peft:
        return
    if half := _half_of_stacks(view, form, base):
        yield Obstacle(text=f"LoRA on only one parameter of {named(half, 2)}, which {form.name} reads only on both")
    layers = {experts_of(path) for path in held} - {None}
    missing = sorted(path for path in base.modules - held if experts_of(path) in layers) if base and layers else []
    if missing:
        text = f"LoRA on only some matrices of a layer's experts (none on {named(missing, 2)}), which {form.name} reads only on all"
        yield Obstacle(text=text, options=(WITH_BASE,))
    elif base is None and (unpaired := lacking(held, reads)):
        yield Obstacle(text=f"{alone_text(unpaired)}, which {form.name} reads only together", options=(WITH_BASE,))


def _half_of_stacks(view: AdapterView, form: ServingForm, base: ModelDir | None) -> list[str]:
    """Return the fused experts with LoRA on one of their two parameters, for a class that reads them as PEFT packs them."""
    if form.classes is None or not form.classes.takes_stacks(base):
        return []
    counts = Counter(layer.module.removesuffix(".base_layer") for layer in view.layers)
    return [path for path, count in counts.items() if path.endswith(".experts") and count == 1]


def of_type(types: Iterable[str]) -> str:
    """Return for a message that a model of these types is meant; nothing where any is."""
    return next((f" in a {each} model" for each in types), "")


def tied_in_the_way(view: AdapterView, form: ServingForm, base: ModelDir | None) -> Iterator[Obstacle]:
    """Yield trained ends of a base that ties embeddings and output layer, where the server cannot read them.

    Decided by names: an end that was saved but not named in the config counts as equal to the base's.
    """
    if form.whole or base is None or not is_tied(base):
        return
    root = shlex.quote(str(view.adapter.root))
    ends = [layer.target for layer in view.layers if is_end(layer.target)]
    if form.one_end and ends:
        text = f"LoRA on {named(ends)}, and {base.root} ties embeddings and output layer"
        hint = f"merge it into a model with two matrices: lora-tool merge --untie {root}"
        yield Obstacle(text=text, hint=hint)
    config = view.config
    whole = [module for module in map(str, config.modules_to_save) if is_end(module)]
    if whole and not (form.mlx and config.ensure_weight_tying):
        yield Obstacle(text=f"{named(whole)} saved whole, and {base.root} ties embeddings and output layer")
    if (view.tokens or config.token_indices) and not form.mlx:
        yield Obstacle(text=f"single trained tokens, and {base.root} ties embeddings and output layer")
