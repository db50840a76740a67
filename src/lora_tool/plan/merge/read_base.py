"""Reading a base: which task the merged model is for, which class it is, and whether it is stored as it is in memory.

These are decided here, once. Headers and the table of architectures decide where they can; transformers is asked for the
rest, and only then imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from lora_tool.architectures import Architecture, architecture_of
from lora_tool.architectures.ends import embeddings, output_name
from lora_tool.architectures.vocabulary import stored_twice
from lora_tool.checkpoint import AdapterDir, ModelDir
from lora_tool.errors import IncompatibleBase, MissingDependency, UnsupportedAdapter
from lora_tool.plan.base.task import CLASSIFIERS, Task, decide_task, declared_types, other_task
from lora_tool.plan.merge.base_view import BaseView, direct_base
from lora_tool.plan.merge.converted_base import converted_base
from lora_tool.plan.merge.unexpected_tensors import looks_plain, names_are_known

_MAPPERS = ("torch", "transformers")
"""What says where parameters are on disk."""
_FULL_PRECISION = "give the full-precision model that it was made from: `base=MODEL`"


def read_base(base: ModelDir, adapters: Sequence[AdapterDir], asked: Task, *, exact: bool = False) -> BaseView:
    """Return base and adapters in the names of memory, with task and class decided.

    `asked` is the task that the user names, or `Task.AUTO`. `exact` takes no name for the model's that only looks like
    one. Raises `UnsupportedAdapter` where the task, the adapters and the base contradict each other or no class is
    found, `IncompatibleBase` where the base does not fit its class, `MissingDependency` where transformers must be asked
    and is not installed.
    """
    task = other_task(asked, adapters, base)
    row = plain_row(base, adapters, asked) if task is None else None
    if row is not None:
        task = decide_task(asked, adapters, base, row.head)
        if _is_certain(base, adapters, row, task, exact=exact):
            return direct_base(base, adapters, row, task)
    require_transformers()
    from lora_tool.plan.merge.model_class import model_class  # noqa: PLC0415 - imports torch

    try:
        found = model_class(base, adapters, asked, task)
    except (IncompatibleBase, UnsupportedAdapter):
        if row is None or task is None:
            raise
        return direct_base(base, adapters, row, task)  # transformers has nothing to say of a class that it cannot build
    return converted_base(base, adapters, found.mapping, found.arch, found.task, plain=row is not None)


def plain_row(base: ModelDir, adapters: Sequence[AdapterDir], asked: Task) -> Architecture | None:
    """Return the row of the base's model type if names on disk are those in memory; None if transformers must tell."""
    config = base.whole_config
    row = architecture_of(config.model_type or "")
    if row is None or any(adapter.config and adapter.config.target_parameters for adapter in adapters):
        return None
    known = {row.causal_lm, row.sequence_classification} - {None}
    plain = not config.architectures or bool(known & set(config.architectures))
    if not plain or not _has_class(row, adapters, asked) or base.dtype in row.wide_in:
        return None
    if not all(map(find_spec, _MAPPERS)):
        return row  # what is wrong with the names is said by them
    # transformers knows which of several matrices with a row per token is tied
    is_tied = output_name(row) not in {None, *base.tensors}
    one_end = not is_tied or len(embeddings(base, row)) <= 1
    return row if one_end and all(_all_found(base, adapter, row) for adapter in adapters) else None


def _is_certain(base: ModelDir, adapters: Sequence[AdapterDir], row: Architecture, task: Task, *, exact: bool) -> bool:
    """Return whether the names of a plainly stored base are its model's, all and no others, and each is one tensor.

    So they are taken where the config has no sizes, of which transformers would build some other model.
    """
    config = base.whole_config
    if config.vocab_size is None:
        return True
    classifier = task in CLASSIFIERS
    plain = not exact and looks_plain(base, row, classifier=classifier)
    if not plain and not names_are_known(base, adapters, row, classifier=classifier):
        return False
    # an output layer that is on disk and tied may stand for the embeddings; an encoder's and a decoder's may be one
    outputs = base.tensors.keys() & set(row.causal_only) if config.tie_word_embeddings is True else set()
    return outputs <= stored_twice(base, row).keys() and len(embeddings(base, row)) <= 1


def require_full_precision(base: ModelDir) -> None:
    """Return unless the base's weights are quantised. Raises `UnsupportedAdapter`."""
    config = base.whole_config
    if config.quantization:
        raise UnsupportedAdapter(
            f"{config.path}: the base is quantised ({config.quantization}): merging into rounded weights is not exact",
            hint=_FULL_PRECISION,
        )
    quantised = next((t for t in base.tensors.values() if t.dtype.value.startswith(("F8_", "F6_", "F4"))), None)
    if quantised is not None:
        raise UnsupportedAdapter(
            f"{quantised.path}: `{quantised.name}` is {quantised.dtype}: the base is quantised", hint=_FULL_PRECISION
        )


def require_transformers() -> None:
    """Return if torch and transformers are there to be asked for names. Raises `MissingDependency`."""
    for package in _MAPPERS:
        if find_spec(package) is None:
            raise MissingDependency(package, extra="merge")


def _has_class(row: Architecture, adapters: Sequence[AdapterDir], asked: Task) -> bool:
    """Return whether the row has the class that the merged model is to be of, as far as it was said."""
    declared = declared_types(adapters)
    classifier = asked in CLASSIFIERS or "SEQ_CLS" in declared
    causal = asked is Task.CAUSAL_LM or "CAUSAL_LM" in declared
    return not (classifier and row.sequence_classification is None) and not (causal and row.causal_lm is None)


def _all_found(base: ModelDir, adapter: AdapterDir, row: Architecture) -> bool:
    """Return whether every adapted module is on disk under its own name; heads may be new, output layers tied."""
    held = {name.rpartition(".")[0] for name in (*base.tensors, *row.causal_only)}
    adapted = {key.module for key in adapter.keys.values()}
    head = row.head or ""
    return all(module in held or module == head or module.startswith(f"{head}.") for module in adapted)
