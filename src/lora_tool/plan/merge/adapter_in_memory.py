"""An adapter in the names that parameters have in memory, and what a converted base or PEFT has no place for."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from lora_tool import keys
from lora_tool.adapter.support import ALLOW_IN_MEMORY
from lora_tool.checkpoint import AdapterDir
from lora_tool.errors import OnlyInMemory, UnsupportedAdapter
from lora_tool.keys import AdapterKey, Part, without_wrapped
from lora_tool.names.model import ModelFacts, NamesOnDisk
from lora_tool.plan.adapter.modules import AdapterModules
from lora_tool.plan.merge.base_view import PerExpert
from lora_tool.tensors import StoredTensor

SAVE_AGAIN = "write it as transformers does, once: from_pretrained(BASE), save_pretrained(NEW), then --base NEW"
_UNTIED_WAY = '`precision="float32"` with `untie=True` writes each end of tied embeddings as it was trained'
_OWN_WAY = '`precision="float32"` merges every tensor as it was trained'


def in_memory(adapter: AdapterDir, mapping: NamesOnDisk) -> AdapterDir:
    """Return the adapter with the module paths of this transformers."""
    found = homes(adapter, mapping)
    if all(path in (None, module) for (module, _), path in found.items()):
        return adapter  # which has been looked at already

    def placed(key: AdapterKey) -> AdapterKey:
        path = found[key.module, _leaf_in_memory(key)] or key.module
        return key if path == key.module else replace(key, module=path)

    return replace(adapter, keys={name: placed(key) for name, key in adapter.keys.items()})


def homes(adapter: AdapterDir, mapping: NamesOnDisk) -> dict[tuple[str, str], str | None]:
    """Return module and leaf of each of the adapter's tensors → the path in memory of the module that it belongs to.

    None where there is none.
    """
    # in the file's order: a rule of transformers may wait for a name before it looks at others
    wanted = dict.fromkeys((key.module, _leaf_in_memory(key)) for key in adapter.keys.values())
    return {(module, leaf): _home(module, leaf, mapping) for module, leaf in wanted}


def _leaf_in_memory(key: AdapterKey) -> str:
    """Return the parameter of its module that an adapter's tensor is for."""
    return key.leaf if key.part is Part.PLAIN and key.leaf else "weight"


def _home(module: str, leaf: str, mapping: NamesOnDisk) -> str | None:
    """Return the path in memory of a module that an adapter names.

    An adapter of an earlier transformers has the names of then, which are mostly those on disk.
    """
    module = bare = without_wrapped(module)
    while bare.endswith(".base_layer"):
        bare = bare.removesuffix(".base_layer")
    if bare in mapping.facts.modules:
        return module
    placed = mapping.place(f"{bare}.{leaf}")
    if placed not in mapping.facts.shapes:
        return None
    path, _, found = placed.rpartition(".")
    # a part of a fused parameter keeps its own name: `per_expert` finds it on disk
    return path + module.removeprefix(bare) if found == leaf else module


def disk_name(mapping: NamesOnDisk, module: str) -> str | None:
    """Return the tensor on disk that is the weight of `module`, a part of a fused parameter; None if it is none."""
    name = f"{module}.weight"
    held = mapping.piece_names(mapping.place(name))
    if name in held:
        return name
    return next((at for at in held if at.endswith(f".{name}") or name.endswith(f".{at}")), None)


def require_pefts_experts(mapping: NamesOnDisk, adapters: Sequence[AdapterDir], per_expert: PerExpert) -> None:
    """Raise `UnsupportedAdapter` where PEFT cannot fuse the factors of all experts, or would scale them differently."""
    for parameter in {mapping.place(name) for name in per_expert}:
        pieces = mapping.piece_names(parameter)
        if not pieces <= per_expert.keys():
            raise UnsupportedAdapter(
                f"{adapters[0].root}: {len(pieces - per_expert.keys())} of the {len(pieces)} tensors that make "
                f"`{parameter}` have no LoRA, but PEFT fuses the factors of all",
                hint=_OWN_WAY,
            )
    for config in (adapter.config for adapter in adapters if per_expert and adapter.config):
        if config.use_rslora or config.rank_pattern or config.alpha_pattern:
            raise UnsupportedAdapter(
                f"{config.path}: use_rslora, rank_pattern or alpha_pattern on single experts: PEFT fuses their factors, "
                "and would scale them differently than in training",
                hint=_OWN_WAY,
            )


def require_pefts_reading(mapping: NamesOnDisk, adapter: AdapterDir) -> None:
    """Raise `UnsupportedAdapter` where PEFT would leave some of the adapter's tensors out."""
    tensors = {keys.parse(name).canonical: tensor.shape for name, tensor in adapter.tensors.items()}
    lost = mapping.left_out_by_peft(adapter.root, tensors)
    if lost:
        # by the names of the file: PEFT may have renamed them into nothing
        found = homes(adapter, mapping)
        placed = None not in found.values()
        weights = {f"{path}.weight" for path in found.values() if path}
        tied = {name for pair in mapping.facts.tied.items() for name in pair} & weights
        raise UnsupportedAdapter(
            f"{adapter.root}: with the installed transformers, PEFT has no place for {len(lost)} of its tensors and would leave "
            f"them out with a warning; the first is `{lost[0]}`",
            hint=_UNTIED_WAY
            if tied
            else _OWN_WAY
            if placed
            else f"lora-tool validate {shlex.quote(str(adapter.root))}",
        )


def require_as_in_memory(
    mapping: NamesOnDisk, copied_only: Mapping[str, StoredTensor], modules: AdapterModules
) -> None:
    """Raise `UnsupportedAdapter` for LoRA on a weight that is stored transposed.

    Raises `OnlyInMemory` where transformers writes the weight back transposed, so that saving it again is no way out.
    """
    adapted = {*modules.parameters, *(f"{module}.weight" for module in modules.lora), *modules.saved}
    for name in sorted(adapted & copied_only.keys()):
        tensor = copied_only[name]
        message = (
            f"{tensor.path}: `{tensor.name}` is stored transposed, {list(tensor.shape)}, but the adapter is for "
            f"`{name}`, {list(mapping.facts.shapes[name])}"
        )
        if not mapping.is_written_as_in_memory(name):
            raise OnlyInMemory(f"{message}, and transformers writes it back transposed", hint=ALLOW_IN_MEMORY)
        raise UnsupportedAdapter(message, hint=SAVE_AGAIN)


def require_no_lora_on_tied(facts: ModelFacts, modules: Iterable[str]) -> None:
    """Raise `UnsupportedAdapter` for LoRA on a layer that is the same as another.

    The ends of tied embeddings are looked at by themselves.
    """
    output = f"{facts.output}.weight"
    shared = {name for pair in facts.tied.items() if pair[0] != output for name in pair}
    for module in modules:
        if f"{module}.weight" in shared:
            raise UnsupportedAdapter(
                f"`{module}` is one layer in several places of {facts.class_name}: PEFT's merge would add the LoRA of "
                "each place to all of them, although each was trained for one place",
                hint="serve the adapter unmerged",
            )
