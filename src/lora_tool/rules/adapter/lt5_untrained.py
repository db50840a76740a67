"""LT505: modules of the base that the adapter's config names, and the file does not have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lora_tool.adapters import targeting
from lora_tool.adapters.experts import IN_EXPERT
from lora_tool.core.display import counted
from lora_tool.core.keys import INDEX, split_layer
from lora_tool.core.report import Severity
from lora_tool.models.ends import ADDED_BY_PEFT, MATRIX
from lora_tool.models.layers import is_beyond
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject, BaseMatch
from lora_tool.rules.shared.base_match import may_be_absent


@rule("LT505", Severity.ERROR, on=AdapterSubject, needs={Need.WEIGHTS, Need.CONFIG, Need.BASE, Need.SAME_NAMES})
def target_not_trained(subject: AdapterSubject) -> Iterator[Fault]:
    """A targeted module of the base has no LoRA.

    What it does: Applies `target_modules` and `target_parameters` to the base, and looks for targets without tensors;
    also for modules of `modules_to_save`, and biases that `"bias": "all"` trains, of which the file has only a part.
    Why it matters: Tensors were lost. PEFT still creates LoRA there, with B = 0 and only a warning.
    Example: `q_proj` has LoRA in only 31 of the 32 layers.
    What to do: Save the adapter again from the training state, or take an earlier checkpoint.
    """
    match, config = subject.matched, subject.config
    yield from _parameters_not_trained(subject, match)
    yield from _saved_in_part(subject, match)
    for name in subject.view.frozen:
        module = name.rpartition(".")[0]
        known = not match.in_part or match.tensor(module) is not None
        ours = known and config.targets(module) and may_be_absent(subject, module)
        if ours and not any(layer.target == module for layer in subject.layers):
            yield Fault(subject=module, message=f"`target_modules` names it in {match.base.root}, but it has no LoRA")
    if not subject.layers:
        return
    every = targeting.is_all_linear(config)  # experts that transformers fuses are on disk one by one
    adapted = {match.name(layer.target) for layer in subject.layers}
    unknown = None if match.facts else match.base.config  # of its class, which may not have all that is on disk
    if not any(name in adapted for name in (tensor.rpartition(".")[0] for tensor in match.base.tensors)):
        return
    forms = {INDEX.sub("*", name) for name in adapted}
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
    if not subject.config.target_parameters or match.in_part:
        return
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
    modules = {name.rpartition(".")[0] for name in there} - {layer.target for layer in subject.layers}
    added = ADDED_BY_PEFT.get(subject.config.task_type or "", ())
    forms = {INDEX.sub("*", module) for module in modules}
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
