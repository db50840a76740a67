"""A text class beside the whole model that a multimodal checkpoint holds, by transformers' own mapping of both.

`AutoModelForCausalLM` makes a text model of some multimodal checkpoints (Qwen3.5, Llama 4, Mllama): the names of its
parameters, and so those of its adapters, are other ones than the whole model's. Both classes say which rows on disk
make each parameter; parameters of the same rows are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from msgspec.structs import replace

from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.models.mapping.model import ModelFacts, RowMapping, ShapeOnDisk
from lora_tool.models.mapping.weight_mapping import WeightMapping


class WholeInTextNames(WeightMapping):
    """The mapping of the whole model, with the text class's names for what the two share.

    So an adapter of the text class finds its modules, its patterns match, and the whole model is written.
    """

    def __init__(self, text: WeightMapping, whole: WeightMapping) -> None:
        """Join the mappings `text` and `whole` of one checkpoint.

        Raises `UnsupportedAdapter` where the text class has a parameter that the whole model makes of other rows.
        """
        self._text, self._whole = text, whole
        self._piece_names = {}
        self._own = _same_rows(text, whole)
        renamed = {name: self._renamed(name) for name in whole.facts.shapes}
        self._originals = {new: name for name, new in renamed.items()}
        if len(self._originals) != len(renamed):
            raise UnsupportedAdapter(
                f"{text.facts.class_name} and {whole.facts.class_name} use one name for two different tensors"
            )
        self.facts = self._renamed_facts(whole.facts)
        self.parameters = {renamed[name]: made for name, made in whole.parameters.items()}
        self.unexpected = whole.unexpected
        self.outside = frozenset(self.facts.shapes.keys() - text.facts.shapes.keys())

    @property
    def tied_by_config(self) -> Mapping[str, str]:
        """Parameter → the one that it is the same as because the config says so, and would not be otherwise."""
        return self._renamed_pairs(self._whole.tied_by_config)

    def left_out_by_peft(self, folder: Path, tensors: Mapping[str, ShapeOnDisk]) -> tuple[str, ...]:
        """Return the LoRA tensors of the adapter in `folder` that PEFT would drop on the text class, with a warning."""
        return self._text.left_out_by_peft(folder, tensors)

    def place(self, disk_name: str) -> str:
        """Return the parameter that the text class would load a tensor of this name into, or a part of."""
        return self._text.place(disk_name)

    def is_written_as_in_memory(self, parameter: str) -> bool:
        """Return whether `save_pretrained` of the whole model writes the rows of a parameter by itself."""
        return self._whole.is_written_as_in_memory(self._originals[parameter])

    def written(self, memory: Mapping[str, ShapeOnDisk]) -> dict[str, RowMapping]:
        """Return what `save_pretrained` of the whole model writes for these parameters."""
        originals = {self._originals[name]: shape for name, shape in memory.items()}
        back = dict(zip(originals, memory, strict=True))
        return {
            name: replace(
                made,
                sources=tuple(back[source] for source in made.sources),
                pieces=None
                if made.pieces is None
                else tuple(replace(piece, name=back[piece.name]) for piece in made.pieces),
            )
            for name, made in self._whole.written(originals).items()
        }

    @cached_property
    def _modules(self) -> Mapping[str, str]:
        """Module of the whole model → the text class's, for those that hold parameters of both."""
        modules: dict[str, str] = {}
        for theirs, ours in self._own.items():
            path, own = theirs, ours
            while path.rpartition(".")[2] == own.rpartition(".")[2] and path not in modules:
                path, own = path.rpartition(".")[0], own.rpartition(".")[0]
                if not path:
                    break
                modules.setdefault(path, own)
        return modules

    def _renamed(self, name: str) -> str:
        """Return a path of the whole model as the text class has it; one that it has not stays as it is."""
        if name in self._own:
            return self._own[name]
        path, rest = name, ""
        while path and path not in self._modules:
            path, _, part = path.rpartition(".")
            rest = f".{part}{rest}"
        return f"{self._modules[path]}{rest}".removeprefix(".") if path else name

    def _renamed_pairs(self, pairs: Mapping[str, str]) -> dict[str, str]:
        return {self._renamed(name): self._renamed(of) for name, of in pairs.items()}

    def _renamed_facts(self, facts: ModelFacts) -> ModelFacts:
        def all_of(names: Iterable[str]) -> frozenset[str]:
            return frozenset(map(self._renamed, names))

        return replace(
            facts,
            shapes={self._renamed(name): shape for name, shape in facts.shapes.items()},
            buffers=all_of(facts.buffers),
            modules=all_of(facts.modules),
            layers=all_of(facts.layers),
            conv1d=all_of(facts.conv1d),
            transposed=all_of(facts.transposed),
            tied=self._renamed_pairs(facts.tied),
            output=None if facts.output is None else self._renamed(facts.output),
            head=None if facts.head is None else self._renamed(facts.head),
            unsaved=all_of(facts.unsaved),
            keep_in_fp32=all_of(facts.keep_in_fp32),
        )


def _same_rows(text: WeightMapping, whole: WeightMapping) -> dict[str, str]:
    """Return parameter of the whole model → the text class's that is made of the same rows."""
    by_rows = {(made.pieces, made.sources, made.transposed): name for name, made in whole.parameters.items()}
    same: dict[str, str] = {}
    for name, made in text.parameters.items():
        theirs = by_rows.get((made.pieces, made.sources, made.transposed))
        if theirs is None:
            raise UnsupportedAdapter(
                f"`{name}` of {text.facts.class_name} is made of {', '.join(made.sources[:3])}, "
                f"and no parameter of {whole.facts.class_name} is made of the same rows"
            )
        same[theirs] = name
    ends = (whole.facts.output, text.facts.output)
    if all(ends):  # tied, and so in no file
        same.setdefault(f"{ends[0]}.weight", f"{ends[1]}.weight")
    return same
