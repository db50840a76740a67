"""What `WeightMapping` says of a mixture of experts that the table of them knows, told without transformers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

from msgspec import Struct

from lora_tool.core.errors import require_packages
from lora_tool.core.tensors import DType
from lora_tool.formats.model_config import ModelConfig
from lora_tool.models.mapping.model import ModelFacts, RowMapping, RowSlice, ShapeOnDisk, row_count
from lora_tool.models.mapping.order import in_natural_order
from lora_tool.models.mixtures import CORRECTION, EMBEDDINGS, EXPERTS, LAYERS, OUTPUT, ROUTER, STACKS, mixtures_of

_STACK_OF = {matrix: stack for stack, matrices in STACKS.items() for matrix in matrices}
_OF_AN_EXPERT = re.compile(rf"(.+\.{re.escape(EXPERTS)})\.\d+\.({'|'.join(_STACK_OF)})\.weight")
_LAYER = re.compile(re.escape(LAYERS) + r"\.([0-9]{1,9})\.")
_MATRIX = 2


class MixtureMapping(Struct, frozen=True, kw_only=True):
    """The names of a causal LM in memory and on disk, where the base has all of its tensors as the config means them."""

    config: ModelConfig
    dtype: DType
    """The type that the model is loaded in."""
    facts: ModelFacts
    parameters: Mapping[str, RowMapping]
    parts: Mapping[str, Mapping[str, ShapeOnDisk]]
    """Parameter → the tensors on disk that are its rows, in their order: of a stack the experts' matrices."""
    unexpected: tuple[str, ...]
    """The tensors of layers beyond the config's, which transformers leaves out."""
    outside: frozenset[str] = frozenset()
    missing: tuple[str, ...] = ()

    @property
    def tied_by_config(self) -> Mapping[str, str]:
        """Parameter → the one that it is the same as because the config says so, and would not be otherwise."""
        return self.facts.tied

    def left_out_by_peft(self, folder: Path, tensors: Mapping[str, ShapeOnDisk]) -> tuple[str, ...]:
        """Return the LoRA tensors of the adapter in `folder` that PEFT would drop with a warning. Imports PEFT."""
        require_packages(("torch", "transformers"), extra="merge")
        from lora_tool.models.mapping import meta
        from lora_tool.models.mapping.peft_view import dropped_by_peft  # PEFT's import is slow and seldom needed

        dtype = meta.DTYPES.get(self.dtype, meta.DTYPES[DType.F32])
        return dropped_by_peft(meta.build(self.config, self.facts.class_name, dtype), folder, tensors)

    def place(self, disk_name: str) -> str:
        """Return the parameter that a tensor of this name would be loaded into, or a part of."""
        found = _OF_AN_EXPERT.fullmatch(disk_name)
        return f"{found[1]}.{_STACK_OF[found[2]]}" if found else disk_name

    def piece_names(self, parameter: str) -> AbstractSet[str]:
        """Return the names of the tensors on disk whose rows make the parameter."""
        return self.parts[parameter].keys() if parameter in self.parameters else frozenset()

    def is_written_as_in_memory(self, parameter: str) -> bool:
        """Return whether `save_pretrained` writes the rows of a parameter by itself, which it does with all."""
        return parameter in self.facts.shapes

    def written(self, memory: Mapping[str, ShapeOnDisk]) -> dict[str, RowMapping]:
        """Return what `save_pretrained` writes for these parameters: tensor name → the rows that it is made of."""
        made: dict[str, RowMapping] = {}
        for name in in_natural_order(memory):
            start = 0
            for part, shape in _parts_of(name, memory[name]).items():
                rows = row_count(shape)
                pieces = (RowSlice(name=name, start=start, rows=rows),)
                made[part] = RowMapping(shape=shape, pieces=pieces, sources=(name,))
                start += rows
        return made


def mixture_mapping(config: ModelConfig, disk: Mapping[str, ShapeOnDisk], dtype: DType) -> MixtureMapping | None:
    """Return where the parameters of the causal LM that `config` names lie among the tensors `disk`.

    `dtype` is the type that the model is loaded in. None where transformers must be asked: for a class that no table
    knows, and for a base that lacks one of its tensors, or has others than further layers.
    """
    tied = _tied(config)
    for row in mixtures_of(config.model_type or ""):
        memory = row.shapes(config) if config.architectures == (row.causal_lm,) else None
        if memory is None or tied is None or _count_of_experts(memory) > len(disk):
            continue
        parts = {name: _parts_of(name, shape) for name, shape in memory.items()}
        of_class = {name: shape for rows in parts.values() for name, shape in rows.items()}
        beyond = in_natural_order(disk.keys() - of_class.keys())
        if _are_there(of_class, disk, tied) and all(_is_beyond(name, config) for name in beyond):
            return MixtureMapping(
                config=config,
                dtype=dtype,
                facts=_facts(row.causal_lm, memory, tied, dtype),
                parameters={
                    name: _of_rows(memory[name], parts[name])
                    for name in in_natural_order(memory)
                    if _is_stack(name) or name in disk
                },
                parts=parts,
                unexpected=tuple(beyond),
            )
    return None


def _count_of_experts(memory: Mapping[str, ShapeOnDisk]) -> int:
    """Return the number of experts in all layers, which a config may claim to be any."""
    return sum(shape[0] for name, shape in memory.items() if _is_stack(name))


def _is_stack(name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return leaf in STACKS and path.endswith(f".{EXPERTS}")


def _parts_of(name: str, shape: ShapeOnDisk) -> dict[str, ShapeOnDisk]:
    """Return the tensors on disk that a parameter is made of, in the order of its rows."""
    if not _is_stack(name):
        return {name: shape}
    path, _, leaf = name.rpartition(".")
    experts, rows, width = shape
    matrices = STACKS[leaf]
    each = (rows // len(matrices), width)
    return {f"{path}.{expert}.{matrix}.weight": each for expert in range(experts) for matrix in matrices}


def _of_rows(shape: ShapeOnDisk, parts: Mapping[str, ShapeOnDisk]) -> RowMapping:
    pieces = tuple(RowSlice(name=name, start=0, rows=row_count(part)) for name, part in parts.items())
    return RowMapping(shape=shape, pieces=pieces, sources=tuple(parts))


def _tied(config: ModelConfig) -> dict[str, str] | None:
    """Return the config's ties, parameter → the one it shares; None where `tie_word_embeddings` is not a boolean."""
    ties = config.raw.get("tie_word_embeddings", False)
    return ({f"{OUTPUT}.weight": f"{EMBEDDINGS}.weight"} if ties else {}) if isinstance(ties, bool) else None


def _are_there(of_class: Mapping[str, ShapeOnDisk], disk: Mapping[str, ShapeOnDisk], tied: Mapping[str, str]) -> bool:
    """Return whether the tensors of the class are on disk with their shapes; one that is tied may be absent."""
    return all(disk.get(name) == shape or (name in tied and name not in disk) for name, shape in of_class.items())


def _is_beyond(name: str, config: ModelConfig) -> bool:
    layer = _LAYER.match(name)
    return layer is not None and int(layer[1]) >= (config.num_hidden_layers or 0)


def _facts(class_name: str, memory: Mapping[str, ShapeOnDisk], tied: Mapping[str, str], dtype: DType) -> ModelFacts:
    paths = {name.rpartition(".")[0] for name in memory}
    corrections = frozenset(name for name in memory if name.endswith(f".{CORRECTION}"))
    return ModelFacts(
        class_name=class_name,
        shapes=memory,
        buffers=corrections,
        modules=frozenset(parent for path in paths for parent in _and_above(path)),
        layers=frozenset(
            name.removesuffix(".weight")
            for name, shape in memory.items()
            if len(shape) == _MATRIX and not name.endswith(f".{ROUTER}.weight")
        ),
        conv1d=frozenset(),
        transposed=frozenset(),
        tied=tied,
        output=OUTPUT,
        tokens_of_both=EMBEDDINGS if tied else None,
        head=None,
        unsaved=frozenset(),
        keep_in_fp32=corrections if dtype in (DType.BF16, DType.F16) else frozenset(),
    )


def _and_above(path: str) -> list[str]:
    """Return a path and those of the modules around it, up to the model itself."""
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]
