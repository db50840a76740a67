"""One model class and one checkpoint: what `from_pretrained` would take from it, and what saving would write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from lora_tool.core.display import and_more
from lora_tool.core.errors import Defect, IncompatibleBase, Problem, UnsupportedAdapter
from lora_tool.core.tensors import DType
from lora_tool.formats.model_config import ModelConfig
from lora_tool.models.mapping import meta
from lora_tool.models.mapping.conversion import Conversion
from lora_tool.models.mapping.model import LABELS, ModelFacts, RowMapping, ShapeOnDisk

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class WeightMapping:
    """The names of one class in memory and on disk. Loading comes first: it decides which renamings saving reverts."""

    outside: frozenset[str] = frozenset()
    """Parameters that the class which adapters are trained on does not have."""

    def __init__(self, config: ModelConfig, class_name: str, disk: Mapping[str, ShapeOnDisk], dtype: DType) -> None:
        self._config, self._loaded_as = config, meta.DTYPES.get(dtype, meta.DTYPES[DType.F32])
        self._any_labels = True
        try:
            self._read(class_name, disk)
        except (IncompatibleBase, UnsupportedAdapter):
            if not meta.may_have_labels(class_name):
                raise
            self._any_labels = False  # a class that makes other sizes of their number, or takes one number only
            self._read(class_name, disk)
        else:
            self._read_by_its_number(class_name, disk)

    def _read_by_its_number(self, class_name: str, disk: Mapping[str, ShapeOnDisk]) -> None:
        """Read again with the config's own number of labels where the head is of other layers then, and the base's."""
        strangers = self.unexpected
        lacking = {name.partition(".")[0] for name in self.missing if LABELS in self.facts.shapes[name]}
        if lacking.isdisjoint(name.partition(".")[0] for name in strangers):
            return
        self._any_labels = False
        self._read(class_name, disk)
        if len(self.unexpected) >= len(strangers):
            self._any_labels = True
            self._read(class_name, disk)

    def _read(self, class_name: str, disk: Mapping[str, ShapeOnDisk]) -> None:
        model = self._built(class_name)
        self._conversion = Conversion(model)
        self.facts: ModelFacts = meta.facts_of(model, self._loaded_as)
        self.parameters, self.unexpected = self._conversion.load(disk)
        self._piece_names: dict[str, frozenset[str]] = {}
        for name, made in self.parameters.items():
            expected = self.facts.shapes[name]
            if made.shape != expected and LABELS not in expected:
                others = and_more(len(made.sources) - 1)
                of = f" of `{made.sources[0]}`{others}" if (name,) != made.sources else ""
                message = f"is {list(made.shape)} in the weights{of}, but the config implies {list(expected)}"
                path = str(self._config.path)
                problem = Problem(defect=Defect.BAD_FIELD, path=path, subject=name, message=message)
                raise IncompatibleBase(str(problem), problem=problem)

    def _built(self, class_name: str) -> PreTrainedModel:
        return meta.build(self._config, class_name, self._loaded_as, any_labels=self._any_labels)

    @property
    def tied_by_config(self) -> Mapping[str, str]:
        """Parameter → the one that it is the same as because the config says so, and would not be otherwise."""
        untied = replace(self._config, raw={**self._config.raw, "tie_word_embeddings": False})
        others = meta.build(untied, self.facts.class_name, self._loaded_as, any_labels=self._any_labels)
        left = others.all_tied_weights_keys
        return {name: of for name, of in self.facts.tied.items() if left.get(name) != of}

    def left_out_by_peft(self, folder: Path, tensors: Mapping[str, ShapeOnDisk]) -> tuple[str, ...]:
        """Return the LoRA tensors of the adapter in `folder` that PEFT would drop with a warning. Imports PEFT."""
        from lora_tool.models.mapping.peft_view import dropped_by_peft  # PEFT's import is slow and seldom needed

        return dropped_by_peft(self._built(self.facts.class_name), folder, tensors)

    @property
    def missing(self) -> tuple[str, ...]:
        """Parameters that the checkpoint has nothing for, tied ones aside: transformers would re-initialise them."""
        return missing(self.facts, self.parameters)

    def place(self, disk_name: str) -> str:
        """Return the parameter that a tensor of this name would be loaded into, or a part of."""
        return self._conversion.place(disk_name)[0]

    def piece_names(self, parameter: str) -> frozenset[str]:
        """Return the names of the tensors on disk whose rows make the parameter; none where it is not made of rows."""
        if parameter not in self._piece_names:
            made = self.parameters.get(parameter)
            self._piece_names[parameter] = frozenset(piece.name for piece in (made.pieces if made else None) or ())
        return self._piece_names[parameter]

    def is_written_as_in_memory(self, parameter: str) -> bool:
        """Return whether `save_pretrained` writes the rows of a parameter by itself, however it was stored."""
        made = self._conversion.save({parameter: self.facts.shapes[parameter]})
        return all(each.pieces is not None for each in made.values())

    def written(self, memory: Mapping[str, ShapeOnDisk]) -> dict[str, RowMapping]:
        """Return what `save_pretrained` writes for these parameters: tensor name → the rows that it is made of."""
        return self._conversion.save(memory)


def missing(facts: ModelFacts, parameters: Mapping[str, RowMapping]) -> tuple[str, ...]:
    """Return the class's parameters that are neither among those loaded nor tied to one of them."""
    held, tied = parameters.keys(), facts.tied
    sources = {source for target, source in tied.items() if target in held}
    return tuple(
        name
        for name in facts.shapes
        if name not in held | facts.unsaved
        and name not in sources
        and not (name in tied and tied[name] in held | sources)
    )
