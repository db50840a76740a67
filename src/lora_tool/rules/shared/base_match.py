"""Finding an adapter's modules among a base model's tensors, or saying why that cannot be done by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lora_tool.architectures import architecture_of
from lora_tool.architectures.heads import head_of
from lora_tool.checkpoint import ModelDir
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.rules.engine.subjects import BaseMatch


def match_base(base: ModelDir, adapter: AdapterConfig, modules: Iterable[str]) -> BaseMatch | str:
    """Return how the module paths are named in the base; a sentence where names on disk may mean something else.

    A checkpoint of the model without its head, as the published `gpt2`, has other beginnings: the one under which
    most modules are found is taken.
    """
    if base.config is None or any(problem.fatal for problem in base.problems):
        return f"the base model {base.root} cannot be read: lora-tool validate {base.root}"
    if "layer_replication" in adapter.refused:
        return "`layer_replication` numbers the layers of the adapter otherwise than the base"
    config = base.config
    arch = architecture_of(config.model_type or "")
    if arch is None or config.custom_code:
        return f"the base is a {config.model_type or 'model'}, whose names on disk may differ from those in memory"
    quantised = config.quantization or _narrow(base)
    if quantised:
        return f"the base is quantised ({quantised}): its shapes on disk are not those in memory"
    wanted = [module for module in modules if head_of(module) is None]
    held = frozenset(name.rpartition(".")[0] for name in base.tensors)
    if not wanted or not held:
        return BaseMatch(base=base, arch=arch)
    candidates = [BaseMatch(base=base, arch=arch, strip=strip, add=add) for strip, add in _shifts(wanted[0], held)]
    return max(candidates, key=lambda match: sum(match.name(module) in held for module in wanted))


def _narrow(base: ModelDir) -> str | None:
    """Return the type of the base's first weight that is stored in floats of eight bits or less."""
    types = (tensor.dtype.value for tensor in base.tensors.values())
    return next((name for name in types if name.startswith(("F8_", "F6_", "F4"))), None)


def _shifts(module: str, held: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield what may have to be taken off a module path or put before it; first nothing."""
    yield "", ""
    first, dot, _ = module.partition(".")
    if dot:
        yield f"{first}.", ""
    for name in sorted(held):
        if name.endswith(f".{module}"):
            yield "", name.removesuffix(module)
            return
