"""LT803, LT806 to LT810 and LT812 to LT814: LoRA in a form that a server does not read as PEFT does."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from lora_tool.adapters.fused_experts import fused_experts
from lora_tool.adapters.view import LoraLayer
from lora_tool.checkpoints.gguf_adapter import GGUF_ADAPTER
from lora_tool.core.display import named
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.report import Severity
from lora_tool.formats.adapter_config import INITS_RECOMPUTED, INITS_THAT_KEEP_THE_BASE
from lora_tool.models.ends import MATRIX
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject, Server
from lora_tool.rules.serving.forms import ServingForm
from lora_tool.rules.serving.obstacles import (
    WITH_BASE,
    alone_text,
    experts_in_the_way,
    refused_singles,
    stacks_in_the_way,
    to_fused,
)
from lora_tool.rules.serving.servers import (
    NEEDS,
    WHOLE,
    asked,
    asked_for_peft,
    command,
    every_form,
    fault,
    merged,
    or_merged,
    prepared,
)
from lora_tool.rules.serving.together import (
    ReadTogether,
    lacking,
    outside_language,
    packed_queries,
    stacked_otherwise,
    weight_beside,
    without_names,
)


@rule("LT803", Severity.WARNING, on=AdapterSubject, needs=WHOLE)
def served_rank(subject: AdapterSubject) -> Iterator[Fault]:
    """A rank above the server's default limit.

    What it does: Compares the largest rank with vLLM's `--max-lora-rank`, which is 16 by default and 512 at most.
    SGLang takes the rank from the adapters that it starts with.
    Why it matters: vLLM refuses the adapter: "LoRA rank 64 is greater than max_lora_rank 16".
    Example: `vllm serve BASE --enable-lora --lora-modules name=ADAPTER` with an adapter of `"r": 64`.
    What to do: Start the server with the rank that the message names, or lower the ranks: `lora-tool prepare ADAPTER
    --for vllm --max-rank 16 -o OUT`, with `--approximate` if that loses a part of ΔW.
    """
    # LoRA on the parameter of several experts has rows for each of them
    config = subject.config
    ranks = [config.rank(each.path) if each.path != each.target else each.rank for each in subject.layers if each.rank]
    rank = max([*ranks, *map(int, subject.config.rank_pattern.values()), *([] if ranks else [subject.config.r])])
    for form in (each for each in asked(subject) if each.ranks):
        largest, default = form.ranks[-1], form.default_rank
        if rank > largest:
            message = f"{form.name} refuses ranks above {largest}, but the adapter's largest is {rank}"
            hint = prepared(subject, form, f"--max-rank {largest}", "--approximate")
            yield fault(subject, "r", message, severity=Severity.ERROR, hint=hint)
        elif rank > default:
            needed = form.rank_option(rank)
            name = shlex.quote(f"{subject.checkpoint.root.name}={subject.checkpoint.root}")
            lower = command(subject, form, f"--max-rank {default}", "--approximate")
            towers = f" {form.towers}" if outside_language(subject.layers) else ""
            hint = form.start.format(name=name, rank=needed, towers=towers)
            hint = hint if lower is None else f"{hint}, or {lower}"
            message = f"{form.name} accepts ranks up to {default} by default, but the adapter's largest is {rank}"
            yield fault(subject, "r", message, hint=hint)


@rule("LT806", Severity.ERROR, on=AdapterSubject, needs=NEEDS)
def served_patterns(subject: AdapterSubject) -> Iterator[Fault]:
    """Ranks or alphas per module, which servers refuse or ignore.

    What it does: Looks for entries of `rank_pattern` and `alpha_pattern` that differ from `r` and `lora_alpha`. SGLang,
    and older versions of vLLM (`--for vllm@0.27`), scale every module by the same lora_alpha / r. llama.cpp ignores
    `alpha_pattern`, and MLX-LM has one rank and one scale. PEFT stacks LoRA on single
    experts for the models of transformers 5, with `r` and `lora_alpha` for all: with patterns or rsLoRA, gate and up get
    another scaling than they were trained with.
    Why it matters: With wrong scalings the server silently runs a different model from the trained one.
    Example: `"alpha_pattern": {"down_proj": 64}` beside `"lora_alpha": 16`.
    What to do: Write the same ΔW with one rank and one alpha: `lora-tool prepare ADAPTER --for SERVER -o OUT`.
    """
    config = subject.config
    differ = {
        "rank_pattern": any(rank != config.r for rank in config.rank_pattern.values()),
        "alpha_pattern": any(alpha != config.lora_alpha for alpha in config.alpha_pattern.values()),
    }
    for form in asked_for_peft(subject):
        known = {layer.target: (layer.rank, layer.scaling) for layer in subject.layers}
        forms = {path: (rank, scaling) for path, (rank, scaling) in known.items() if rank and scaling is not None}
        otherwise = stacked_otherwise(config, forms) if _reads_together(form, subject) else None
        if otherwise is not None:
            hint = prepared(subject, form, WITH_BASE)
            severity = Severity.WARNING if subject.base is None else None
            message = f"{form.name} with transformers 5 {otherwise}"
            yield fault(subject, None, message, severity=severity, hint=hint)
    for form in asked(subject):
        for name in (name for name, there in differ.items() if there and name in form.fields):
            message = f"{form.name} {form.fields[name]} `{name}` and scales every module alike"
            yield fault(subject, name, message, hint=prepared(subject, form))


@rule("LT807", Severity.ERROR, on=AdapterSubject, needs=NEEDS)
def served_rslora(subject: AdapterSubject) -> Iterator[Fault]:
    """rsLoRA, whose scaling the server does not apply.

    What it does: Looks at `use_rslora` for SGLang and llama.cpp, which always scale by lora_alpha / r.
    Why it matters: The server silently applies the adapter √r times weaker than it was trained.
    Example: With `"use_rslora": true` and `"r": 64` the server applies an eighth of the trained change.
    What to do: Write the same ΔW with a scaling that the server applies: `lora-tool prepare ADAPTER --for SERVER -o OUT`.
    """
    config = subject.config
    if config.use_rslora and config.r > 1:
        scaling, applied = f"{config.scaling(''):.3g}", f"{config.lora_alpha / config.r:.3g}"
        for form in (each for each in asked(subject) if "use_rslora" in each.fields):
            message = f"{form.name} scales by alpha/r, {applied}, not by alpha/√r, {scaling}"
            yield fault(subject, "use_rslora", message, hint=prepared(subject, form))


@rule("LT808", Severity.ERROR, on=AdapterSubject, needs=NEEDS)
def served_init(subject: AdapterSubject) -> Iterator[Fault]:
    """An initialisation that changed the base.

    What it does: Looks at `init_lora_weights` for PiSSA, OLoRA, CorDA, LoftQ and other initialisations that changed the
    base's weights before training. vLLM refuses them (older versions ignore them), SGLang ignores them. PEFT repeats
    them on every load; those with `niter` give random results each time, CorDA does not load, and LoRA-GA is loaded
    onto the unchanged base.
    Why it matters: The adapter was trained on the changed base. The original base still holds the part that the
    initialisation took out, so the result is wrong by that part.
    Example: `"init_lora_weights": "pissa_niter_16"`.
    What to do: Write PiSSA and OLoRA as a plain LoRA of twice the rank: `lora-tool prepare ADAPTER --for SERVER --base
    BASE -o OUT`. Save others as a plain LoRA with the initial adapter of the run: `model.save_pretrained(OUT,
    path_initial_model_for_weight_conversion=INITIAL)`.
    """
    init = subject.config.init_lora_weights
    if init in INITS_THAT_KEEP_THE_BASE:
        return
    hint = "save it as a plain LoRA: model.save_pretrained(OUT, path_initial_model_for_weight_conversion=INITIAL)"
    for form in (*asked_for_peft(subject), *asked(subject)):
        if init == "lora_ga":
            message = f"lora_ga subtracted its initial factors from the base, but {form.name} loads the adapter onto the unchanged base"
            yield fault(subject, "init_lora_weights", message, hint=hint)
        elif form.server is not Server.PEFT:
            message = (
                f"{form.name} {form.fields['init_lora_weights']} the initialisation {init}, which changed the base"
            )
            known = init in INITS_RECOMPUTED
            yield fault(subject, "init_lora_weights", message, hint=or_merged(subject, form) if known else hint)
        elif init == "corda":
            message = "PEFT cannot load the initialisation corda again without the covariances of the training data"
            yield fault(subject, "init_lora_weights", message, hint=hint)
        elif "niter" in init:
            message = f"PEFT repeats the random initialisation {init}, so the base is different on every load"
            yield fault(subject, "init_lora_weights", message, severity=Severity.WARNING, hint=hint)


@rule("LT809", Severity.ERROR, on=AdapterSubject, needs=NEEDS)
def served_targets(subject: AdapterSubject) -> Iterator[Fault]:
    """Targets in a form that the server cannot read.

    What it does: Looks for `target_modules` that is a string, of which SGLang accepts only `all` and `all-linear` and
    no regular expression; for `target_parameters` (fused experts, routers), which vLLM and SGLang support only for some
    models, and llama.cpp's converter and MLX-LM do not read as PEFT saves them; and for `fan_in_fan_out` (GPT-2's Conv1D),
    whose factors llama.cpp's converter transposes.
    Why it matters: SGLang stops with "Only 'all' or 'all-linear' can be used".
    Example: `"target_modules": ".*language_model.*proj"`.
    What to do: List the targets by name: `lora-tool prepare ADAPTER --for sglang -o OUT`. Write fused experts one by one
    for vLLM and MLX-LM: `lora-tool convert ADAPTER --to peft-experts --base BASE -o EXPERTS`, then
    `lora-tool prepare EXPERTS --for SERVER -o OUT`; write llama.cpp's file: `lora-tool prepare ADAPTER --for llama.cpp
    --base BASE -o OUT`; for SGLang, merge the adapter and serve the merged model:
    `lora-tool merge ADAPTER`. `lora-tool prepare` alone makes routers targets by name.
    """
    config = subject.config
    for form in asked(subject):
        pattern = isinstance(config.target_modules, str) and config.target_modules not in ("all", "all-linear")
        if not form.regex and pattern:
            hint = prepared(subject, form)
            yield fault(subject, "target_modules", f"{form.name} refuses regular expressions", hint=hint)
        if form.gguf and config.fan_in_fan_out:
            message = (
                f"{form.name}'s converter transposes LoRA on Conv1D like a weight, and adds it the wrong way round"
            )
            yield fault(subject, "fan_in_fan_out", message, hint=prepared(subject, form))
        if config.target_parameters:
            yield from _served_parameters(subject, form)
        if single := refused_singles(subject.view, form, subject.base):
            yield fault(
                subject,
                single[0],
                f"{form.name} reads LoRA on the experts of such a base only as PEFT packs it, not on single ones: {named(single, 3)}",
                hint=to_fused(subject.view),
            )


def _served_parameters(subject: AdapterSubject, form: ServingForm) -> Iterator[Fault]:
    """Yield the fault of LoRA on fused experts, or on one parameter such as a router, if it has one for the server."""
    try:
        fused = bool(fused_experts(subject.view))
    except UnsupportedAdapter:
        fused = True
    if form.gguf and not fused:
        return  # its converter reads the names of the tensors, which are those of a module
    names = subject.config.target_parameters or ()
    what = "LoRA on fused experts" if fused else f"LoRA on the parameter `{names[0]}`"
    classes = form.classes
    if classes is not None and (classes.without_lora(subject.base) or (not fused and classes.of(subject.base))):
        return  # a router is a module like others, by the name that LT820 compares
    stacks = None if classes is None or not fused else classes.takes_stacks(subject.base)
    if stacks:
        return
    unsure = form.some_models and stacks is None
    how = f"supports {what} only for some models" if unsure else f"does not read {what} as PEFT saves it"
    severity = Severity.WARNING if unsure else None
    hint = prepared(subject, form, each_expert=True)
    yield fault(subject, "target_parameters", f"{form.name} {how}", severity=severity, hint=hint)


@rule("LT810", Severity.ERROR, on=AdapterSubject, needs=NEEDS)
def served_features(subject: AdapterSubject) -> Iterator[Fault]:
    """A PEFT feature that the server does not support.

    What it does: Looks for aLoRA, layer replication, block-diagonal LoRA, QALoRA and other features that change what an
    adapter computes. vLLM refuses those that it knows, SGLang ignores them.
    Why it matters: A server that does not refuse the adapter runs a different model from the trained one.
    Example: `"alora_invocation_tokens": [128000, 271]`.
    What to do: Serve it with PEFT; `lora-tool merge` also refuses these features.
    """
    hint = "serve it with PEFT: PeftModel.from_pretrained(base, ADAPTER)"
    for form in asked(subject):
        for name in subject.config.refused:
            yield fault(subject, name, f"{form.name} {form.fields[name]} `{name}`", hint=hint)


@rule("LT812", Severity.ERROR, on=AdapterSubject, needs=WHOLE | {Need.NAMES})
def served_text_names(subject: AdapterSubject) -> Iterator[Fault]:
    """An adapter of the text model, on a server that loads the whole model.

    What it does: For vLLM, which loads the whole model, looks for an adapter with the names of the text class that
    `AutoModelForCausalLM` builds from a multimodal base (Qwen3.5, Llama 4, Mllama).
    Why it matters: vLLM finds none of the adapter's modules under their names and silently serves the base.
    Example: LoRA on `model.layers.0.mlp.up_proj`, but the base has `model.language_model.layers.0.mlp.up_proj`.
    What to do: Write it under the names of the whole model: `lora-tool prepare ADAPTER --for vllm --base BASE -o OUT`. Or
    merge it into the whole model and serve that: `lora-tool merge ADAPTER`.
    """
    base = subject.base
    for form in (each for each in asked(subject) if each.whole_models):
        text = subject.text_class
        if text is None or base is None:
            return
        moved = next(layer.target for layer in subject.layers if text.path(layer.target) != layer.target)
        message = f"{form.name} loads the whole of {base.root}, where `{moved}` is `{text.path(moved)}`"
        message += ": it finds none of the adapter's modules and silently serves the base"
        yield fault(subject, moved, message, hint=or_merged(subject, form, WITH_BASE))


@rule("LT813", Severity.ERROR, on=AdapterSubject, needs=NEEDS)
def served_as_peft_saves(subject: AdapterSubject) -> Iterator[Fault]:
    """An adapter in a format that the program does not read.

    What it does: Reports that MLX-LM reads `adapters.safetensors`, with transposed factors and different names, and that
    only llama.cpp reads an adapter in its format GGUF.
    Why it matters: `mlx_lm.generate --adapter-path ADAPTER` does not find the file.
    Example: Any adapter that PEFT saved.
    What to do: Write it in MLX-LM's format: `lora-tool prepare ADAPTER --for mlx -o OUT`. Give other programs than
    llama.cpp the PEFT adapter that a GGUF file was written from.
    """
    if subject.checkpoint.kind is GGUF_ADAPTER:
        for form in (each for each in every_form(subject) if not each.gguf):
            hint = "give it the PEFT adapter that the file was written from"
            yield fault(subject, None, f"{form.name} does not read llama.cpp's format GGUF", hint=hint)
    for form in (each for each in asked(subject) if each.mlx):
        message = f"{form.name} does not read PEFT's file, but adapters.safetensors, with transposed factors and different names"
        yield fault(subject, None, message, hint=prepared(subject, form))


@rule("LT814", Severity.ERROR, on=AdapterSubject, needs=WHOLE)
def served_together(subject: AdapterSubject) -> Iterator[Fault]:
    """LoRA on modules that the server reads only together with others.

    What it does: For SGLang, which has the weights of q, k and v in one matrix, and those of gate and up, looks for LoRA
    on k, v or up without LoRA on q or gate, for LoRA on q or k without v, and for LoRA on only some of the matrices of
    experts, or under Mixtral's names. Without the base it is a warning: some models have no gate. For PEFT, which stacks
    the LoRA on single experts for the models of transformers 5, it looks for LoRA on their gate or up alone. For vLLM,
    which stacks all matrices of all experts of a layer, it looks for LoRA on some of them.
    Why it matters: SGLang 0.5.23 refuses LoRA on q without v (`KeyError`). The others it loads, and ends at the first
    request: "Cannot find target module name". PEFT loads LoRA on gate and up of experts without down, and none of it
    does anything ("Found missing adapter keys"); LoRA on one of the two it refuses. vLLM stops with an empty
    `AssertionError`.
    Example: `"target_modules": ["up_proj", "down_proj"]`.
    What to do: Write it with LoRA of zeros on the others: `lora-tool prepare ADAPTER --for sglang --base BASE -o OUT`.
    """
    paths = {layer.target: layer for layer in subject.layers}
    for form in (*asked_for_peft(subject), *asked(subject)):
        reads = _reads_together(form, subject)
        if reads is None:
            continue
        for module in () if reads.stacks else list(without_names(paths))[:1]:
            message = f"{form.name} does not find LoRA on experts called w1, w2 and w3"
            yield fault(subject, module, message)
        for each in experts_in_the_way(subject.view, form, subject.base):
            severity = Severity.WARNING if subject.base is None else None
            yield fault(
                subject, None, f"{each.text}: {reads.otherwise}", severity=severity, hint=prepared(subject, form)
            )
        unpaired = {
            module: held
            for module, held in ({} if reads.stacks and not reads.as_peft else lacking(paths, reads)).items()
            if subject.base is None or weight_beside(subject.base, module, _width(paths[held])) is not None
        }
        if unpaired:
            message = f"{alone_text(unpaired)}, which {form.name} reads only together: {reads.otherwise}"
            severity = Severity.WARNING if subject.base is None else None
            hint = prepared(subject, form)
            yield fault(subject, next(iter(unpaired.values())), message, severity=severity, hint=hint)


@rule("LT815", Severity.ERROR, on=AdapterSubject, needs=WHOLE | {Need.BASE_IN_PART})
def served_left_out(subject: AdapterSubject) -> Iterator[Fault]:
    """LoRA that the server leaves out without an error.

    What it does: Looks for LoRA on a multimodal model's encoders, and on what leads from them to its language model.
    SGLang, llama.cpp and MLX-LM have LoRA in the language model alone; vLLM, too, unless it is started with
    `--enable-tower-connector-lora`, which it ignores for some models. For vLLM it also looks for LoRA on `c_attn` of
    GPT-BigCode with multi-query attention, which vLLM 0.32 does not wrap ("It will be ignored" in its log). For PEFT, given
    a base whose experts transformers 5 stacks, it looks for LoRA on shared experts and dense layers: their names end
    like those of experts, and PEFT 0.21 takes their LoRA for that on the stacks. LoRA on single experts of other models
    (Qwen2-MoE, Jamba, Phi-3.5-MoE) it does not find at all.
    Why it matters: The server silently runs a different model from the trained one.
    Example: `"target_modules": "all-linear"` with Qwen2.5-VL, whose `model.visual` then has LoRA, too.
    What to do: Merge the adapter and serve the merged model: `lora-tool merge ADAPTER`.
    """
    outside, packed = outside_language(subject.layers), packed_queries(subject.layers)
    for form in asked_for_peft(subject):
        for each in stacks_in_the_way(subject.view, form, subject.base):
            yield fault(subject, None, each.text, hint=each.hint or merged(subject))
    for form in asked(subject):
        if outside:
            message = f"{form.name} leaves out LoRA outside of the language model: {named(outside, 3)}"
            start = f"start {form.name} with {form.towers}, which some of its models support; or "
            hint = f"{start if form.towers else ''}{merged(subject)}"
            yield fault(subject, outside[0], message, hint=hint)
        if packed and form.unwrapped:
            message = f"{form.name} leaves out LoRA on {named(packed, 3)}, multi-query attention in one matrix"
            yield fault(subject, packed[0], message)


def _reads_together(form: ServingForm, subject: AdapterSubject) -> ReadTogether | None:
    """Return the modules that the server reads only together on this base, or an unknown one; None if none."""
    reads, config = form.together, subject.base.config if subject.base is not None else None
    return reads if reads is not None and (config is None or reads.is_of(config.model_type)) else None


def _width(layer: LoraLayer) -> int:
    return layer.a.shape[1] if layer.a is not None and len(layer.a.shape) == MATRIX else 0
