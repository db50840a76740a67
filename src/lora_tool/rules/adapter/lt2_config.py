"""LT2xx, the config of an adapter against its tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from lora_tool.adapter import targeting
from lora_tool.adapter.support import BIAS_WITHOUT_PLACE, UNMERGED, refusals
from lora_tool.adapter.tied_lora import is_lost_on_loading
from lora_tool.adapter.view import LoraLayer, WholeTensor
from lora_tool.architectures.ends import is_end
from lora_tool.architectures.heads import PEFT_CLASSIFIERS, QUESTION_HEADS
from lora_tool.display import counted
from lora_tool.errors import Defect
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.formats.stored import same_values
from lora_tool.keys import Part
from lora_tool.report import Severity
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject, BaseMatch, Subject
from lora_tool.tensors import StoredTensor

_WHOLE = frozenset({Need.WEIGHTS, Need.CONFIG})
_ROUTER, _FUSED = "gate.weight", "gate_up_proj"
"""What PEFT turns the names of a router and of experts into (0.21, `transformers_weight_conversion.py`)."""
_REFUSES = "`lora-tool merge` refuses it"
_COPY_CONFIG = "copy the file from another checkpoint of the same run, or save the model again"
_FROM_NEWER_PEFT = "load the adapter with the PEFT that wrote it or a newer one; remove the field if it is misspelt"


@rule("LT205", Severity.WARNING, on=AdapterSubject, needs=_WHOLE)
def target_without_tensors(subject: AdapterSubject) -> Iterator[Fault]:
    """A target that matches nothing in the file.

    What it does: Looks for entries of `target_modules`, `target_parameters` and `modules_to_save` without tensors.

    Why it matters: Either the model had no such module, and what you meant to train was not trained; or the tensors
    were lost, and PEFT fills them in: LoRA with zeros and a warning, whole modules with an error.

    Example: `target_modules` lists "c_attn", a name of GPT-2, in the adapter of a Llama.

    What to do: Compare the entry with the base's module names (`lora-tool inspect BASE`), and remove it or train again.
    """
    config = subject.config
    if not subject.layers:
        return
    if isinstance(config.target_modules, str):
        if not any(targeting.layer_is_targeted(config, layer) for layer in subject.layers):
            message = "matches none of the modules that have LoRA tensors"
            yield Fault(subject=f"target_modules: {config.target_modules}", message=message, path=subject.config_path)
    else:
        # "all-linear" also names the layers inside a head that is saved whole
        carried = {name.rpartition(".")[0] for name in subject.view.frozen}  # whose lost LoRA is LT505's
        held = {*(layer.target for layer in subject.layers), *_saved_whole(subject), *carried}
        entries = config.target_modules or ()
        seen = {suffix for path in held for suffix in _suffixes(path)}.intersection(entries)
        for entry in entries:
            if entry not in seen and not _is_left_out(subject, entry):
                message = "matches no module that has LoRA tensors"
                yield Fault(subject=f"target_modules: {entry}", message=message, path=subject.config_path)
    yield from _parameters_without_tensors(subject)
    yield from _saved_without_tensors(subject)


def _suffixes(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.partition(".")[2]


def _is_left_out(subject: AdapterSubject, entry: str) -> bool:
    """Whether an entry may rightly have no LoRA: it is excluded or saved whole, or a pattern might exclude it."""
    config = subject.config
    if isinstance(config.exclude_modules, str) or targeting.is_saved_whole(config, entry):
        return True
    return any(name in config.exclude_modules or () for name in _suffixes(entry)) if config.exclude_modules else False


def _saved_whole(subject: AdapterSubject) -> Iterator[str]:
    for item in subject.view.parts(Part.PLAIN, Part.SAVED_MODULE):
        if targeting.is_saved_whole(subject.config, item.module):
            yield item.module


def _parameters_without_tensors(subject: AdapterSubject) -> Iterator[Fault]:
    entries = subject.config.target_parameters or ()
    for entry in entries:
        if entry == _ROUTER and _FUSED in entries:
            continue  # PEFT adds both to every mixture of experts, whatever its router is called
        parent = entry.rpartition(".")[0]
        if not any(not parent or f".{layer.target}".endswith(f".{parent}") for layer in subject.layers):
            message = "matches no module that has LoRA tensors"
            yield Fault(subject=f"target_parameters: {entry}", message=message, path=subject.config_path)


def _saved_without_tensors(subject: AdapterSubject) -> Iterator[Fault]:
    config = subject.config
    # PEFT adds these names to every such adapter, whatever its head is called; LT301 looks at heads
    entries = [entry for entry in config.modules_to_save if entry not in PEFT_CLASSIFIERS | QUESTION_HEADS]
    whole = [item.module for item in subject.view.parts(Part.PLAIN, Part.SAVED_MODULE)]
    for entry in entries:
        if not any(ancestor.endswith(entry) for path in whole for ancestor in targeting.ancestors(path)):
            message = "no tensor of such a module is in the file"
            yield Fault(subject=f"modules_to_save: {entry}", message=message, path=subject.config_path)


@rule("LT207", Severity.ERROR, on=AdapterSubject, needs=_WHOLE, unmergeable=True)
def unexplained(subject: AdapterSubject) -> Iterator[Fault]:
    """A tensor that the config does not explain.

    What it does: Matches tensors with `target_modules`, `target_parameters`, `modules_to_save` and `bias`, as PEFT
    does.

    Why it matters: PEFT builds the layers that the config names and drops all other tensors without a word: part of the
    training is silently not used. A plain tensor that the base has by the same name silently replaces the base's. An
    end of the model that PEFT trained with the one that it is tied to (`ensure_weight_tying`), and forgets, is a
    warning: a merge writes it as it was trained.

    Example: The file has LoRA on `up_proj`, and `target_modules` is ["q_proj", "v_proj"].

    What to do: Put the missing names into `target_modules` (or `modules_to_save`) of `adapter_config.json`, or take the
    config of the run that wrote the weights.
    """
    for layer in subject.layers:
        if not targeting.layer_is_targeted(subject.config, layer):
            for tensor in layer.parts.values():
                yield _dropped(tensor, "no entry of `target_modules` matches its module")
        elif is_lost_on_loading(subject.config, layer, tied=_says_tied(subject)):
            yield _lost_end(layer)
        elif not subject.config.refused:
            for tensor in layer.strays:
                yield _dropped(tensor, "a LoRA layer has no such tensor")
    adapted = {layer.target for layer in subject.layers}
    for item in subject.view.whole:
        message = _why_unexplained(subject, item, adapted)
        if message:
            yield _dropped(item.tensor, message)


def _dropped(tensor: StoredTensor, why: str) -> Fault:
    return Fault(subject=tensor.name, message=f"{why}: PEFT would drop it without a word")


def _lost_end(layer: LoraLayer) -> Fault:
    """Return the warning of an end that a merge has, as it was trained, and PEFT has not."""
    message = (
        f"PEFT trained `{layer.target}` with the end that it is tied to, and drops its LoRA without a word when it loads "
        "the adapter; a merge writes it"
    )
    hint = f"add `{layer.target}` to `target_modules` of `adapter_config.json`"
    return Fault(subject=layer.any_tensor.name, message=message, hint=hint, severity=Severity.WARNING)


def _says_tied(subject: AdapterSubject) -> bool | None:
    config = subject.base.config if subject.base is not None else None
    return None if config is None else config.tie_word_embeddings


def _why_unexplained(subject: AdapterSubject, item: WholeTensor, adapted: Collection[str]) -> str | None:
    match item.part:
        case Part.PLAIN if not _repeats_base(subject, item) and not targeting.explains(subject.config, item):
            return "it belongs to no target and to none of `modules_to_save`"
        case Part.TOKENS_DELTA if not subject.config.token_indices:
            return "`trainable_token_indices` is not set"
        case Part.BASE_LAYER if item.module not in adapted and not _is_targeted_end(subject, item):
            return "its module has no LoRA"
        case _:
            return None


def _is_targeted_end(subject: AdapterSubject, item: WholeTensor) -> bool:
    """Whether PEFT makes a LoRA layer of an end of the model, with the weight that the adapter carries: LT505 looks."""
    return is_end(item.module) and subject.config.targets(item.module)


def _repeats_base(subject: AdapterSubject, item: WholeTensor) -> bool:
    """Whether it is the base's own tensor: PEFT saves whatever the first layer holds with embeddings."""
    if subject.base is None or not item.leaf:
        return False
    module = item.module.replace(".base_layer.", ".")
    name = subject.match.name(module) if isinstance(subject.match, BaseMatch) else module
    held = subject.base.tensors.get(f"{name}.{item.leaf}")
    vocab_size = subject.base.config.vocab_size if subject.base.config else None
    for found in (item.tensor, held):  # an end of the model under whatever name, which may have been resized
        if found is not None and found.shape[:1] == (vocab_size,):
            return True
    return held is not None and same_values(held, item.tensor)


@rule("LT210", Severity.ERROR, on=AdapterSubject, needs=_WHOLE)
def zero_scaling(subject: AdapterSubject) -> Iterator[Fault]:
    """The adapter is scaled to nothing.

    What it does: Computes each layer's scaling, alpha/r (alpha/√r with rsLoRA), and looks for zeros.

    Why it matters: ΔW is scaling · B·A: with a scaling of 0 the module is the base's, in training and afterwards.

    Example: `"lora_alpha": 0`, or `"alpha_pattern": {"q_proj": 0}`.

    What to do: Set `lora_alpha` (or the entry of `alpha_pattern`) to what was trained with.
    """
    config = subject.config
    sources: dict[str, int] = {}
    for layer in subject.layers:
        if layer.scaling == 0:
            pattern = config.alpha_key(layer.target)
            source = "lora_alpha" if pattern is None else f"alpha_pattern: {pattern}"
            sources[source] = sources.get(source, 0) + 1
    for source, count in sources.items():
        message = f"gives {count} of {len(subject.layers)} layers a scaling of 0: they change nothing"
        yield Fault(subject=source, message=message, path=subject.config_path)


@rule("LT214", Severity.ERROR, on=Subject)
def wrong_field(subject: Subject) -> Iterator[Fault]:
    """A config field that is missing, of the wrong type, or unknown.

    What it does: Reads `adapter_config.json`, `config.json` and `trainer_state.json` with the types that their fields
    have. Fields that no PEFT we know has are noted.

    Why it matters: PEFT takes a string for a number without a word and fails later, or computes something else. Unknown
    fields are ignored on loading: if a newer PEFT wrote them, what they asked for does not happen.

    Example: `r: expected int, found "8"`.

    What to do: Correct the field in the file that is named.
    """
    for problem in subject.problems:
        if problem.defect is Defect.BAD_FIELD:
            hint = _COPY_CONFIG if problem.subject is None else None
            yield Fault(message=problem.message, subject=problem.subject, path=problem.path, hint=hint)
    if isinstance(subject, AdapterSubject) and subject.config.has_known_type:
        for name in subject.config.unknown:
            message = "is no field of LoraConfig that we know; PEFT ignores what it does not know"
            yield Fault(
                subject=name, message=message, path=subject.config_path, severity=Severity.INFO, hint=_FROM_NEWER_PEFT
            )


@rule("LT215", Severity.INFO, on=AdapterSubject, needs=_WHOLE)
def not_merged(subject: AdapterSubject) -> Iterator[Fault]:
    """Something that `lora-tool merge` does not merge.

    What it does: Names the adapter's features that `lora-tool merge` refuses, as it cannot merge them exactly: by its
    config, and beside a base the bias of a LoRA on a layer that has none.

    Why it matters: The adapter is good and PEFT loads it. Only `lora-tool merge` would stop, with the same words.

    Example: `"layer_replication": [[0, 16], [8, 32]]`.

    What to do: Serve the adapter unmerged, or merge it with PEFT: `model.merge_and_unload()`.
    """
    for refusal in refusals(subject.view):
        yield Fault(message=f"{_REFUSES}: {refusal.text}", path=subject.config_path, hint=refusal.hint)
    if isinstance(match := subject.match, BaseMatch):
        for layer in subject.layers:
            if layer.bias and match.tensor(layer.target) and not match.tensor(layer.target, "bias"):
                yield Fault(subject=layer.bias.name, message=f"{_REFUSES}: {BIAS_WITHOUT_PLACE}", hint=UNMERGED)
                return


@rule("LT216", Severity.ERROR, on=AdapterSubject, needs=_WHOLE)
def no_lora(subject: AdapterSubject) -> Iterator[Fault]:
    """An adapter without LoRA tensors.

    What it does: Looks for at least one LoRA tensor in the weights file.

    Why it matters: Loading it gives the base model, with a warning at most. transformers before 5.0 wrote such files
    under DeepSpeed ZeRO-3: 16 to 40 bytes, or the head alone.

    Example: `adapter_model.safetensors` has 40 bytes and no tensor.

    What to do: Look for the run's training checkpoint (`global_stepN/`), which has the values, or save the adapter
    again.
    """
    config = subject.config
    lora = subject.layers or subject.view.tokens
    wanted = bool(config.target_modules or config.target_parameters)
    if not lora and (wanted or not subject.tensors):
        held = f"only {', '.join(list(subject.tensors)[:2])}" if subject.tensors else "and no other tensor"
        yield Fault(message=f"has no LoRA tensor, {held}: loading it gives the base model")


@rule("LT217", Severity.ERROR, on=AdapterSubject, unmergeable=True)
def not_lora(subject: AdapterSubject) -> Iterator[Fault]:
    """An adapter of another kind.

    What it does: Reads `peft_type`.

    Why it matters: Prompt tuning, IA³, LoHa and their like have other tensors, which lora-tool cannot judge or merge.

    Example: `"peft_type": "IA3"`.

    What to do: Use PEFT itself for this adapter, or correct `peft_type` if it is LoRA after all.
    """
    if subject.config.is_of_another_kind:
        message = f"expected LORA, found {subject.config.peft_type}"
        yield Fault(subject="peft_type", message=message, path=subject.config_path)


@rule("LT226", Severity.ERROR, on=AdapterSubject, needs=_WHOLE, unmergeable=True)
def tokens_disagree(subject: AdapterSubject) -> Iterator[Fault]:
    """Trained tokens do not match the config.

    What it does: Compares `trainable_token_indices` with the rows that were trained by themselves: there is one for
    each index, an index is not negative and stands there once, and the embedding has no LoRA and is not in
    `modules_to_save` as well.

    Why it matters: The rows are put at the indices in order. With another number loading fails; where the embedding was
    saved whole, too, PEFT mixes the two up when it saves.

    Example: `trainable_token_indices` lists 3 tokens, and the file has 2 rows.

    What to do: Put the indices that were trained into `adapter_config.json`; train an embedding whole or by rows.
    """
    wanted = subject.config.token_indices
    if wanted and not subject.view.tokens:
        message = "names tokens, and the file has no rows for them: what they learned is lost"
        yield Fault(subject="trainable_token_indices", message=message, path=subject.config_path)
    for module, tokens in subject.view.tokens.items():
        rows, indices = tokens.rows, tokens.indices
        if wanted and rows.shape[:1] != (len(indices),):
            message = f"has shape {list(rows.shape)}, `trainable_token_indices` lists {counted(len(indices), 'token')}"
            yield Fault(subject=rows.name, message=message)
        if any(index < 0 for index in indices):
            yield Fault(subject=rows.name, message=f"belongs to token {min(indices)}: an index counts from 0")
        if len(set(indices)) < len(indices):
            yield Fault(subject=rows.name, message="has several rows for one token of `trainable_token_indices`")
        if subject.config.saves(module):
            yield Fault(subject=rows.name, message=f"`{module}` is in `modules_to_save`, too: PEFT mixes them up")
        if any(layer.module == module for layer in subject.layers):
            yield Fault(subject=rows.name, message=f"`{module}` has LoRA, too: one of the two would be lost")


@rule("LT221", Severity.WARNING, on=AdapterSubject, needs=_WHOLE, unmergeable=True)
def expert_layout_unknown(subject: AdapterSubject) -> Iterator[Fault]:
    """Fused-expert LoRA whose column order is not recorded.

    What it does: Looks for a `lora_B_layout` in the config of adapters that Unsloth trained on fused experts. One that
    names no order that there is, is an error.

    Why it matters: Until 2026-09 Unsloth packed the columns of `lora_B` expert by expert, where PEFT and vLLM pack them
    rank by rank. Both have the same shape; the wrong one loads, and gives plausible garbage.

    Example: `mlp.experts.lora_B.weight` is [4096, 256] for 32 experts of rank 8, in an order that no config says.

    What to do: If it was trained before 2026-09: `lora-tool merge ADAPTER --moe-b-layout grouped_by_expert`, else
    `rank_major`; or write `"lora_B_layout"` into `adapter_config.json`.
    """
    config = subject.config
    if config.expert_layout is not None:
        if config.expert_layout not in {layout.value for layout in ExpertLayout}:
            message = f"expected rank_major or grouped_by_expert, found {config.expert_layout}"
            yield Fault(subject="lora_B_layout", message=message, path=subject.config_path, severity=Severity.ERROR)
        return
    if not config.by_unsloth:
        return
    for layer in subject.layers:
        ranks = targeting.ranks_of(config, layer) if any(targeting.parameters_of(config, layer.target)) else None
        if ranks and layer.a is not None and layer.b is not None and layer.a.shape[0] not in ranks:
            message = f"was written by Unsloth, and the order of its experts' columns is not said: {_REFUSES} unasked"
            yield Fault(subject=layer.b.name, message=message, path=str(layer.b.path))
            return
