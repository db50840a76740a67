"""LT817 to LT819: names of tensors, models and versions that a server does not know."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from lora_tool.core.report import Severity
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject
from lora_tool.rules.serving.servers import NEEDS, WHOLE, asked, fault, prepared
from lora_tool.rules.serving.tables import is_exactly


@rule("LT817", Severity.ERROR, on=AdapterSubject, needs=WHOLE)
def served_adapter_names(subject: AdapterSubject) -> Iterator[Fault]:
    """Names of tensors with the adapter's name, which the server does not read.

    What it does: For vLLM and llama.cpp, looks for the name of an adapter in names of tensors, as a raw `state_dict` has
    it.
    Why it matters: vLLM stops when it loads the adapter: "is unsupported LoRA weight". llama.cpp's converter stops, too.
    Example: `base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight`.
    What to do: Write it under PEFT's names: `lora-tool prepare ADAPTER --for vllm -o OUT`.
    """
    for layer in [layer for layer in subject.layers if layer.adapter_name is not None][:1]:
        for form in (each for each in asked(subject) if not each.adapter_names):
            message = f"{form.name} refuses names of tensors with the adapter's name, `{layer.adapter_name}`, in them"
            yield fault(subject, layer.any_tensor.name, message, hint=prepared(subject, form))


@rule("LT818", Severity.ERROR, on=AdapterSubject, needs=NEEDS | {Need.BASE_IN_PART})
def served_model(subject: AdapterSubject) -> Iterator[Fault]:
    """An adapter for a model that the server loads no adapters for.

    What it does: Looks for the class of the base, `architectures` in its config.json, among those for which vLLM has no
    LoRA: GPT-2, GPT-J, Bloom, Falcon, Mamba, StableLM, Gemma 3n and others.
    Why it matters: vLLM does not start: "GPT2LMHeadModel does not support LoRA yet".
    Example: `vllm serve gpt2 --enable-lora`.
    What to do: Merge the adapter and serve the merged model: `lora-tool merge ADAPTER`.
    """
    for form in asked(subject):
        name = None if form.classes is None else form.classes.without_lora(subject.base)
        if name is not None:
            yield fault(subject, None, f"{form.name} loads no adapter for a {name}")


@rule("LT819", Severity.INFO, on=AdapterSubject, needs=NEEDS)
def served_version(subject: AdapterSubject) -> Iterator[Fault]:
    """A version of a server that lora-tool does not know exactly.

    What it does: Compares the version behind `--for SERVER@VERSION` with those that lora-tool has a table of.
    Why it matters: The findings are those for the nearest patch release below, and may be wrong about this one.
    Example: `--for vllm@0.32.4`, where lora-tool knows 0.32.0.
    What to do: Nothing, or ask for the version that the message names.
    """
    for form in asked(subject):
        version = form.word.partition("@")[2]
        if version and not is_exactly(version, form.version):
            root, exact = shlex.quote(str(subject.checkpoint.root)), shlex.quote(f"{form.server}@{form.version}")
            message = f"{version} is not known to lora-tool, which judges the adapter for {form.name}"
            yield fault(subject, None, message, hint=f"lora-tool validate {root} --for {exact}")
