"""Reading a model: which task the merged model is for, which class it is, and whether it is stored as it is in memory.

These are decided here, once. Headers and the table of architectures decide where they can; transformers decides the
rest, and only then is it imported. Some bases hold tensors that their model has no place for, of another class, another
trainer or another number of layers. Only transformers can tell which of them belong, so this module only says whether
the names are those of a plain model.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from msgspec.structs import replace

from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core import keys
from lora_tool.core.errors import IncompatibleBase, UnsupportedAdapter, require_packages
from lora_tool.core.keys import Part
from lora_tool.core.progress import decided
from lora_tool.core.tensors import DType, StoredTensor, TensorAction
from lora_tool.models import Architecture, architecture_of, is_computed
from lora_tool.models.ends import embeddings, output_name, stored_twice
from lora_tool.models.model_tensors import prefixes_of
from lora_tool.plans.base.known_names import KNOWN_NAMES
from lora_tool.plans.base.task import CLASSIFIERS, Task, decide_task, declared_types, other_task
from lora_tool.plans.core.steps import InputRecord
from lora_tool.plans.merge.draft import Model

_WHOLE = (Part.PLAIN, Part.SAVED_MODULE, Part.BASE_LAYER)
_MAPPERS = ("torch", "transformers")
"""The package that knows where parameters lie on disk."""
_LAYER = re.compile(r"\.(\d+)\.")
SWITCH = re.compile("bias|norm")
"""Booleans of a config that add tensors to a class, or take some away, are called so."""


def read_model(base: ModelDir, adapters: Sequence[AdapterDir], wanted: Task, *, exact: bool = False) -> Model:
    """Return base and adapters in the names of memory, with task and class decided.

    `wanted` is the task that the user names, or `Task.AUTO`. With `exact` a name that only resembles the model's is not
    taken for it. Raises `UnsupportedAdapter` where the task, the adapters and the base contradict each other or no
    class is found, `IncompatibleBase` where the base does not fit its class, `MissingDependency` where it takes
    transformers, which is not installed.
    """
    task = other_task(wanted, adapters, base)
    named = _with_prefix(base)
    row = plain_row(named, adapters, wanted) if task is None else None
    if row is not None:
        task = decide_task(wanted, adapters, named, row.head)
        if _is_certain(named, adapters, row, task, exact=exact):
            decided(
                f"names: those of {row.model_type} are the same on disk and in memory, so transformers is not needed"
            )
            return as_stored(named, adapters, row, task)
    mixture = known_mixture(base, adapters, wanted) if task is None else None
    if mixture is not None:
        return mixture
    require_transformers()
    from lora_tool.plans.merge.model.classes import model_class
    from lora_tool.plans.merge.model.converted import converted

    try:
        found = model_class(base, adapters, wanted, task)
    except (IncompatibleBase, UnsupportedAdapter) as why:
        if row is None or task is None:
            raise
        decided(f"names: as they are on disk, because transformers cannot build this {row.model_type} ({why})")
        return as_stored(named, adapters, row, task)  # transformers has nothing to say of a class that it cannot build
    decided(f"names: transformers says where the parameters of {found.mapping.facts.class_name} are on disk")
    return converted(
        base, adapters, found.mapping, found.arch, found.task, same_names=row is not None and named is base
    )


def _with_prefix(base: ModelDir) -> ModelDir:
    """Return the base with the names that its class with a head gives it, where it is stored as the base model alone, as
    the published GPT-2 is: transformers writes those names.
    """
    config = base.whole_config
    row = architecture_of(config.model_type or "")
    prefix = prefixes_of(row.model_type).get(row.causal_lm or "", "") if row is not None else ""
    if row is None or not prefix or any(name.startswith(f"{prefix}.") for name in base.tensors):
        return base
    tensors = {}
    for name, tensor in base.tensors.items():
        new = name if name in row.causal_only or is_computed(name) else f"{prefix}.{name}"
        tensors[new] = replace(tensor, spec=replace(tensor.spec, name=new))
    return replace(base, weights=replace(base.weights, tensors=tensors))


def plain_row(base: ModelDir, adapters: Sequence[AdapterDir], wanted: Task) -> Architecture | None:
    """Return the row of the base's model type if names on disk are those in memory; None if transformers must tell."""
    config = base.whole_config
    row = architecture_of(config.model_type or "")
    if row is None or any(adapter.config and adapter.config.target_parameters for adapter in adapters):
        return None
    known = {row.causal_lm, row.sequence_classification} - {None}
    plain = not config.architectures or bool(known & set(config.architectures))
    if not plain or not _has_class(row, adapters, wanted) or base.dtype in row.wide_in:
        return None
    if not all(map(find_spec, _MAPPERS)):
        return row  # wrong names are reported by the rules, without transformers
    # transformers knows which of several matrices with a row per token is tied
    is_tied = output_name(row) not in {None, *base.tensors}
    one_end = not is_tied or len(embeddings(base, row)) <= 1
    return row if one_end and all(_all_found(base, adapter, row) for adapter in adapters) else None


def _is_certain(base: ModelDir, adapters: Sequence[AdapterDir], row: Architecture, task: Task, *, exact: bool) -> bool:
    """Return whether the names of a plainly stored base are its model's, all and no others, and each is one tensor.

    Then a config without sizes does not matter: transformers would build another model from it.
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


def known_mixture(base: ModelDir, adapters: Sequence[AdapterDir], wanted: Task) -> Model | None:
    """Return the model of a causal LM with stacked experts, if a table knows its class; None if it takes transformers
    to know.
    """
    if wanted not in (Task.AUTO, Task.CAUSAL_LM) or declared_types(adapters) != {"CAUSAL_LM"}:
        return None
    from lora_tool.models.mapping.mixture import mixture_mapping
    from lora_tool.plans.merge.model.converted import class_row, converted

    shapes = {name: tensor.shape for name, tensor in base.tensors.items()}
    found = mixture_mapping(base.whole_config, shapes, base.dtype or DType.F32)
    if found is None:
        return None
    decided(
        f"names: {found.facts.class_name} stacks the experts of each layer in memory, all else is as on disk, so "
        "transformers is not needed"
    )
    arch = class_row(base.whole_config, found.facts, None)
    return converted(base, adapters, found, arch, decide_task(wanted, adapters, base, None))


def require_transformers() -> None:
    """Return if torch and transformers are installed, which know the names. Raises `MissingDependency`."""
    require_packages(_MAPPERS, extra="merge")


def _has_class(row: Architecture, adapters: Sequence[AdapterDir], wanted: Task) -> bool:
    """Return whether the row has the class that the merged model is to be of, as far as that is known."""
    declared = declared_types(adapters)
    classifier = wanted in CLASSIFIERS or "SEQ_CLS" in declared
    causal = wanted is Task.CAUSAL_LM or "CAUSAL_LM" in declared
    return not (classifier and row.sequence_classification is None) and not (causal and row.causal_lm is None)


def _all_found(base: ModelDir, adapter: AdapterDir, row: Architecture) -> bool:
    """Return whether every adapted module is on disk under its own name; heads may be new, output layers tied."""
    held = {name.rpartition(".")[0] for name in (*base.tensors, *row.causal_only)}
    adapted = {key.module for key in adapter.keys.values()}
    head = row.head or ""
    return all(module in held or module == head or module.startswith(f"{head}.") for module in adapted)


def names_are_known(base: ModelDir, adapters: Sequence[AdapterDir], arch: Architecture, *, classifier: bool) -> bool:
    """Return whether the base has the parameters of its class, all and no others, the head from base or adapters.

    Then transformers has nothing to add. An output layer may be absent where the config ties it.
    """
    config = base.whole_config
    class_name = arch.sequence_classification if classifier else arch.causal_lm
    if class_name is None or not config.architectures:
        return False
    held = {name for name in base.tensors if not is_computed(name)}
    if classifier:
        whole = {key.tensor for adapter in adapters for key in adapter.keys.values() if key.part in _WHOLE}
        held |= {name for name in whole if name.startswith(f"{arch.head}.")}
    else:
        tied = {output_name(arch)} if config.tie_word_embeddings is True else set()
        if not held.issuperset(set(arch.causal_only) - tied):
            return False
    return names_digest(class_name, config.raw, held - {*arch.causal_only}) in KNOWN_NAMES


def names_digest(class_name: str, config: Mapping[str, Any], names: Iterable[str]) -> str | None:
    """Return a digest of the class, its parameters' `names` and the switches that are on, for any number of layers.

    `config` is config.json as it was read. None where a stack of layers is not numbered from 0, or is not as long as
    any number in `config` says.
    """
    lines = {class_name, *(f"{name}=true" for name, value in config.items() if value is True and SWITCH.search(name))}
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in names:
        layer = _LAYER.search(name)
        if layer is None:
            lines.add(name)
        else:
            stacks[name[: layer.start()]][int(layer[1])].add(name[layer.end() :])
    lengths = {value for value in config.values() if type(value) is int}
    for stack, layers in stacks.items():
        if sorted(layers) != list(range(len(layers))) or len(layers) not in lengths:
            return None
        lines |= {f"{stack}: {' '.join(sorted(layer))}" for layer in layers.values()}
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:10]


def looks_plain(base: ModelDir, arch: Architecture, *, classifier: bool) -> bool:
    """Return whether the base has only weights and biases, under the model's own roots, the same in every layer.

    It may still hold a tensor that no model has; a plain name in a plain place is taken for the model's.
    """
    tensors = [tensor for tensor in base.tensors.values() if not is_computed(tensor.name)]
    name = arch.sequence_classification if classifier else arch.causal_lm
    if name not in base.whole_config.architectures and any(map(_is_of_pooler, tensors)):
        return False  # another class may be without it
    return (
        all(map(_is_parameter, tensors))
        and _same_layers(base, tensors)
        and _same_roots(arch, tensors, classifier=classifier)
    )


def _is_of_pooler(tensor: StoredTensor) -> bool:
    return ".pooler." in tensor.name and keys.split_layer(tensor.name)[0] is None


def _is_parameter(tensor: StoredTensor) -> bool:
    leaf = tensor.name.rpartition(".")[2]
    return tensor.dtype.is_float and (leaf == "weight" or (leaf == "bias" and len(tensor.shape) == 1))


def _same_layers(base: ModelDir, tensors: list[StoredTensor]) -> bool:
    """Return whether layers are numbered from 0, as many as the config says, each with the same tensors."""
    stacks: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for tensor in tensors:
        number, _ = keys.split_layer(tensor.name)
        if number is not None:
            stack, _, rest = tensor.name.partition(f".{number}.")
            stacks[stack][number].add(rest)
    counts = {value for value in base.whole_config.raw.values() if type(value) is int}
    return all(
        sorted(layers) == list(range(len(layers)))
        and len(layers) in counts
        and len(set(map(frozenset, layers.values()))) == 1
        for layers in stacks.values()
    )


def _same_roots(arch: Architecture, tensors: list[StoredTensor], *, classifier: bool) -> bool:
    """Return whether a tensor is the trunk's, of the output layer, or, in a classifier's base, of its head."""
    trunk = {tensor.name.partition(".")[0] for tensor in tensors if keys.split_layer(tensor.name)[0] is not None}
    allowed = trunk | {name.partition(".")[0] for name in arch.causal_only}
    heads = f"{arch.head}." if classifier and arch.head else None
    return all(
        tensor.name.partition(".")[0] in allowed or (heads is not None and tensor.name.startswith(heads))
        for tensor in tensors
    )


def as_stored(base: ModelDir, adapters: Sequence[AdapterDir], arch: Architecture, task: Task) -> Model:
    """Return the model of a base that is stored as it is in memory.

    It is without the buffers of old checkpoints, which transformers computes.
    """
    computed = [tensor for name, tensor in base.tensors.items() if is_computed(name)]
    if computed:
        tensors = {name: tensor for name, tensor in base.tensors.items() if not is_computed(name)}
        base = replace(base, weights=replace(base.weights, tensors=tensors))
    reason = "a buffer that transformers computes and never loads"
    return Model(
        base=base,
        adapters=tuple(adapters),
        arch=arch,
        task=task,
        leftovers=tuple(
            InputRecord(path=tensor.path, name=tensor.name, action=TensorAction.DROPPED, reason=reason)
            for tensor in computed
        ),
    )
