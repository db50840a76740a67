"""LT820: modules that a server has under other names than the adapter, or applies no LoRA to."""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.core.display import named
from lora_tool.core.report import Severity
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject
from lora_tool.rules.serving.obstacles import WITH_BASE, not_applied, of_type
from lora_tool.rules.serving.servers import WHOLE, asked, fault, or_merged
from lora_tool.rules.serving.together import model_types_of, path_with


@rule("LT820", Severity.ERROR, on=AdapterSubject, needs=WHOLE | {Need.BASE_IN_PART})
def served_paths(subject: AdapterSubject) -> Iterator[Fault]:
    """Modules that the server calls otherwise, or applies no LoRA to.

    What it does: Compares the modules with the server's names for the base's model type. transformers 5 renames some
    modules when it loads a checkpoint, and vLLM keeps the names of the checkpoint, or has its own: Mixtral's router is
    `mlp.gate` for PEFT, `block_sparse_moe.gate` for vLLM. Some matrices are used without their LoRA: of DeepSeek's latent
    attention `kv_b_proj` in vLLM, which multiplies it into others, and all but `o_proj` in llama.cpp; there also the
    output layer of these models, and position embeddings.
    Why it matters: vLLM compares only the last part of a name and leaves the module out without a word; llama.cpp loads
    the LoRA and never applies it. The served model is not the trained one.
    Example: `"target_modules": "all-linear"` with Mixtral, which includes the router.
    What to do: Write the adapter under the server's names: `lora-tool prepare ADAPTER --for vllm --base BASE -o OUT`.
    Where the server applies no LoRA to a module, merge the adapter and serve the merged model: `lora-tool merge ADAPTER`.
    """
    types = model_types_of(subject.base)
    for form in asked(subject):
        for each in not_applied(subject.view, form, subject.base):
            yield fault(subject, None, each.text)
        names = form.names(types)
        theirs = {layer.target: path_with(layer.target, names) for layer in subject.layers}
        moved = {path: other for path, other in theirs.items() if other not in (path, None)}
        if moved and not form.mlx:  # whose form has other names anyway
            first = next(iter(moved))
            message = (
                f"{form.name} has LoRA on {named(list(moved), 3)} under other names{of_type(types)}, the first as "
                f"`{moved[first]}`, and leaves it out or refuses it under these"
            )
            yield fault(subject, first, message, hint=or_merged(subject, form, WITH_BASE))
