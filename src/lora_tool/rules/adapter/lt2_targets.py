"""LT205 and LT505: modules that the config names and the weights do not have, or have only in part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from lora_tool.adapters import targeting
from lora_tool.adapters.experts import IN_EXPERT
from lora_tool.core.display import counted
from lora_tool.core.keys import INDEX, Part, is_under, split_layer
from lora_tool.core.report import Severity
from lora_tool.models.ends import (
    ADDED_BY_PEFT,
    MATRIX,
    PEFT_CLASSIFIERS,
    QUESTION_HEADS,
)
from lora_tool.models.layers import is_beyond
from lora_tool.rules.engine.base_match import BaseMatch
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject
from lora_tool.rules.shared.base_match import may_be_absent
from lora_tool.rules.shared.merged_class import makes_unknown_class

_A_LIST = 'write the names as a list, ["q_proj", "v_proj"]: PEFT reads one string as a regular expression'
_ONCE = "keep the one that the adapter was trained with"
_ROUTER, _FUSED = "gate.weight", "gate_up_proj"
"""What PEFT turns the names of a router and of experts into (0.21, `transformers_weight_conversion.py`)."""


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
