"""One model class and one checkpoint: what `from_pretrained` would take from it, and what saving would write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lora_tool.errors import IncompatibleBase
from lora_tool.formats.model_config import ModelConfig
from lora_tool.names import meta
from lora_tool.names.conversion import Conversion
from lora_tool.names.model import LABELS, Made, ModelFacts, Shape
from lora_tool.tensors import DType


class Naming:
    """The names of one class in memory and on disk. Loading comes first: it decides which renamings saving reverts."""

    def __init__(self, config: ModelConfig, class_name: str, disk: Mapping[str, Shape], dtype: DType) -> None:
        loaded_as = meta.DTYPES.get(dtype, meta.DTYPES[DType.F32])
        model = meta.build(config, class_name, loaded_as)
        self._conversion = Conversion(model)
        self.facts: ModelFacts = meta.facts_of(model, loaded_as)
        self.parameters, self.unexpected = self._conversion.load(disk)
        for name, made in self.parameters.items():
            expected = self.facts.shapes[name]
            if made.shape != expected and LABELS not in expected:
                raise IncompatibleBase(
                    f"{config.path}: `{name}` is {list(expected)} by the config, {list(made.shape)} in the weights"
                )

    @property
    def missing(self) -> tuple[str, ...]:
        """Parameters that the checkpoint has nothing for, tied ones aside: transformers would make them up."""
        held = self.parameters.keys()
        tied = self.facts.tied
        sources = {source for target, source in tied.items() if target in held}
        return tuple(
            name
            for name in self.facts.shapes
            if name not in held and name not in sources and not (name in tied and tied[name] in held | sources)
        )

    def place(self, disk_name: str) -> str:
        """Return the parameter that a tensor of this name would be loaded into, or a part of."""
        return self._conversion.place(disk_name)[0]

    def written(self, memory: Mapping[str, Shape]) -> dict[str, Made]:
        """Return what `save_pretrained` writes for these parameters: tensor name → the rows that it is made of."""
        return self._conversion.save(memory)


def candidates(config: ModelConfig, *, classifier: bool) -> Iterator[str]:
    """Yield the class names that a base of this config may be loaded as, likeliest first."""
    return meta.classifiers(config) if classifier else meta.generators(config)
