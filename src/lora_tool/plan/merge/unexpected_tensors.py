"""Tensors of a base that its model has no place for: transformers leaves them out on loading, and so does a merge.

Old checkpoints hold buffers that transformers computes by itself today; those are known by name. Others come from
another class, another trainer or another number of layers: which of them belong, transformers alone can tell, so this
only says whether the names are those of a plain model, and it must be asked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from lora_tool import keys
from lora_tool.actions import TensorAction
from lora_tool.architectures import Architecture, is_computed
from lora_tool.architectures.ends import output_name
from lora_tool.checkpoint import AdapterDir, ModelDir
from lora_tool.keys import Part
from lora_tool.plan.base.known_names import KNOWN_NAMES, names_digest
from lora_tool.plan.core.steps import InputRecord
from lora_tool.tensors import StoredTensor

_WHOLE = (Part.PLAIN, Part.SAVED_MODULE, Part.BASE_LAYER)
_REASON = "a buffer that transformers computes by itself and does not load"


def computed_buffers(base: ModelDir) -> Iterator[InputRecord]:
    """Yield the buffers of a plainly stored base that transformers does not load."""
    for name, tensor in base.tensors.items():
        if is_computed(name):
            yield InputRecord(path=tensor.path, name=name, action=TensorAction.DROPPED, reason=_REASON)


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
    return names_digest(class_name, config.raw, held.difference(arch.causal_only)) in KNOWN_NAMES


def looks_plain(base: ModelDir, arch: Architecture, *, classifier: bool) -> bool:
    """Return whether the base has weights and biases alone, under the model's own roots, the same in every layer.

    It may still hold a tensor that no model has; a plain name in a plain place is taken for the model's.
    """
    tensors = [tensor for tensor in base.tensors.values() if not is_computed(tensor.name)]
    name = arch.sequence_classification if classifier else arch.causal_lm
    if name not in base.whole_config.architectures and any(map(_is_of_pooler, tensors)):
        return False  # another class may be without it
    return all(map(_is_parameter, tensors)) and _same_layers(base, tensors) and _same_roots(arch, tensors, classifier)


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


def _same_roots(arch: Architecture, tensors: list[StoredTensor], classifier: bool) -> bool:  # noqa: FBT001
    """Return whether a tensor is the trunk's, of the output layer, or, in a classifier's base, of its head."""
    trunk = {tensor.name.partition(".")[0] for tensor in tensors if keys.split_layer(tensor.name)[0] is not None}
    allowed = trunk | {name.partition(".")[0] for name in arch.causal_only}
    heads = f"{arch.head}." if classifier and arch.head else None
    return all(
        tensor.name.partition(".")[0] in allowed or (heads is not None and tensor.name.startswith(heads))
        for tensor in tensors
    )
