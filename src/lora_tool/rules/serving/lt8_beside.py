"""LT801, LT802, LT804, LT805 and LT811: parts of an adapter other than plain LoRA, which few servers read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lora_tool.core.display import named
from lora_tool.core.keys import Part
from lora_tool.core.report import Severity
from lora_tool.models.ends import PEFT_CLASSIFIERS, head_of, is_end, is_tied
from lora_tool.rules.adapter.lt3_head import head_weight, saved_heads
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject
from lora_tool.rules.serving.forms import ServingForm
from lora_tool.rules.serving.obstacles import trained_biases
from lora_tool.rules.serving.servers import WHOLE, asked, asked_for_peft, command, fault, merged, or_merged, prepared

_BY_FIELD = "refuses"
"""The reaction to a field of the config, whatever the tensors are."""


@rule("LT801", Severity.ERROR, on=AdapterSubject, needs=WHOLE)
def served_saved_modules(subject: AdapterSubject) -> Iterator[Fault]:
    """Modules saved whole, which servers do not load from an adapter.

    What it does: Looks at `modules_to_save`, at tensors other than LoRA and at LoRA on a head. vLLM refuses them, except
    for the heads `score` and `classifier`, which it takes on a base that is a classifier. SGLang does not apply
    them. The converter of llama.cpp stops at them, and its loader ignores norms. MLX-LM does not read them.
    Why it matters: Every reward adapter has such a head. Without it there are no rewards.
    Example: `modules_to_save` is `["classifier", "score"]`, as PEFT writes it for every SEQ_CLS adapter.
    What to do: Merge the adapter and serve the merged model: `lora-tool merge ADAPTER` (`--rm` for a reward model). For
    vLLM, `lora-tool prepare ADAPTER --for vllm --reward-base RM-BASE -o OUT` writes a reward adapter and the base that
    it needs. Embeddings and output layers with few changed rows become LoRA: `lora-tool prepare ADAPTER --for SERVER
    --base BASE -o OUT`.
    """
    heads = sorted({layer.target for layer in subject.layers if head_of(layer.target)})
    for form in asked(subject) if heads else ():
        if not (form.heads or form.lora_on_heads):
            yield fault(subject, heads[0], f"{form.name} has no head for the LoRA on it", hint=merged(subject))
    biases = {name.removesuffix(".bias") for name in trained_biases(subject.view)}  # LT805's
    saved = {item.module for item in subject.view.parts(Part.PLAIN)} - biases | set(subject.config.modules_to_save)
    if not saved:
        return
    heads_only = all(head_of(name) in PEFT_CLASSIFIERS for name in saved)
    for form in asked(subject):
        if form.heads and heads_only:
            if subject.base is not None and any(head_of(name) in PEFT_CLASSIFIERS for name in subject.base.tensors):
                continue
            message = f"{form.name} takes {named(sorted(saved))} only on a base that is itself a classifier"
            hint = f"{merged(subject)}; or {prepared(subject, form, '--reward-base RM-BASE')}"
            yield fault(subject, "modules_to_save", message, severity=Severity.WARNING, hint=hint)
        else:
            message = f"{form.name} {form.fields['modules_to_save']} modules saved whole: {named(sorted(saved))}"
            hint = or_merged(subject, form)
            yield fault(subject, "modules_to_save", message, hint=hint)


@rule("LT802", Severity.ERROR, on=AdapterSubject, needs=WHOLE)
def served_dora(subject: AdapterSubject) -> Iterator[Fault]:
    """DoRA, which servers do not support.

    What it does: Looks at `use_dora` and for magnitude vectors. vLLM and SGLang refuse DoRA, llama.cpp's converter
    stops at them, and MLX-LM stores DoRA in another form.
    Why it matters: The server does not start, or refuses the adapter at the first request.
    Example: `"use_dora": true`: vLLM says "vLLM does not yet support DoRA".
    What to do: Merge the adapter and serve the merged model: `lora-tool merge ADAPTER`. `lora-tool prepare ADAPTER
    --for SERVER --base BASE --approximate -o OUT` writes the nearest LoRA, and says how much of the change it keeps.
    """
    if subject.config.use_dora or any(layer.magnitude is not None for layer in subject.layers):
        for form in asked(subject):
            near = command(subject, form)
            hint = merged(subject) if near is None else f"{merged(subject)}; or write the nearest LoRA: {near}"
            yield fault(subject, "use_dora", f"{form.name} {form.fields['use_dora']} DoRA", hint=hint)


@rule("LT804", Severity.ERROR, on=AdapterSubject, needs=WHOLE | {Need.BASE_IN_PART})
def served_embeddings(subject: AdapterSubject) -> Iterator[Fault]:
    """Trained tokens or LoRA on embeddings, which few servers support.

    What it does: Looks for single trained tokens (`trainable_token_indices`), which all servers refuse because they do
    not know the names of these tensors, and for LoRA on embeddings and output layers, which vLLM and SGLang support only
    for some models (given the base, vLLM's are known: Llama and Qwen3, not Qwen2, Gemma or Mistral), llama.cpp and
    MLX-LM only where the base has two matrices.
    Why it matters: The server refuses the adapter, or it ignores the training of the new tokens.
    Example: `"trainable_token_indices": [128256]` for one new special token.
    What to do: Merge the adapter and serve the merged model: `lora-tool merge ADAPTER`. `lora-tool prepare ADAPTER
    --for SERVER --base BASE -o OUT` writes trained tokens as LoRA on the embedding, if the base has the tokens and an
    output layer that is not tied to it.
    """
    tokens = subject.view.tokens or subject.config.token_indices
    ends = {layer.target for layer in subject.layers if layer.embedding or is_end(layer.target)}
    for form in asked(subject):
        if tokens:
            message = f"{form.name} {form.fields['trainable_token_indices']} single trained tokens"
            yield fault(subject, "trainable_token_indices", message, hint=or_merged(subject, form))
        if ends and subject.base is not None and form.one_end and is_tied(subject.base):
            message = f"{form.name} has one matrix for both ends of {subject.base.root}, so no LoRA on {named(sorted(ends))} alone"
            yield fault(subject, "target_modules", message, hint=prepared(subject, form))
        yield from _ends_of_class(subject, form, sorted(ends))


def _ends_of_class(subject: AdapterSubject, form: ServingForm, ends: Sequence[str]) -> Iterator[Fault]:
    """Yield a fault where the server's class for the base takes no LoRA on ends, or that is not known."""
    classes = form.classes
    takes = {end: None if classes is None else classes.takes_end(subject.base, end) for end in ends}
    if refused := [end for end in ends if takes[end] is False]:
        of = None if classes is None else classes.of(subject.base)
        yield fault(subject, "target_modules", f"{form.name} refuses LoRA on {named(refused)} of a {of}")
    unsure = [end for end in ends if takes[end] is None]
    if unsure and form.some_models and not (classes and classes.without_lora(subject.base)):
        message = f"{form.name} supports LoRA on {named(unsure)} only for some models"
        yield fault(subject, "target_modules", message, severity=Severity.WARNING)


@rule("LT805", Severity.ERROR, on=AdapterSubject, needs=WHOLE)
def served_biases(subject: AdapterSubject) -> Iterator[Fault]:
    """Trained biases, which servers refuse or ignore.

    What it does: Looks for the biases of `bias` and `lora_bias`. vLLM refuses both fields ("Adapter bias is not
    supported"), `bias` even where the model has no bias that could be trained. llama.cpp's converter stops at the
    biases, SGLang and MLX-LM leave them out.
    Why it matters: Without the trained biases the server runs a different model.
    Example: `"bias": "all"`.
    What to do: Merge the adapter and serve the merged model: `lora-tool merge ADAPTER`. An adapter without biases has
    `"bias": "none"` after `lora-tool prepare ADAPTER --for vllm -o OUT`.
    """
    config, biases = subject.config, trained_biases(subject.view)
    for form in asked(subject):
        if biases:
            yield fault(subject, "bias", f"{form.name} {form.fields['bias']} trained biases: {named(biases, 3)}")
        elif config.bias != "none" and form.fields["bias"] == _BY_FIELD:
            message = f'{form.name} refuses `bias` "{config.bias}", though the adapter has no biases'
            yield fault(subject, "bias", message, hint=prepared(subject, form))
        if config.lora_bias:
            yield fault(subject, "lora_bias", f"{form.name} {form.fields['lora_bias']} trained biases")


@rule("LT811", Severity.INFO, on=AdapterSubject, needs=WHOLE)
def served_by_peft(subject: AdapterSubject) -> Iterator[Fault]:
    """A head that PEFT loads only onto a base of the right class.

    What it does: Reports, for PEFT, the class and the number of labels that the base must be loaded with.
    Why it matters: On a causal LM, PEFT silently drops the head; with two labels, a reward model does not load.
    Example: `AutoPeftModelForSequenceClassification.from_pretrained(ADAPTER)` fails: [1, 4096] against [2, 4096].
    What to do: Load the base as the message says, or merge the adapter: `lora-tool merge ADAPTER`.
    """
    weight = head_weight(saved_heads(subject))
    if weight is None or not weight.shape:
        return
    for form in asked_for_peft(subject):
        message = (
            f"{form.name} needs AutoModelForSequenceClassification.from_pretrained(BASE, num_labels={weight.shape[0]})"
        )
        yield fault(subject, weight.name, message)
