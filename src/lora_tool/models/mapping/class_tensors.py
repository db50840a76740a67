"""What transformers itself says of the tensors of one model's class, for configs that no table covers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lora_tool.core.errors import IncompatibleBase, MissingDependency, UnsupportedAdapter, require_packages
from lora_tool.core.tensors import DType
from lora_tool.formats.model_config import ModelConfig
from lora_tool.models import is_computed
from lora_tool.models.ends import head_of, is_end
from lora_tool.models.model_tensors import ModelTensors

if TYPE_CHECKING:
    from lora_tool.models.mapping.model import ModelFacts, ShapeOnDisk


def class_tensors(config: ModelConfig, disk: Mapping[str, ShapeOnDisk]) -> ModelTensors | str:
    """Return what the config's class has and the tensors of a checkpoint, as transformers would load them.

    A mixture that is all as its table says needs no transformers. A sentence says why nobody can tell: transformers is
    not installed, or does not know the class.
    """
    from lora_tool.models.mapping.mixture import mixture_mapping  # for classes without a table of their tensors

    known = mixture_mapping(config, disk, config.dtype or DType.F32)
    if known is not None and not known.unexpected:
        return ModelTensors(
            class_name=known.facts.class_name, missing=(), unexpected=(), of_other_classes=(), shapes=dict(disk)
        )
    try:
        require_packages(("torch", "transformers"), extra="merge")
    except MissingDependency as error:
        return f"{error}: {error.hint}" if error.hint else str(error)
    from lora_tool.models.mapping.quiet import quiet  # for the few configs that need it

    try:
        with quiet():
            return _compared(config, disk)
    except (MissingDependency, UnsupportedAdapter) as error:
        return str(error)


def _compared(config: ModelConfig, disk: Mapping[str, ShapeOnDisk]) -> ModelTensors | str:
    from lora_tool.models.mapping import meta  # torch and transformers, which take seconds to import
    from lora_tool.models.mapping.conversion import Conversion
    from lora_tool.models.mapping.weight_mapping import WeightMapping, missing

    class_name = next((name for name in config.architectures[:1] if meta.belongs(name, config)), None)
    if class_name is None:
        return "config.json names no class that transformers has for this model type"
    try:
        mapping = WeightMapping(config, class_name, disk, config.dtype or DType.F32)
    except IncompatibleBase as error:
        if error.problem is None or error.problem.subject not in disk:
            return str(error)
        built = meta.build(config, class_name, meta.DTYPES[DType.F32])
        facts = meta.facts_of(built, meta.DTYPES[DType.F32])
        parameters, strangers = Conversion(built).load(disk)
    else:
        facts, parameters, strangers = mapping.facts, mapping.parameters, mapping.unexpected
    strange = meta.loading_ignores(class_name)[1]
    unexpected = [name for name in strangers if not (is_computed(name) or _matches(strange, name))]
    ends = {name for name in unexpected if is_end(path := name.rpartition(".")[0]) or head_of(path)}
    alone = {made.sources[0]: name for name, made in parameters.items() if len(made.sources) == 1}
    return ModelTensors(
        class_name=class_name,
        missing=tuple(
            name
            for name in missing(facts, parameters)
            if not (name in facts.buffers or is_computed(name) or name in facts.optional)
        ),
        unexpected=tuple(name for name in unexpected if name not in ends),
        of_other_classes=tuple(name for name in unexpected if name in ends),
        shapes=_wanted(facts, {n: of for n, of in alone.items() if parameters[of].shape == tuple(disk[n])}),
    )


def _wanted(facts: ModelFacts, parameters: Mapping[str, str]) -> dict[str, tuple[int | None, ...]]:
    """Return the shapes that the config gives the tensors, each of which is one parameter."""
    from lora_tool.models.mapping.model import LABELS  # loaded by whoever asks

    sizes = {name: facts.shapes[of] for name, of in parameters.items() if of in facts.shapes}
    return {name: tuple(None if size == LABELS else size for size in shape) for name, shape in sizes.items()}


def _matches(patterns: tuple[str, ...], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
