"""Finding an adapter's modules among a base model's tensors, or saying why that cannot be done by name."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence

from lora_tool.adapters.experts import IN_EXPERT
from lora_tool.checkpoints import ModelDir
from lora_tool.checkpoints.quantised import in_full_precision
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.formats.model_config import ModelConfig
from lora_tool.models import Architecture, architecture_of
from lora_tool.models.heads import head_of
from lora_tool.models.text_classes import TEXT_CLASSES, TextClass
from lora_tool.rules.engine.subjects import BaseMatch

_OUTPUT = "lm_head.weight"
"""What every class of transformers that has it on disk has in memory, too."""


def match_base(base: ModelDir, adapter: AdapterConfig, modules: Iterable[str]) -> BaseMatch | str:
    """Return how the module paths are named in the base; a sentence where names on disk may mean something else.

    A checkpoint of the model without its head, as the published `gpt2`, has other beginnings: the one under which
    most modules are found is taken.
    """
    if base.config is None or any(problem.fatal for problem in base.problems):
        return f"the base model {base.root} cannot be read: lora-tool validate {shlex.quote(str(base.root))}"
    config = base.config
    if why := _why_names_cannot_tell(config, adapter):
        return why
    try:
        base = in_full_precision(base)
    except UnsupportedAdapter as error:
        return str(error)
    arch, text = architecture_of(config.model_type or ""), TEXT_CLASSES.get(config.model_type or "")
    wanted = [module for module in modules if head_of(module) is None]
    held = frozenset(name.rpartition(".")[0] for name in base.tensors)
    if arch is None:
        return (_text_match(base, text, held, wanted) if text else None) or _may_differ(config)
    if not wanted or not held:
        return BaseMatch(base=base, arch=arch)
    candidates = [BaseMatch(base=base, arch=arch, strip=strip, add=add) for strip, add in _shifts(wanted[0], held)]
    return max(candidates, key=lambda match: sum(match.name(module) in held for module in wanted))


def same_names(base: ModelDir, adapter: AdapterConfig, modules: Iterable[str]) -> BaseMatch | None:
    """Return a match of the modules that the base has under the same names, whatever its other names mean; None if it
    has none of them.

    transformers renames, fuses and splits what it reads, but gives nothing the name that another tensor has on disk.
    """
    if base.config is None or any(problem.fatal for problem in base.problems) or "layer_replication" in adapter.refused:
        return None
    try:
        plain = in_full_precision(base)
    except UnsupportedAdapter:
        return None
    if not any(f"{module}.weight" in plain.tensors for module in modules):
        return None
    row = Architecture(
        model_type=base.config.model_type or "",
        causal_lm=None,
        sequence_classification=None,
        head=None,
        causal_only=(_OUTPUT,) if _OUTPUT in plain.tensors else (),
        conv1d=frozenset(),
    )
    return BaseMatch(base=plain, arch=row, in_part=True)


def _why_names_cannot_tell(config: ModelConfig, adapter: AdapterConfig) -> str | None:
    """Return why names and shapes on disk say nothing of those in memory; None where they may."""
    if "layer_replication" in adapter.refused:
        return "`layer_replication` numbers the adapter's layers differently from the base's"
    known = architecture_of(config.model_type or "") or TEXT_CLASSES.get(config.model_type or "")
    return _may_differ(config) if known is None or config.custom_code else None


def _may_differ(config: ModelConfig) -> str:
    return f"the base is of {f'type {config.model_type}' if config.model_type else 'no known type'}, whose tensor names on disk may differ from those in memory"


def _text_match(base: ModelDir, text: TextClass, held: frozenset[str], wanted: Sequence[str]) -> BaseMatch | None:
    """Return the match of an adapter that was trained on the text class of a multimodal base, else None.

    None too for experts that are on disk one by one: what they are in memory headers do not say.
    """
    outside = frozenset(name for name in base.tensors if not text.holds(name))
    match = BaseMatch(base=base, arch=text.architecture, strip=text.strip, add=text.add, outside=outside)
    found = sum(match.name(module) in held for module in wanted)
    whole = frozenset(map(text.in_whole, held))
    as_they_are = sum(module in whole for module in wanted)
    return match if found > as_they_are and not any(map(IN_EXPERT.search, held)) else None


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
