"""LT8xx: what a server that takes adapters unmerged will refuse or ignore. They run with `--for` only.

What is said of vLLM is from its `vllm/lora/peft_helper.py` and `lora_model.py`, of SGLang from its
`python/sglang/srt/lora/` (`lora_config.py`, `lora_manager.py`, `utils.py`), as of autumn 2026. Both change fast: where
older releases behave otherwise, the message says so.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from lora_tool.architectures.ends import is_end
from lora_tool.architectures.heads import PEFT_CLASSIFIERS, head_of
from lora_tool.formats.adapter_config import INITS_THAT_KEEP_THE_BASE
from lora_tool.keys import Part
from lora_tool.report import Severity
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject, Server
from lora_tool.rules.shared.heads import head_weight, saved_heads

_NEEDS = frozenset({Need.CONFIG, Need.SERVER})
_WHOLE = _NEEDS | {Need.WEIGHTS}

_DEFAULT_MAX_RANK = 16
_LARGEST_RANK = 512
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
_NAMES = {Server.PEFT: "PEFT", Server.VLLM: "vLLM", Server.SGLANG: "SGLang"}
_SERVERS = (Server.VLLM, Server.SGLANG)


def _merge(subject: AdapterSubject) -> str:
    """Return the command that makes a model of it, which every server takes."""
    root = str(subject.checkpoint.root)
    reward = "--rm " if subject.is_reward() else ""
    return f"merge it, and serve the model: lora-tool merge {reward}{shlex.quote(root)}"


def _fault(
    subject: AdapterSubject,
    where: str | None,
    message: str,
    *,
    severity: Severity | None = None,
    hint: str | None = None,
) -> Fault:
    hint = hint or _merge(subject)
    return Fault(message=message, subject=where, path=subject.config_path, severity=severity, hint=hint)


def _asked(subject: AdapterSubject, *servers: Server) -> Iterator[Server]:
    """Yield those of `servers` that were asked for, in the order of the words."""
    return (server for server in servers if server in subject.servers)


def _listed(names: Iterator[str] | list[str]) -> str:
    found = sorted(set(names))
    return ", ".join(f"`{name}`" for name in found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")  # noqa: PLR2004


@rule("LT801", Severity.ERROR, on=AdapterSubject, needs=_WHOLE)
def served_saved_modules(subject: AdapterSubject) -> Iterator[Fault]:
    """Modules saved whole, which servers do not load with an adapter.

    What it does: Looks at `modules_to_save` and at tensors that are no LoRA. vLLM refuses them, but for the heads
    `score` and `classifier`, which releases since autumn 2026 take for classifiers. SGLang does not apply them.

    Why it matters: Every reward adapter has such a head. Without it there are no rewards.

    Example: `modules_to_save` is `["classifier", "score"]`, as PEFT writes it for every SEQ_CLS adapter.

    What to do: Merge it, and serve the model: `lora-tool merge ADAPTER` (`--rm` for a reward model).
    """
    saved = {item.module for item in subject.view.parts(Part.PLAIN)} | set(subject.config.modules_to_save)
    if not saved:
        return
    heads_only = all(head_of(name) in PEFT_CLASSIFIERS for name in saved)
    for server in _asked(subject, *_SERVERS):
        if server is Server.SGLANG:
            yield _fault(subject, "modules_to_save", f"SGLang does not apply modules saved whole: {_listed([*saved])}")
        elif heads_only:
            message = f"vLLM before autumn 2026 refuses modules saved whole: {_listed([*saved])}"
            yield _fault(subject, "modules_to_save", message, severity=Severity.WARNING)
        else:
            yield _fault(subject, "modules_to_save", f"vLLM refuses modules saved whole: {_listed([*saved])}")


@rule("LT802", Severity.ERROR, on=AdapterSubject, needs=_WHOLE)
def served_dora(subject: AdapterSubject) -> Iterator[Fault]:
    """DoRA, which servers do not implement.

    What it does: Looks at `use_dora` and for magnitude vectors. vLLM and SGLang refuse both.

    Why it matters: The server does not start, or refuses the adapter at the first request.

    Example: `"use_dora": true`: vLLM says "vLLM does not yet support DoRA".

    What to do: Merge it, and serve the model: `lora-tool merge ADAPTER`.
    """
    if subject.config.use_dora or any(layer.magnitude is not None for layer in subject.layers):
        for server in _asked(subject, *_SERVERS):
            yield _fault(subject, "use_dora", f"{_NAMES[server]} refuses DoRA")


@rule("LT803", Severity.WARNING, on=AdapterSubject, needs=_WHOLE)
def served_rank(subject: AdapterSubject) -> Iterator[Fault]:
    """A rank above what the server takes by default.

    What it does: Compares the largest rank with vLLM's `--max-lora-rank`, which is 16 unless it is given and 512 at
    most. SGLang takes the rank from the adapters that it starts with.

    Why it matters: vLLM refuses the adapter: "LoRA rank 64 is greater than max_lora_rank 16".

    Example: `"r": 64`, and `vllm serve BASE --enable-lora --lora-modules name=ADAPTER`.

    What to do: Start the server with the rank that the message names.
    """
    ranks = [layer.rank for layer in subject.layers if layer.rank]
    rank = max([*ranks, *map(int, subject.config.rank_pattern.values()), *([] if ranks else [subject.config.r])])
    for _ in _asked(subject, Server.VLLM):
        if rank > _LARGEST_RANK:
            message = f"vLLM refuses ranks above {_LARGEST_RANK}, the largest here is {rank}"
            yield _fault(subject, "r", message, severity=Severity.ERROR)
        elif rank > _DEFAULT_MAX_RANK:
            needed = next(known for known in _VLLM_RANKS if known >= rank)
            path = shlex.quote(f"{subject.checkpoint.root.name}={subject.checkpoint.root}")
            hint = f"vllm serve BASE --enable-lora --max-lora-rank {needed} --lora-modules {path}"
            message = f"vLLM takes ranks up to {_DEFAULT_MAX_RANK} unless it is told more, the largest here is {rank}"
            yield _fault(subject, "r", message, hint=hint)


@rule("LT804", Severity.ERROR, on=AdapterSubject, needs=_WHOLE)
def served_embeddings(subject: AdapterSubject) -> Iterator[Fault]:
    """Trained tokens or LoRA on embeddings, which few servers take.

    What it does: Looks for single tokens trained by themselves (`trainable_token_indices`), which both servers refuse
    by the name of their tensors, and for LoRA on embeddings and output layers, which they take for some models only.

    Why it matters: The server refuses the adapter; or it leaves out the new tokens, which are then as untrained.

    Example: `"trainable_token_indices": [128256]` for one new special token.

    What to do: Merge it, and serve the model: `lora-tool merge ADAPTER`.
    """
    tokens = subject.view.tokens or subject.config.token_indices
    ends = [layer.target for layer in subject.layers if layer.embedding or is_end(layer.target)]
    for server in _asked(subject, *_SERVERS):
        if tokens:
            yield _fault(subject, "trainable_token_indices", f"{_NAMES[server]} refuses tokens trained by themselves")
        if ends:
            message = f"{_NAMES[server]} takes LoRA on {_listed(ends)} for some models only"
            yield _fault(subject, "target_modules", message, severity=Severity.WARNING)


@rule("LT805", Severity.ERROR, on=AdapterSubject, needs=_WHOLE)
def served_biases(subject: AdapterSubject) -> Iterator[Fault]:
    """Trained biases, which servers refuse or leave out.

    What it does: Looks at `bias` and `lora_bias`. vLLM refuses them ("Adapter bias is not supported"), SGLang ignores
    them.

    Why it matters: Without its biases the model is another one.

    Example: `"bias": "all"`.

    What to do: Merge it, and serve the model: `lora-tool merge ADAPTER`.
    """
    config = subject.config
    fields = [name for name, there in (("bias", config.bias != "none"), ("lora_bias", config.lora_bias)) if there]
    for server in _asked(subject, *_SERVERS):
        for name in fields:
            verb = "refuses" if server is Server.VLLM else "leaves out"
            yield _fault(subject, name, f"{_NAMES[server]} {verb} trained biases")


@rule("LT806", Severity.ERROR, on=AdapterSubject, needs=_NEEDS)
def served_patterns(subject: AdapterSubject) -> Iterator[Fault]:
    """Ranks or alphas per module, which servers refuse or ignore.

    What it does: Looks for entries of `rank_pattern` and `alpha_pattern` that differ from `r` and `lora_alpha`. SGLang
    refuses them; its releases before autumn 2026, and vLLM's, scale every module by the same lora_alpha / r.

    Why it matters: Modules scaled wrongly give a model that nobody trained, and nothing says so.

    Example: `"alpha_pattern": {"down_proj": 64}` beside `"lora_alpha": 16`.

    What to do: Merge it, and serve the model: `lora-tool merge ADAPTER`.
    """
    config = subject.config
    differ = {
        "rank_pattern": any(rank != config.r for rank in config.rank_pattern.values()),
        "alpha_pattern": any(alpha != config.lora_alpha for alpha in config.alpha_pattern.values()),
    }
    for server in _asked(subject, *_SERVERS):
        for name in (name for name, there in differ.items() if there):
            if server is Server.SGLANG:
                yield _fault(subject, name, f"SGLang refuses `{name}`, and older releases ignore it")
            else:
                message = f"vLLM before autumn 2026 ignores `{name}`, and scales every module alike"
                yield _fault(subject, name, message, severity=Severity.WARNING)


@rule("LT807", Severity.ERROR, on=AdapterSubject, needs=_NEEDS)
def served_rslora(subject: AdapterSubject) -> Iterator[Fault]:
    """rsLoRA, whose scaling the server does not apply.

    What it does: Looks at `use_rslora` for SGLang, which scales by lora_alpha / r whatever it says.

    Why it matters: The adapter works, √r times weaker than it was trained, and nothing says so.

    Example: `"use_rslora": true` with `"r": 64`: an eighth of the trained change.

    What to do: Merge it, and serve the model: `lora-tool merge ADAPTER`.
    """
    config = subject.config
    if config.use_rslora and config.r > 1:
        for _ in _asked(subject, Server.SGLANG):
            message = f"SGLang scales by alpha/r, {config.lora_alpha / config.r:.3g}, not by alpha/√r, {config.scaling(''):.3g}"
            yield _fault(subject, "use_rslora", message)


@rule("LT808", Severity.ERROR, on=AdapterSubject, needs=_NEEDS)
def served_init(subject: AdapterSubject) -> Iterator[Fault]:
    """An initialisation that changed the base.

    What it does: Looks at `init_lora_weights` for PiSSA, OLoRA, CorDA, LoftQ and others that changed the base's weights
    before training. vLLM refuses them (older releases ignore them), SGLang ignores them. PEFT repeats them on every
    load; those with `niter` are random each time.

    Why it matters: The adapter was trained on the changed base. On the original it is wrong by what was taken out.

    Example: `"init_lora_weights": "pissa_niter_16"`.

    What to do: Save it as a plain LoRA where the run began: `model.save_pretrained(OUT,
    path_initial_model_for_weight_conversion=INITIAL)`.
    """
    init = subject.config.init_lora_weights
    if init in INITS_THAT_KEEP_THE_BASE or init == "lora_ga":
        return
    hint = "save it as a plain LoRA: model.save_pretrained(OUT, path_initial_model_for_weight_conversion=INITIAL)"
    for server in _asked(subject, Server.PEFT, *_SERVERS):
        if server is not Server.PEFT:
            verb = "refuses" if server is Server.VLLM else "ignores"
            message = f"{_NAMES[server]} {verb} the initialisation {init}, which changed the base"
            yield _fault(subject, "init_lora_weights", message, hint=hint)
        elif "niter" in init:
            message = f"PEFT repeats the initialisation {init} with random numbers: another base on every load"
            yield _fault(subject, "init_lora_weights", message, severity=Severity.WARNING, hint=hint)


@rule("LT809", Severity.ERROR, on=AdapterSubject, needs=_NEEDS)
def served_targets(subject: AdapterSubject) -> Iterator[Fault]:
    """Targets in a form that the server does not read.

    What it does: Looks for `target_modules` that are a regular expression, of which SGLang takes only the words `all`
    and `all-linear`; and for `target_parameters` (fused experts), which servers take for some models only.

    Why it matters: SGLang stops with "Only 'all' or 'all-linear' can be used".

    Example: `"target_modules": ".*language_model.*proj"`.

    What to do: Merge it, and serve the model: `lora-tool merge ADAPTER`.
    """
    config = subject.config
    for server in _asked(subject, *_SERVERS):
        pattern = isinstance(config.target_modules, str) and config.target_modules not in ("all", "all-linear")
        if server is Server.SGLANG and pattern:
            names = sorted({layer.target.rpartition(".")[2] for layer in subject.layers})
            hint = f'list the names in adapter_config.json: "target_modules": {str(names).replace(chr(39), chr(34))}'
            yield _fault(subject, "target_modules", "SGLang refuses a regular expression", hint=hint)
        if config.target_parameters:
            message = f"{_NAMES[server]} takes LoRA on fused experts for some models only"
            yield _fault(subject, "target_parameters", message, severity=Severity.WARNING)


@rule("LT810", Severity.ERROR, on=AdapterSubject, needs=_NEEDS)
def served_features(subject: AdapterSubject) -> Iterator[Fault]:
    """A feature of PEFT that the server does not have.

    What it does: Looks for aLoRA, layer replication, block-diagonal LoRA, QALoRA and others that change what an adapter
    means. vLLM refuses those that it knows, SGLang does not read them.

    Why it matters: Where it is not refused, the model that is served is not the one that was trained.

    Example: `"alora_invocation_tokens": [128000, 271]`.

    What to do: Serve it with PEFT itself; `lora-tool merge` refuses these features, too.
    """
    hint = "serve it with PEFT: PeftModel.from_pretrained(base, ADAPTER)"
    for server in _asked(subject, *_SERVERS):
        for name in subject.config.refused:
            yield _fault(subject, name, f"{_NAMES[server]} does not have what `{name}` asks for", hint=hint)


@rule("LT811", Severity.INFO, on=AdapterSubject, needs=_WHOLE)
def served_by_peft(subject: AdapterSubject) -> Iterator[Fault]:
    """A head that PEFT loads only onto the right model.

    What it does: Says for PEFT which class and how many labels the base must be loaded with.

    Why it matters: On a causal LM, PEFT drops the head without a word; with two labels, a reward model does not load.

    Example: `AutoPeftModelForSequenceClassification.from_pretrained(ADAPTER)`: [1, 4096] against [2, 4096].

    What to do: Load the base as the message says, or merge it: `lora-tool merge ADAPTER`.
    """
    weight = head_weight(saved_heads(subject))
    if weight is None or not weight.shape:
        return
    for _ in _asked(subject, Server.PEFT):
        message = f"PEFT needs AutoModelForSequenceClassification.from_pretrained(BASE, num_labels={weight.shape[0]})"
        yield _fault(subject, weight.name, message)


@rule("LT812", Severity.ERROR, on=AdapterSubject, needs=_WHOLE | {Need.BASE})
def served_text_names(subject: AdapterSubject) -> Iterator[Fault]:
    """An adapter of the text model alone, on a server that loads the whole.

    What it does: Looks for an adapter with the names of the text class that `AutoModelForCausalLM` makes of a
    multimodal base (Qwen3.5, Llama 4, Mllama), for vLLM, which loads the whole model.

    Why it matters: vLLM finds none of the adapter's modules under their names: it serves the base, and says nothing.

    Example: LoRA on `model.layers.0.mlp.up_proj`, and the base has `model.language_model.layers.0.mlp.up_proj`.

    What to do: Merge it into the whole model, and serve that: `lora-tool merge ADAPTER`.
    """
    match = subject.matched
    moved = [layer.target for layer in subject.layers if match.outside and match.name(layer.target) != layer.target]
    for _ in _asked(subject, Server.VLLM) if moved else ():
        message = f"vLLM loads the whole of {match.base.root}, where `{moved[0]}` is `{match.name(moved[0])}`"
        message += ": it finds none of the adapter's modules, and serves the base without a word"
        yield _fault(subject, moved[0], message)
