"""LT205: the modules that the config names against those that have tensors."""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.adapters import targeting
from lora_tool.core.keys import Part, is_under
from lora_tool.core.report import Severity
from lora_tool.models.ends import PEFT_CLASSIFIERS, QUESTION_HEADS
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject, BaseMatch

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
        # "all-linear" also names the layers inside a head that is saved whole
        carried = {name.rpartition(".")[0] for name in subject.view.frozen}  # whose lost LoRA is LT505's
        held = {*(layer.target for layer in subject.view.kinds), *_saved_whole(subject), *carried}
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
    # PEFT adds these names to every such adapter, whatever its head is called; LT301 checks heads
    entries = [entry for entry in config.modules_to_save if entry not in PEFT_CLASSIFIERS | QUESTION_HEADS]
    whole = [item.module for item in subject.view.parts(Part.PLAIN, Part.SAVED_MODULE)]
    for entry in entries:
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
