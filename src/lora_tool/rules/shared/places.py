"""Adapted tensors of a base that its class has no place for under its config, as of a layer too many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lora_tool.rules.engine.registry import Fault
from lora_tool.rules.engine.subjects import AdapterSubject

_WAY_OUT = "copy the base's config.json and its weights again, from one place"


def without_place(subject: AdapterSubject, adapted: Mapping[str, str]) -> Iterator[Fault]:
    """Yield a fault for each of the modules `adapted`, each with the name of one of its tensors, whose weight in the
    base is not one of its class. Where headers cannot tell what the class has, nothing is said.
    """
    known = subject.stored_base.class_tensors if subject.stored_base is not None else None
    if known is None or not known.unexpected:
        return
    unexpected, root = frozenset(known.unexpected), subject.matched.base.root
    for module, name in adapted.items():
        held = subject.matched.tensor(module)
        if held is not None and held.name in unexpected:
            what = known.class_name or "model of this type"
            message = f"adapts `{held.name}`, for which a {what} has no place under {root / 'config.json'}: transformers ignores it"
            yield Fault(subject=name, message=message, hint=_WAY_OUT)
