"""LT508 to LT511: an adapter that fits its base by most names and shapes, and is wrong for it all the same."""

from __future__ import annotations

import re
from collections.abc import Iterator

from lora_tool.adapters.targeting import add_the_same
from lora_tool.checkpoints import computed_from
from lora_tool.core.report import Severity
from lora_tool.models.ends import is_end, is_output, is_tied, output_name
from lora_tool.rules.engine.base_match import BaseMatch
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject

_ALL = frozenset({Need.WEIGHTS, Need.CONFIG, Need.BASE})


@rule("LT508", Severity.WARNING, on=AdapterSubject, needs=_ALL | {Need.SAME_NAMES})
def lora_on_tied_end(subject: AdapterSubject) -> Iterator[Fault]:
    """LoRA on one end of tied embeddings.

    What it does: Looks for LoRA on the output layer or the embeddings of a base that uses one matrix for both. LoRA
    with the same ΔW on both, as PEFT trains it with `ensure_weight_tying`, is fine.
    Why it matters: Unmerged, the adapter works. PEFT's merge changes the shared matrix and with it the layer that was
    not trained; `lora-tool merge` refuses.
    Example: `target_modules` names `lm_head`, but the base's config has `"tie_word_embeddings": true`.
    What to do: Merge with `--untie`, which writes two matrices, or serve the adapter unmerged. Next time train with
    `ensure_weight_tying=True`, or on a base saved with `tie_word_embeddings=False`.
    """
    match = subject.matched
    if not subject.has_output_layer or not _is_tied(match):
        return
    adapted = {f"{match.name(layer.target)}.weight": layer.target for layer in subject.layers}
    of_table = output_name(match.arch)  # a head may have other layers, which nothing is tied to
    output = adapted.get(of_table or "") or next(filter(is_output, adapted.values() if match.in_part else ()), None)
    inputs = [layer.target for layer in subject.layers if layer.embedding and is_end(layer.target)]
    if output is not None and len(inputs) == 1 and add_the_same(subject.view, inputs[0], output):
        return
    for target in (*filter(None, [output]), *inputs):
        tensor = next(layer.any_tensor for layer in subject.layers if layer.target == target)
        message = (
            f"adapts `{target}`, but {match.base.root} ties embeddings and output layer: one matrix cannot hold both, so "
            "`lora-tool merge` refuses it without `--untie`"
        )
        yield Fault(subject=tensor.name, message=message)


def _is_tied(match: BaseMatch) -> bool:
    if match.in_part:
        return is_tied(match.base)
    config = match.base.config
    outputs = [name for name in match.arch.causal_only if name.endswith(".weight")]
    absent = bool(outputs) and outputs[0] not in match.base.tensors
    return absent or (config is not None and bool(config.tie_word_embeddings))


@rule("LT509", Severity.ERROR, on=AdapterSubject, needs=_ALL | {Need.SAME_NAMES}, unmergeable=True)
def token_beyond_base(subject: AdapterSubject) -> Iterator[Fault]:
    """A trained token that the base does not have.

    What it does: Compares `trainable_token_indices` with the number of rows of their embedding: the adapter's if it
    carries one, else the base's.
    Why it matters: The tokens were added before training, but the base lacks them. PEFT fails: index out of range.
    Example: Token 151,670 was trained, but the base's embedding has 151,666 rows.
    What to do: Give a base with the added tokens: call `model.resize_token_embeddings(ROWS)` and save it.
    """
    match = subject.matched
    for module, tokens in subject.view.tokens.items():
        held = subject.view.frozen.get(f"{module}.weight") or match.tensor(module)
        largest = max(tokens.indices, default=-1)
        if held is not None and held.shape and largest >= held.shape[0]:
            message = f"belongs to token {largest:,}, but `{held.name}` has {held.shape[0]:,} rows"
            yield Fault(subject=tokens.rows.name, message=message)


_DENSE = re.compile(r"(?P<block>.+\.\d+\.[^.]+)\.(?P<leaf>gate_proj|up_proj|down_proj|gate_up_proj|fc1|fc2|w[123])")
"""A projection of a dense feed-forward block: its layer's block, and its own name."""


@rule("LT510", Severity.ERROR, on=AdapterSubject, needs={Need.WEIGHTS, Need.CONFIG, Need.NAMES}, unmergeable=True)
def dense_on_experts(subject: AdapterSubject) -> Iterator[Fault]:
    """LoRA on a dense layer where the base has experts.

    What it does: Looks for LoRA on the projections of a feed-forward block, such as `mlp.up_proj`, in layers where the
    base has only a mixture of experts.
    Why it matters: The adapter was trained on the family's dense model. PEFT drops these layers with a warning and
    applies the others, such as attention, to a model that they were not trained on.
    Example: LoRA on `model.layers.0.mlp.up_proj`, but the base has `model.layers.0.block_sparse_moe.experts.0.w1`.
    What to do: Give the model that the adapter was trained on: `--base MODEL`.
    """
    if subject.base is None or subject.base.config is None:
        return
    if not any(".experts." in name for name in subject.base.tensors):
        return
    dense_ones = tuple(subject.view.found(lambda layer: [layer] if _DENSE.fullmatch(layer.target) else []))
    if not dense_ones:
        return
    by_layer: dict[str, list[str]] = {}
    for name in subject.base.tensors:
        if place := _LAYER.match(name):
            by_layer.setdefault(place[0], []).append(name.rpartition(".")[0])
    for layer in dense_ones:
        found, at = _DENSE.fullmatch(layer.target), _LAYER.match(f"{layer.target}.")
        held = by_layer.get(at[0], []) if at else []
        experts = next((name for name in held if ".experts." in name), None)
        if found is None or experts is None:
            continue
        dense = [name for name in held if ".experts." not in name and ".shared" not in name]
        if not any(name.endswith(f".{found['leaf']}") for name in dense):
            message = f"adapts `{layer.target}`, but {subject.base.root} has experts there, such as `{experts}`"
            yield Fault(subject=layer.any_tensor.name, message=message)


_LAYER = re.compile(r".+?\.\d+(?=\.)")


@rule("LT511", Severity.ERROR, on=AdapterSubject, needs={Need.WEIGHTS, Need.NAMES})
def merged_before(subject: AdapterSubject) -> Iterator[Fault]:
    """The base already contains the adapter.

    What it does: Looks for the adapter's fingerprint in the manifest (`lora_tool.json`) of a base that is itself a
    merged model. Does the same for the adapters that this one was computed from (`combine`, `resize`, `prepare`,
    `convert`, `extract`), which its own manifest lists.
    Why it matters: Merged again, or loaded onto that model unmerged, the adapter is applied twice, and nothing fails.
    Example: `--base merged-model`, which was made from this very adapter, or from one of two that `combine` added up.
    What to do: Give the model that the adapter was trained on: `--base MODEL`. Use the merged model without the
    adapter. Of a sum, merge only the adapters that are not in the model yet.
    """
    manifest = subject.base.manifest if subject.base is not None else None
    if subject.base is None or manifest is None or not manifest.merged_adapters:
        return
    from lora_tool.formats.manifest import fingerprint  # slow to import, and for merged bases only

    there, base = manifest.merged_adapters, subject.base.root
    if fingerprint(subject.checkpoint.weights) in there:
        yield Fault(message=f"{base} is a merged model that already contains this adapter")
        return
    inside = computed_from(subject.checkpoint)
    twice = {inside[own] or manifest.adapters.get(own, "") for own in inside if own in there}
    if twice:
        which = ", ".join(sorted(twice - {""})) or "an adapter"
        message = f"{base} is a merged model that already contains {which}, which this adapter was computed from"
        yield Fault(message=message)
