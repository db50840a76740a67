"""LT211, LT213, LT222 and LT235: the names of an adapter's tensors, and what its files hold besides."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from lora_tool.adapters.dialects import foreign_in
from lora_tool.adapters.readings import AS_THEY_ARE, Readings
from lora_tool.adapters.view import AdapterView, drift, is_bare
from lora_tool.core.display import size
from lora_tool.core.keys import PREFIX, Part
from lora_tool.core.report import Severity
from lora_tool.formats.stored import same_values
from lora_tool.models.ends import (
    head_of,
    is_end,
    is_new_module,
)
from lora_tool.models.model_tensors import module_names
from lora_tool.rules.engine.registry import Fault, Need, Unchecked, as_one, rule
from lora_tool.rules.engine.subjects import AdapterSubject
from lora_tool.rules.serving.forms import form_of
from lora_tool.rules.shared.base_match import begin_as_with_a_head, is_decoder

_HEADERS_ONLY = frozenset({Need.WEIGHTS, Need.LORA})
_DEFAULT = "default"
"""What PEFT calls an adapter that nobody named."""
_ONE_BY_ONE = "save each adapter in its own folder: model.save_pretrained(FOLDER, selected_adapters=[NAME])"
_KEPT_ON_PURPOSE = "no action is needed; save_pretrained(…, save_embedding_layers=False) leaves it out"


@rule("LT211", Severity.ERROR, on=AdapterSubject, needs=_HEADERS_ONLY | {Need.BASE_IN_PART}, unmergeable=True)
def prefix_drift(subject: AdapterSubject) -> Iterator[Fault | Unchecked]:
    """A tensor name without PEFT's prefix.

    What it does: Checks that each tensor is named `base_model.model.<module>…`, without the prefixes of torch.compile,
    FSDP and DistributedDataParallel and without an adapter's name, and that the file holds only one adapter.
    Why it matters: PEFT ignores tensors under other names: the adapter loads, with a warning at most, and does nothing.
    PEFT loads `…lora_A.default.weight` only as the adapter named default; vLLM does not load it at all. vLLM reads names
    without the prefix: with `--for vllm` alone they are only reported.
    Example: `base_model.model._orig_mod.model.layers.0…` was saved from a model wrapped by torch.compile.
    What to do: Repair the names: `lora-tool convert ADAPTER --to peft`. In future, save the unwrapped model
    (`accelerator.unwrap_model(model).save_pretrained(…)`).

    `lora-tool validate --fix` removes prefixes from the names in place if the new names fit into the file's header; the
    weights are not moved.
    """
    view = subject.view
    hint = f"lora-tool convert {shlex.quote(str(subject.checkpoint.root))} --to peft"
    wrong = {name: why for name, key in view.adapter.keys.items() if (why := drift(key))}
    bare = bool(subject.servers) and all(form_of(server).bare_names for server in subject.servers)
    for why in dict.fromkeys(wrong.values()):
        yield from as_one(
            Fault(
                subject=name,
                message=f"{why}; expected `{PREFIX}{view.paths[key.module]}…`",
                hint=hint,
                severity=Severity.INFO if bare and is_bare(name, key) else None,
            )
            for name, key in view.adapter.keys.items()
            if wrong.get(name) == why
        )
    for copy in view.parts(Part.SAVED_MODULE):
        if copy.name not in view.plain:
            message = f"PEFT looks for `{PREFIX}{copy.name}` and would fail"
            yield Fault(subject=copy.tensor.name, message=message, hint=hint, mergeable=True)
    yield from _adapter_names(view, hint)
    yield from _lost_path(subject, hint)


def _lost_path(subject: AdapterSubject, hint: str) -> Iterator[Fault | Unchecked]:
    """Report paths of the base model without its class, in an adapter for a class with a head."""
    base = subject.base
    if base is None or base.config is None:
        return
    modules = module_names(base.config, base.modules, subject.config)
    if modules is None and not begin_as_with_a_head(subject, base):
        yield Unchecked(reason="lora-tool does not know the modules of the base's class, whose names could be compared")
    if modules is None or not any(
        layer.target not in modules.headed and not is_new_module(layer.target) for layer in subject.layers
    ):
        return  # as nearly always
    readings = Readings(subject.view, modules, prefixed=True)
    fitting = readings.fitting() if readings.headed else []
    if fitting and AS_THEY_ARE not in fitting:
        path = readings.paths[0]
        message = (
            f"is called `{fitting[0].path(path)}` in a {subject.config.task_type or 'model'} of that base: PEFT finds "
            "no such module"
        )
        yield Fault(subject=path, message=message, hint=hint, severity=Severity.WARNING, mergeable=True)


def _adapter_names(view: AdapterView, hint: str) -> Iterator[Fault]:
    """Say that tensors have an adapter's name in theirs, or those of several."""
    names = {layer.adapter_name for layer in view.kinds}
    if len(names) > 1:
        listed = ", ".join(sorted(name or "one without a name" for name in names))
        hint = hint if len(names - {None}) == 1 else _ONE_BY_ONE
        yield Fault(message=f"holds {len(names)} adapters ({listed}), but PEFT loads only one per file", hint=hint)
        return
    for name in names:
        first = view.layers[-1].any_tensor.name
        if name == _DEFAULT:
            message = (
                "contains the adapter name `default`: PEFT loads it only as an adapter of that name, and vLLM "
                "does not load it"
            )
            yield Fault(subject=first, message=message, hint=hint, severity=Severity.INFO, mergeable=True)
        elif name is not None:
            message = (
                f"contains the adapter name `{name}`: PEFT loads it only as an adapter of that name, not as `default`"
            )
            yield Fault(subject=first, message=message, hint=hint, mergeable=True)


@rule("LT213", Severity.WARNING, on=AdapterSubject, needs=_HEADERS_ONLY, unmergeable=True)
def bloat(subject: AdapterSubject) -> Iterator[Fault]:
    """Redundant copies of tensors.

    What it does: Looks for `modules_to_save.` and `original_module.` copies of a tensor that the file also holds, and
    for frozen base weights (`base_layer.weight`) other than embeddings.
    Why it matters: The adapter is larger than necessary, by whole matrices. PEFT itself saves some copies: a resized
    vocabulary with `modules_to_save` three times, the biases of a head with `bias="all"`, and the base's matrix of
    embeddings and output layers under LoRA. Those are reported as info. Two copies with different values are an error.
    Example: `lm_head.weight`, `lm_head.modules_to_save.weight` and `lm_head.original_module.weight`, 1 GiB each.
    What to do: Remove the copies, or save again with `save_embedding_layers=False`; a merged model does not have them.
    """
    copied = {Part.SAVED_MODULE: "a second copy of the trained tensor", Part.ORIGINAL_MODULE: "the frozen original"}
    other_values = set()
    for name, first in subject.view.repeats.items():
        if not same_values(subject.tensors[name], first):
            other_values.add(name)
            message = f"differs from `{first.name}`, although both belong to the same module"
            yield Fault(subject=name, message=message, severity=Severity.ERROR)
    for item in subject.view.whole:
        name, held = item.tensor.name, size(item.tensor.nbytes)
        if item.part in copied and item.name in subject.view.plain:
            message = f"{copied[item.part]}, {held} that PEFT never reads"
            severity = Severity.INFO if is_end(item.module) or item.name.endswith(".bias") else None
            if name not in other_values:
                yield Fault(subject=name, message=message, severity=severity)
        elif item.part is Part.BASE_LAYER and item.leaf != "bias" and not head_of(item.module):
            # a head's frozen weight is often nowhere else: without it, LoRA on the head would be lost
            expected = is_end(item.module) or is_decoder(item.module) or _is_embedding(subject, item.module)
            severity = Severity.INFO if expected else None
            message = f"a frozen weight of the base, {held} that the base has already"
            hint = _KEPT_ON_PURPOSE if severity else None
            yield Fault(subject=name, message=message, severity=severity, hint=hint)


def _is_embedding(subject: AdapterSubject, module: str) -> bool:
    return any(layer.embedding and layer.target == module for layer in subject.layers)


@rule("LT222", Severity.WARNING, on=AdapterSubject)
def weights_beside_the_adapter(subject: AdapterSubject) -> Iterator[Fault]:
    """Trained weights beside the adapter, which PEFT does not read.

    What it does: Looks in the adapter's folder for other trained weights that trainers save: LLaVA's
    `non_lora_trainables.bin`, LLaMA-Factory's `value_head`, ms-swift's `vit`, and TRL's value head,
    `pytorch_model.bin`.
    Why it matters: They belong to the trained model, but PEFT, vLLM and a merge use the adapter without them: the model
    gets the base's projector, and has no value head.
    Example: `non_lora_trainables.bin` beside `adapter_model.safetensors`.
    What to do: Merge with the program that trained it, or put these weights into the base first. A PPO value head can
    be left behind if you only need the policy. To make a reward model's value head its score head: `lora-tool convert
    ADAPTER --to peft --rm`.
    """
    root = subject.checkpoint.root
    for name in subject.checkpoint.folder.trained_beside:
        message = "holds trained weights that are not part of the adapter, and PEFT does not read it"
        is_head = name.startswith("value_head.") and subject.config.task_type == "CAUSAL_LM"
        as_reward = f"if this is a reward model: lora-tool convert {shlex.quote(str(root))} --to peft --rm"
        into_base = "merge with the program that trained it, or put these weights into the base first"
        hint = as_reward if is_head else into_base
        yield Fault(message=message, path=root / name, hint=hint)


@rule("LT235", Severity.ERROR, on=AdapterSubject, unmergeable=True)
def dialect(subject: AdapterSubject) -> Iterator[Fault]:
    """Names of the program that trained it, which PEFT does not know.

    What it does: Looks for names that Tinker and NeMo Automodel give modules, or the factors of experts. The rules that
    read tensors are skipped then.
    Why it matters: PEFT and servers find no such module, and load the adapter without it, or refuse it.
    Example: LoRA on `model.unembed_tokens`, as Tinker calls the output layer.
    What to do: Write it under PEFT's names: `lora-tool convert ADAPTER --to peft --base BASE`.
    """
    root, base = subject.checkpoint.root, subject.base
    given = "MODEL" if base is None else shlex.quote(str(base.root))
    for each in foreign_in(subject.checkpoint):
        yield Fault(
            subject=each.tensor,
            message=f"has {each.dialect.program}'s name of {each.dialect.means}, which PEFT does not know",
            hint=each.dialect.way_out or f"lora-tool convert {shlex.quote(str(root))} --to peft --base {given}",
        )
