"""LT2xx, the config of an adapter against its tensors."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator
from pathlib import Path

from lora_tool.adapters import targeting
from lora_tool.adapters.support import BIAS_WITHOUT_PLACE, UNMERGED, Refusal, refusals, refusals_of_config
from lora_tool.adapters.targeting import is_lost_on_loading
from lora_tool.adapters.view import LoraLayer, WholeTensor
from lora_tool.core.display import counted
from lora_tool.core.errors import Defect
from lora_tool.core.keys import Part
from lora_tool.core.report import Severity
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.formats.stored import same_values
from lora_tool.models.ends import is_end
from lora_tool.rules.engine.base_match import BaseMatch
from lora_tool.rules.engine.registry import Fault, Need, alike_as_one, rule
from lora_tool.rules.engine.subjects import AdapterSubject, Subject, fetched_again

_WHOLE = frozenset({Need.WEIGHTS, Need.CONFIG})
_REFUSES = "`lora-tool merge` refuses it"
_OF_THAT_RUN = "or take the config of the run that wrote the weights"
_FROM_NEWER_PEFT = (
    "load the adapter with the PEFT version that wrote it or a newer one; remove the field if it is misspelt"
)


@rule("LT207", Severity.ERROR, on=AdapterSubject, needs=_WHOLE, unmergeable=True)
def unexplained(subject: AdapterSubject) -> Iterator[Fault]:
    """A tensor that the config does not explain.

    What it does: Matches tensors with `target_modules`, `target_parameters`, `modules_to_save` and `bias`, as PEFT
    does.
    Why it matters: PEFT builds the layers that the config names and silently drops all other tensors, so part of the
    training is not used. A plain tensor that has the name of a base tensor silently replaces it. The finding is only a
    warning for LoRA on one end of tied embeddings that PEFT trained together with the other end (`ensure_weight_tying`)
    and drops when it loads the adapter: a merge writes it as it was trained.
    Example: The file has LoRA on `up_proj`, but `target_modules` is ["q_proj", "v_proj"].
    What to do: Put the missing names into `target_modules` (or `modules_to_save`) of `adapter_config.json`, or take the
    config of the run that wrote the weights.
    """
    config, base = subject.config, subject.base.config if subject.base is not None else None
    tied = None if base is None else base.tie_word_embeddings
    names = "no entry of `target_modules`" + (" or `target_parameters`" if config.target_parameters else "")

    def unexplained_in(layer: LoraLayer) -> Iterator[Fault]:
        if not targeting.layer_is_targeted(config, layer):
            field = config.left_out_by(layer.target)
            why = f"`{field}` leaves its module out" if field else f"{names} matches its module"
            hint = f"correct `{field}` in {subject.config_path}, {_OF_THAT_RUN}" if field else None
            for tensor in layer.parts.values():
                yield _dropped(tensor, why, hint)
        elif is_lost_on_loading(config, layer, tied=tied):
            yield _lost_end(layer)
        elif not config.refused:
            for tensor in layer.strays:
                yield _dropped(tensor, "LoRA layers have no tensor of this name")

    left_to_peft = config.target_modules is None and not config.target_parameters
    yield from _left_to_peft(subject) if left_to_peft else alike_as_one(subject.view.found(unexplained_in))
    adapted = {layer.target for layer in subject.layers} if subject.view.whole else ()
    for item in subject.view.whole:
        message = _why_unexplained(subject, item, adapted)
        if message:
            yield _dropped(item.tensor, message)


def _left_to_peft(subject: AdapterSubject) -> Iterator[Fault]:
    if subject.layers:
        message = "is null: PEFT takes its default modules for the type of model, and fails where it has none"
        yield Fault(subject="target_modules", message=message, path=subject.config_path)


def _dropped(tensor: StoredTensor, why: str, hint: str | None = None) -> Fault:
    return Fault(subject=tensor.name, message=f"{why}: PEFT would silently drop it", hint=hint)


def _lost_end(layer: LoraLayer) -> Fault:
    """Return the warning of an end that a merge has, as it was trained, and PEFT has not."""
    message = (
        f"PEFT trained `{layer.target}` together with the layer that it is tied to, but silently drops its LoRA when "
        "it loads the adapter; a merge writes it"
    )
    hint = f"add `{layer.target}` to `target_modules` of `adapter_config.json`"
    return Fault(subject=layer.any_tensor.name, message=message, hint=hint, severity=Severity.WARNING)


def _why_unexplained(subject: AdapterSubject, item: WholeTensor, adapted: Collection[str]) -> str | None:
    match item.part:
        case Part.PLAIN if not _repeats_base(subject, item) and not targeting.explains(subject.config, item):
            return "it belongs to no entry of `target_modules` or `modules_to_save`"
        case Part.TOKENS_DELTA if not subject.config.token_indices:
            return "`trainable_token_indices` is not set"
        case Part.BASE_LAYER if item.module not in adapted:
            # PEFT makes a LoRA layer of a targeted end of the model, with the weight in the adapter: LT505 checks it
            is_targeted_end = is_end(item.module) and subject.config.targets(item.module)
            return None if is_targeted_end else "its module has no LoRA"
        case _:
            return None


def _repeats_base(subject: AdapterSubject, item: WholeTensor) -> bool:
    """Whether it is the base's own tensor: PEFT saves whatever the first layer holds with embeddings."""
    if subject.base is None or not item.leaf:
        return False
    name = subject.match.name(item.module) if isinstance(subject.match, BaseMatch) else item.module
    held = subject.base.tensors.get(f"{name}.{item.leaf}")
    vocab_size = subject.base.config.vocab_size if subject.base.config else None
    for found in (item.tensor, held):  # an end of the model under whatever name, which may have been resized
        if found is not None and found.shape[:1] == (vocab_size,):
            return True
    return held is not None and same_values(held, item.tensor)


@rule("LT210", Severity.ERROR, on=AdapterSubject, needs=_WHOLE)
def zero_scaling(subject: AdapterSubject) -> Iterator[Fault]:
    """The adapter is scaled to zero.

    What it does: Computes each layer's scaling, alpha/r (alpha/√r with rsLoRA), and looks for zeros.
    Why it matters: ΔW is scaling · B·A, so a module with a scaling of 0 equals the base's, in training and afterwards.
    Example: `"lora_alpha": 0`, or `"alpha_pattern": {"q_proj": 0}`.
    What to do: Set `lora_alpha` (or the entry of `alpha_pattern`) to the value that training used.
    """
    config = subject.config
    sources: dict[str, int] = {}
    for layer in subject.layers:
        if layer.scaling == 0:
            pattern = config.alpha_key(layer.target)
            source = "lora_alpha" if pattern is None else f"alpha_pattern: {pattern}"
            sources[source] = sources.get(source, 0) + 1
    for source, count in sources.items():
        message = f"gives {count} of {len(subject.layers)} layers a scaling of 0, so they change nothing"
        yield Fault(subject=source, message=message, path=subject.config_path)


@rule("LT214", Severity.ERROR, on=Subject)
def wrong_field(subject: Subject) -> Iterator[Fault]:
    """A config field that is missing, of the wrong type, or unknown.

    What it does: Checks the type of every field of `adapter_config.json`, `config.json` and `trainer_state.json`, and
    looks for fields that PEFT refuses beside or without others. A field that no known PEFT release has is reported as
    info.
    Why it matters: PEFT silently accepts a string in place of a number and fails later, or computes something else. It
    ignores unknown fields when it loads an adapter: if a newer PEFT wrote them, the feature they turn on stays off.
    Example: `r: expected int, found "8"`.
    What to do: Correct the field in the file that the message names.
    """
    for problem in subject.problems:
        if problem.defect is Defect.BAD_FIELD:
            hint = fetched_again(subject, Path(problem.path).name) if problem.subject is None else None
            yield Fault(message=problem.message, subject=problem.subject, path=problem.path, hint=hint)
    if isinstance(subject, AdapterSubject) and subject.config.has_known_type:
        for name in subject.config.unknown:
            message = "is not a known field of LoraConfig; PEFT ignores fields that it does not know"
            yield Fault(
                subject=name, message=message, path=subject.config_path, severity=Severity.INFO, hint=_FROM_NEWER_PEFT
            )


@rule("LT215", Severity.INFO, on=AdapterSubject, needs=_WHOLE)
def not_merged(subject: AdapterSubject) -> Iterator[Fault]:
    """A feature that `lora-tool merge` does not merge.

    What it does: Looks for features that `lora-tool merge` refuses because it cannot merge them exactly: those that the
    config turns on, and with a base model also a LoRA bias on a layer that has no bias.
    Why it matters: The adapter is fine and PEFT loads it; only `lora-tool merge` stops, with the same message.
    Example: `"layer_replication": [[0, 16], [8, 32]]`.
    What to do: Serve the adapter unmerged, or merge it with PEFT: `model.merge_and_unload()`.
    """
    for refusal in refusals_of(subject):
        yield Fault(message=f"{_REFUSES}: {refusal.text}", path=subject.config_path, hint=way_out(subject, refusal))
    if (name := bias_without_place(subject)) is not None:
        yield Fault(subject=name, message=f"{_REFUSES}: {BIAS_WITHOUT_PLACE}", hint=UNMERGED)


def refusals_of(subject: AdapterSubject) -> Iterator[Refusal]:
    """Yield what a merge refuses, with what the base shows of it."""
    match = subject.match
    return refusals(subject.view, match.tensor) if isinstance(match, BaseMatch) else refusals(subject.view)


def way_out(subject: AdapterSubject, refusal: Refusal) -> str:
    """Return what is done with an adapter that a plain merge refuses."""
    root = shlex.quote(str(subject.checkpoint.root))
    in_memory = f"let PEFT merge it, with the whole model in memory: lora-tool merge --allow-in-memory {root}"
    return in_memory if refusal.in_memory else refusal.hint


def bias_without_place(subject: AdapterSubject) -> str | None:
    """Return the first LoRA bias on a layer that has none in the base; None where there is none, or no base."""
    match = subject.match
    if not isinstance(match, BaseMatch):
        return None
    biases = ((layer.bias, layer.target) for layer in subject.layers if layer.bias)
    return next((bias.name for bias, at in biases if match.tensor(at) and not match.tensor(at, "bias")), None)


@rule("LT216", Severity.ERROR, on=AdapterSubject, needs=_WHOLE)
def no_lora(subject: AdapterSubject) -> Iterator[Fault]:
    """An adapter without LoRA tensors.

    What it does: Looks for at least one LoRA tensor in the weights file.
    Why it matters: Loading it gives the base model, with a warning at most. transformers before 5.0 wrote such files
    under DeepSpeed ZeRO-3: they have 16 to 40 bytes, or hold only the head.
    Example: `adapter_model.safetensors` has 40 bytes and no tensor.
    What to do: Take the values from the run's training checkpoint (`global_stepN/`), or save the adapter again.
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
    Why it matters: Prompt tuning, IA³, LoHa and similar methods have other tensors, which lora-tool cannot check, and
    which only PEFT can merge.
    Example: `"peft_type": "IA3"`.
    What to do: Use PEFT for this adapter: `lora-tool merge --allow-in-memory ADAPTER` merges it with PEFT, if its method
    has a ΔW. Correct `peft_type` if the adapter is LoRA after all.
    """
    if subject.config.is_of_another_kind:
        message = f"expected LORA, found {subject.config.peft_type}"
        refusal = next(refusals_of_config(subject.view), None)
        hint = None if refusal is None else way_out(subject, refusal)
        yield Fault(subject="peft_type", message=message, path=subject.config_path, hint=hint)


@rule("LT226", Severity.ERROR, on=AdapterSubject, needs=_WHOLE, unmergeable=True)
def tokens_disagree(subject: AdapterSubject) -> Iterator[Fault]:
    """Trained tokens do not match the config.

    What it does: Compares `trainable_token_indices` with the trained rows of the embedding: there must be one row per
    index, each index must be non-negative and unique, and the embedding must not also have LoRA or be in
    `modules_to_save`.
    Why it matters: PEFT assigns the rows to the indices in order. If their numbers differ, loading fails; if the
    embedding was also saved whole, PEFT mixes the two up when it saves.
    Example: `trainable_token_indices` lists 3 tokens, but the file has 2 rows.
    What to do: Put the indices that were trained into `adapter_config.json`. Train an embedding either whole or by
    rows.
    """
    wanted = any(subject.config.token_indices.values())
    if wanted and not subject.view.tokens:
        message = "names tokens, but the file has no rows for them: their training is lost"
        yield Fault(subject="trainable_token_indices", message=message, path=subject.config_path)
    for module, tokens in subject.view.tokens.items():
        rows, indices = tokens.rows, tokens.indices
        if tokens.of_none:
            message = (
                f"has shape {list(rows.shape)}, because `trainable_token_indices` names no token: PEFT cannot merge it"
            )
            hint = "no token was trained: remove this tensor, and `trainable_token_indices` or its entry for the module"
            yield Fault(subject=rows.name, message=message, hint=hint)
            continue
        if wanted and rows.shape[:1] != (len(indices),):
            message = (
                f"has shape {list(rows.shape)}, but `trainable_token_indices` lists {counted(len(indices), 'token')}"
            )
            yield Fault(subject=rows.name, message=message)
        if any(index < 0 for index in indices):
            yield Fault(subject=rows.name, message=f"belongs to token {min(indices)}, but token indices start at 0")
        if len(set(indices)) < len(indices):
            yield Fault(
                subject=rows.name,
                message="has several rows for one token: `trainable_token_indices` lists a token twice",
            )
        if subject.config.saves(module):
            yield Fault(subject=rows.name, message=f"`{module}` is also in `modules_to_save`: PEFT mixes the two up")
        if any(layer.module == module for layer in subject.layers):
            yield Fault(subject=rows.name, message=f"`{module}` also has LoRA: one of the two would be lost")


@rule("LT221", Severity.WARNING, on=AdapterSubject, needs=_WHOLE, unmergeable=True)
def expert_layout_unknown(subject: AdapterSubject) -> Iterator[Fault]:
    """Fused-expert LoRA whose column order is not recorded.

    What it does: Looks for `lora_B_layout` in the config of adapters that Unsloth trained on fused experts. An unknown
    layout is an error.
    Why it matters: Until 2026-09 Unsloth packed the columns of `lora_B` expert by expert, while PEFT and vLLM pack them
    rank by rank. Both have the same shape, so the wrong one loads and gives plausible garbage.
    Example: `mlp.experts.lora_B.weight` is [4096, 256] for 32 experts of rank 8, and no config records its column
    order.
    What to do: Merge an adapter trained before 2026-09 with `lora-tool merge ADAPTER --moe-b-layout grouped-by-expert`,
    a later one with `rank-major`; or write `"lora_B_layout"` into `adapter_config.json`.
    """
    config = subject.config
    if config.expert_layout is not None:
        if config.expert_layout not in {layout.value for layout in ExpertLayout}:
            message = f"expected rank_major or grouped_by_expert, found {config.expert_layout}"
            hint = "write the one it was trained with; Unsloth packed grouped_by_expert until 2026-09, rank_major since"
            yield Fault(
                subject="lora_B_layout", message=message, path=subject.config_path, severity=Severity.ERROR, hint=hint
            )
        return
    if not config.by_unsloth:
        return
    for layer in subject.layers:
        ranks = targeting.ranks_of(config, layer) if any(targeting.parameters_of(config, layer.target)) else None
        if ranks and layer.a is not None and layer.b is not None and layer.a.shape[0] not in ranks:
            message = (
                f"was written by Unsloth, but does not record the column order of its experts: {_REFUSES} "
                "without --moe-b-layout"
            )
            yield Fault(subject=layer.b.name, message=message, path=layer.b.path)
            return
