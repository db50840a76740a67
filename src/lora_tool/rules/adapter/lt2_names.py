"""The names of an adapter's tensors, and the modules that its config names, there and in the base."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator, Sequence

from lora_tool.adapters import targeting
from lora_tool.adapters.experts import IN_EXPERT
from lora_tool.adapters.readings import AS_THEY_ARE, Readings
from lora_tool.adapters.view import AdapterView, drift
from lora_tool.core.display import counted, size
from lora_tool.core.keys import INDEX, PREFIX, Part, is_under, split_layer
from lora_tool.core.report import Severity
from lora_tool.formats.stored import same_values
from lora_tool.models.ends import (
    ADDED_BY_PEFT,
    MATRIX,
    PEFT_CLASSIFIERS,
    QUESTION_HEADS,
    head_of,
    is_end,
    is_new_module,
)
from lora_tool.models.layers import is_beyond
from lora_tool.models.model_tensors import module_names
from lora_tool.rules.engine.base_match import BaseMatch
from lora_tool.rules.engine.registry import Fault, Need, Unchecked, as_one, rule
from lora_tool.rules.engine.subjects import AdapterSubject
from lora_tool.rules.shared.base_match import begin_as_with_a_head, is_decoder, may_be_absent
from lora_tool.rules.shared.merged_class import makes_unknown_class

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
    PEFT loads `…lora_A.default.weight` only as the adapter named default; vLLM does not load it at all.
    Example: `base_model.model._orig_mod.model.layers.0…` was saved from a model wrapped by torch.compile.
    What to do: Repair the names: `lora-tool convert ADAPTER --to peft`. In future, save the unwrapped model
    (`accelerator.unwrap_model(model).save_pretrained(…)`).

    `lora-tool validate --fix` removes prefixes from the names in place if the new names fit into the file's header; the
    weights are not moved.
    """
    view = subject.view
    hint = f"lora-tool convert {shlex.quote(str(subject.checkpoint.root))} --to peft"
    wrong = {name: why for name, key in view.adapter.keys.items() if (why := drift(key))}
    for why in dict.fromkeys(wrong.values()):
        yield from as_one(
            Fault(subject=name, message=f"{why}; expected `{PREFIX}{view.paths[key.module]}…`", hint=hint)
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


_ROUTER, _FUSED = "gate.weight", "gate_up_proj"
"""What PEFT turns the names of a router and of experts into (0.21, `transformers_weight_conversion.py`)."""
_A_LIST = 'write the names as a list, ["q_proj", "v_proj"]: PEFT reads one string as a regular expression'
_ONCE = "keep the one that the adapter was trained with"


@rule("LT205", Severity.WARNING, on=AdapterSubject, needs=frozenset({Need.WEIGHTS, Need.CONFIG}))
def target_without_tensors(subject: AdapterSubject) -> Iterator[Fault]:
    """A target without tensors in the file.

    What it does: Looks for entries of `target_modules`, `target_parameters` and `modules_to_save` without tensors, and
    for modules that are to be saved whole inside one that is saved whole too, or that two fields give LoRA.
    Why it matters: Either the model had no such module, so what you meant to train was not trained; or the tensors were
    lost. PEFT then loads missing LoRA as zeros with a warning, and stops with an error on a missing whole module. The
    finding is an error where PEFT stops: the base has the module, it is inside another, or it is named twice.
    Example: `target_modules` of a Llama adapter lists "c_attn", which is a module of GPT-2.
    What to do: Compare the entry with the base's module names (`lora-tool inspect BASE`), and remove it or train again.
    """
    config = subject.config
    if not subject.layers:
        return
    if isinstance(config.target_modules, str):
        if not any(targeting.layer_is_targeted(config, layer) for layer in subject.view.kinds):
            message = "matches none of the modules that have LoRA tensors"
            hint = _A_LIST if "," in config.target_modules else None
            yield Fault(
                subject=f"target_modules: {config.target_modules}", message=message, path=subject.config_path, hint=hint
            )
    else:
        seen = _ends_of_modules(subject)
        for entry in config.target_modules or ():
            if entry not in seen and not _is_left_out(subject, entry):
                message = "matches no module that has LoRA tensors"
                yield Fault(subject=f"target_modules: {entry}", message=message, path=subject.config_path)
    yield from _parameters_without_tensors(subject, config.target_parameters or ())
    if config.modules_to_save:
        yield from _saved_without_tensors(subject)


def _ends_of_modules(subject: AdapterSubject) -> set[str]:
    """Return the ends of the paths of modules with LoRA or whole tensors, by which `target_modules` may name them."""
    ends: set[str] = set()
    for layer in subject.view.kinds:
        ends.update(_suffixes(layer.target))
    for name in subject.view.frozen:  # whose lost LoRA is LT505's
        ends.update(_suffixes(name.rpartition(".")[0]))
    for item in subject.view.parts(Part.PLAIN, Part.SAVED_MODULE):
        # "all-linear" also names the layers inside a head that is saved whole
        if targeting.is_saved_whole(subject.config, item.module):
            ends.update(_suffixes(item.module))
    return ends


def _suffixes(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.partition(".")[2]


def _is_left_out(subject: AdapterSubject, entry: str) -> bool:
    """Whether an entry may rightly have no LoRA: it is excluded, saved whole or in no layer that is transformed, or a
    pattern might exclude it.
    """
    config, match = subject.config, subject.match
    if isinstance(config.exclude_modules, str) or targeting.is_saved_whole(config, entry):
        return True
    if isinstance(match, BaseMatch):
        paths = (name.rpartition(".")[0] for name, _ in match.trained())
        named = [path for path in paths if is_under(path, frozenset({entry}))]
        return bool(named) and not any(map(config.targets, named))
    excluded = config.exclude_modules or ()
    if config.layers_to_transform or any(name.endswith(f".{entry}") for name in excluded):
        return True
    return any(name in excluded for name in _suffixes(entry))


def _parameters_without_tensors(subject: AdapterSubject, entries: Sequence[str]) -> Iterator[Fault]:
    for entry in entries:
        if entry == _ROUTER and _FUSED in entries:
            continue  # PEFT adds both to every mixture of experts, whatever its router is called
        parent = entry.rpartition(".")[0]
        both = _named_twice(subject, parent)
        if both is not None:
            message = f"`target_modules` names `{both}` too: PEFT fails to load the adapter"
            where, severity = f"target_parameters: {entry}", Severity.ERROR
            yield Fault(subject=where, message=message, path=subject.config_path, severity=severity, hint=_ONCE)
        elif not any(not parent or f".{layer.target}".endswith(f".{parent}") for layer in subject.view.kinds):
            message = "matches no module that has LoRA tensors"
            yield Fault(subject=f"target_parameters: {entry}", message=message, path=subject.config_path)


def _named_twice(subject: AdapterSubject, parent: str) -> str | None:
    """Return a layer that `target_modules` names, and by its path `target_parameters` too; None without one."""
    targets = (layer.target for layer in subject.view.kinds if f".{layer.target}".endswith(f".{parent}"))
    return next(filter(subject.config.targets, targets), None) if parent else None


def _saved_without_tensors(subject: AdapterSubject) -> Iterator[Fault]:
    config = subject.config
    whole = [item.module for item in subject.view.parts(Part.PLAIN, Part.SAVED_MODULE)]
    for entry in config.modules_to_save:
        # PEFT adds these names to every such adapter, whatever its head is called; LT301 checks heads
        if entry in PEFT_CLASSIFIERS | QUESTION_HEADS:
            continue
        held = (*whole, *subject.view.tokens)  # LT226 reports tokens of a module that is not whole
        if not any(ancestor.endswith(entry) for path in held for ancestor in targeting.ancestors(path)):
            message, severity = "the file has no tensor of such a module", None
            if isinstance(subject.match, BaseMatch) and _ends_a_module(subject.match, entry):
                message, severity = f"{message}, which the base has: PEFT fails to load the adapter", Severity.ERROR
            yield Fault(
                subject=f"modules_to_save: {entry}", message=message, path=subject.config_path, severity=severity
            )
    for path in whole:
        saved = [each for each in targeting.ancestors(path) if each.endswith(config.modules_to_save)]
        if len(saved) > 1:
            message = f"lies in `{saved[-1]}`, which is saved whole too: PEFT fails to load the adapter"
            hint = f"take it out of `modules_to_save` in {subject.config_path}: PEFT did not train it"
            name, severity = f"modules_to_save: {saved[0]}", Severity.ERROR
            yield Fault(subject=name, message=message, path=subject.config_path, hint=hint, severity=severity)
            return


def _ends_a_module(match: BaseMatch, entry: str) -> bool:
    """Whether the base has a module whose path ends with the entry of `modules_to_save`, as PEFT compares them."""
    modules = {name.rpartition(".")[0] for name, _ in match.trained()}
    return any(path.endswith(entry) for module in modules for path in targeting.ancestors(module))


@rule("LT505", Severity.ERROR, on=AdapterSubject, needs={Need.WEIGHTS, Need.CONFIG, Need.BASE, Need.SAME_NAMES})
def target_not_trained(subject: AdapterSubject) -> Iterator[Fault]:
    """A targeted module of the base has no LoRA.

    What it does: Applies `target_modules` and `target_parameters` to the base, and looks for targets without tensors;
    also for modules of `modules_to_save`, and biases that `"bias": "all"` trains, of which the file has only a part.
    Why it matters: Tensors were lost. PEFT still creates LoRA there, with B = 0 and only a warning.
    Example: `q_proj` has LoRA in only 31 of the 32 layers.
    What to do: Save the adapter again from the training state, or take an earlier checkpoint.
    """
    # a class that no table knows may lack a part of the base: it is compared in the names of memory
    if subject.matched.facts is not None or not makes_unknown_class(subject):
        yield from _without_lora(subject)


def _without_lora(subject: AdapterSubject) -> Iterator[Fault]:
    match, config = subject.matched, subject.config
    if config.target_parameters and not match.in_part:
        yield from _parameters_not_trained(subject, match)
    yield from _saved_in_part(subject, match)
    for name in subject.view.frozen:
        module = name.rpartition(".")[0]
        known = not match.in_part or match.tensor(module) is not None
        ours = known and config.targets(module) and may_be_absent(subject, module)
        if ours and not any(layer.target == module for layer in subject.layers):
            yield Fault(subject=module, message=f"`target_modules` names it in {match.base.root}, but it has no LoRA")
    every = targeting.is_all_linear(config)  # experts that transformers fuses are on disk one by one
    adapted = {match.name(layer.target) for layer in subject.layers}
    unknown = None if match.facts else match.base.config  # of its class, which may not have all that is on disk
    if adapted.isdisjoint(match.base.modules):
        return
    forms = {INDEX.sub("*", name) for name in adapted} if match.in_part else set()
    for name, tensor in match.trained():
        path, _, leaf = name.rpartition(".")
        if leaf != "weight" or len(tensor.shape) != MATRIX or tensor.name.rpartition(".")[0] in adapted:
            continue
        if match.in_part and INDEX.sub("*", path) not in forms:
            continue  # the model may have it under another name
        named = IN_EXPERT.search(path) is not None if every else config.targets(path)
        if not named or may_be_absent(subject, path) or (unknown is not None and is_beyond(unknown, path)):
            continue
        if _is_of_every_class(subject, path):
            yield Fault(subject=path, message=f"`target_modules` names it in {match.base.root}, but it has no LoRA")


def _parameters_not_trained(subject: AdapterSubject, match: BaseMatch) -> Iterator[Fault]:
    """Count each module's parameters that are named: PEFT wraps it once for each, one wrapper around the other."""
    paths = (name for name, _ in match.trained())
    counts = Counter(path.rpartition(".")[0] for path in paths if targeting.parameter_is_targeted(subject.config, path))
    held = {layer.module for layer in subject.layers}
    for module, count in counts.items():
        found = sum(module + ".base_layer" * depth in held for depth in range(count))
        if found < count:
            which = f"{counted(count, 'parameter')} of it in {match.base.root}, but LoRA is on {found}"
            yield Fault(subject=module, message=f"`target_parameters` names {which}")


def _saved_in_part(subject: AdapterSubject, match: BaseMatch) -> Iterator[Fault]:
    """Look for weights and biases that the config trains and the file lacks, though it has others of their kind.

    PEFT keeps the base's values for them, and does not warn.
    """
    there = {**subject.view.saved, **subject.view.frozen}
    adapted = {layer.target for layer in subject.layers}
    modules = {name.rpartition(".")[0] for name in there}.difference(adapted)
    added = ADDED_BY_PEFT.get(subject.config.task_type or "", ())
    forms = {INDEX.sub("*", module) for module in modules} if match.in_part else set()
    found = {
        entry for entry in (*subject.config.modules_to_save, *added) if any(f"{entry}." in f"{m}." for m in modules)
    }
    biases = subject.config.bias == "all" and any(name.endswith(".bias") for name in subject.view.saved)
    for name, _ in match.trained() if found or biases else ():
        module, _, leaf = name.rpartition(".")
        named = any(f"{entry}." in f"{module}." for entry in found) and leaf in ("weight", "bias")
        wanted = named or (biases and leaf == "bias")
        if match.in_part:  # the model may have them under another name
            config = match.base.config
            wanted = wanted and INDEX.sub("*", module) in forms and config is not None and not is_beyond(config, module)
        if wanted and f"{module}.{leaf}" not in there and (module in modules or _is_of_every_class(subject, module)):
            what = "`modules_to_save` names it" if named else '`"bias": "all"` trains it'
            yield Fault(
                subject=f"{module}.{leaf}", message=f"{what} in {match.base.root}, but the file does not have it"
            )


def _is_of_every_class(subject: AdapterSubject, path: str) -> bool:
    """Whether a module of the base is in every class made of it: a pooler is not, a module of a layer is."""
    own = subject.config.task_type == "CAUSAL_LM" and "pooler" not in path.split(".")
    return own or split_layer(path)[0] is not None
