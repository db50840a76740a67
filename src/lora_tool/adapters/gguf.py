"""LoRA in llama.cpp's format GGUF: how it calls the modules of a base, and how the rows of their factors lie.

`adapter.lora.alpha` over the rank of a tensor scales it (`src/llama-adapter.cpp`). A module's factors are
`NAME.weight.lora_a`, [r, in], and `NAME.weight.lora_b`, [out, r], where NAME is the module's in the base's GGUF file;
those of experts are stacked, [experts, r, in] and [experts, out, r], and lora_a of the embedding is transposed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert, field
from msgspec.structs import asdict, replace

from lora_tool.adapters.experts import EXPERT, PROJECTIONS
from lora_tool.checkpoints import AdapterDir
from lora_tool.checkpoints.folders import Folder
from lora_tool.checkpoints.gguf_adapter import adapter_of
from lora_tool.core.errors import BadConfig, Defect
from lora_tool.core.keys import PREFIX, split_layer
from lora_tool.core.tensors import Span, StoredTensor, Tile, TiledSpan
from lora_tool.formats.model_config import ModelConfig
from lora_tool.formats.stored import transposed
from lora_tool.formats.weights import Weights, read_single
from lora_tool.models.ends import is_input
from lora_tool.models.gguf_names import GGUF_WEIGHTS, NAMES, GgufNames

OF_PARAMETER = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""A parameter of fused experts → the matrices of one expert whose rows it has, in their order."""
_OF_EXPERTS = {
    name: f"ffn_{ours}_exps" for table in PROJECTIONS for name, ours in zip(table, ("gate", "up", "down"), strict=True)
}


class GgufLayout(Struct, frozen=True, kw_only=True):
    """How the modules of one base are called and lie in llama.cpp's files."""

    model_type: str
    heads: Mapping[str, int] = field(default_factory=dict)
    """Path inside of a layer → the heads of which its rows are, where they lie in pairs."""
    experts: int = 0
    """How many each mixture has."""

    @property
    def names(self) -> GgufNames:
        return NAMES[self.model_type]

    def name(self, module: str) -> str | None:
        """Return the name of a module, of an expert's matrix that of the stack it is in; None for one that is not known."""
        number, _ = split_layer(module)
        if number is None:
            return self.names.ends.get(module)
        layers, inside = module.split(f".{number}.", 1)
        match = EXPERT.fullmatch(module)
        own = _OF_EXPERTS.get(match["projection"]) if match else self.names.in_layer.get(inside)
        # an adapter of the bare model, or of a multimodal one, has other paths before its layers
        same = layers.rpartition(".")[2] == self.names.layers.rpartition(".")[2]
        return f"blk.{number}.{own}" if own and same else None

    def name_of_path(self, module: str, path: str) -> str | None:
        """Return the name of a module; of a parameter of fused experts, that of its last stack."""
        parameter = path.removeprefix(module).removeprefix(".")
        return self.name(f"{module}.0.{OF_PARAMETER[parameter][-1]}" if parameter in OF_PARAMETER else module)

    def turned(self, module: str, rows: StoredTensor) -> StoredTensor:
        """Return a lora_B, [out, r], with its rows in llama.cpp's order."""
        number, _ = split_layer(module)
        heads = self.heads.get(module.partition(f".{number}.")[2])
        return rows if heads is None else in_pairs(rows, heads)

    def back(self, module: str, rows: StoredTensor) -> StoredTensor:
        """Return what `turned` was given: of each head the even rows, then the odd ones."""
        number, _ = split_layer(module)
        heads = self.heads.get(module.partition(f".{number}.")[2])
        if heads is None:
            return rows
        count = rows.shape[0] // heads
        order = (head * count + row for head in range(heads) for at in range(2) for row in range(at, count, 2))
        width = rows.nbytes // rows.shape[0]
        return StoredTensor(
            spec=rows.spec, spans=tuple(span for row in order for span in rows.part(row * width, width))
        )

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON data, for the manifest."""
        return asdict(self)

    @classmethod
    def of_json(cls, data: object, path: Path) -> GgufLayout:
        """Return the layout in the manifest `path`. Raises `BadConfig`."""
        try:
            found = convert(data, cls)
        except ValidationError as error:
            raise BadConfig.of(path, Defect.BAD_FIELD, str(error), "gguf") from None
        if found.model_type not in NAMES or 0 in found.heads.values():
            raise BadConfig.of(path, Defect.BAD_FIELD, f"expected one of {', '.join(NAMES)}, and their heads", "gguf")
        return found


def layout_of(config: ModelConfig) -> GgufLayout | None:
    """Return how the modules of a base with this config lie; None for a model type that is not in the table."""
    inner = config.raw.get("text_config")
    raw = inner if isinstance(inner, dict) else config.raw
    model_type = str(raw.get("model_type"))
    if model_type not in NAMES:
        return None
    sizes = {name: value for name, value in raw.items() if type(value) is int}
    return GgufLayout(
        model_type=model_type,
        heads={
            path: sizes.get(name, sizes.get("num_attention_heads", 0))
            for path, name in NAMES[model_type].in_pairs.items()
        },
        experts=sizes.get("num_local_experts", sizes.get("num_experts", 0)),
    )


def in_pairs(tensor: StoredTensor, heads: int) -> StoredTensor:
    """Return a matrix with the rows of each head's two halves in turn: reshape(heads, 2, d / 2, …).swapaxes(1, 2).

    Raises ValueError where the rows are not those of so many heads with two halves.
    """
    rows, width = tensor.shape[0], tensor.nbytes // max(1, tensor.shape[0])
    if not heads or rows % (2 * heads):
        raise ValueError(f"`{tensor.name}` has {rows} rows, which are not two halves of {heads} heads")
    half = rows // heads // 2 * width
    spans: list[Span] = []
    for head in range(heads):
        pieces = [tuple(tensor.part((2 * head + at) * half, half)) for at in range(2)]
        if any(len(piece) != 1 or type(piece[0]) is not Span for piece in pieces):
            raise ValueError(f"`{tensor.name}` lies in pieces")
        (first,), (second,) = pieces
        halves = enumerate((first, second))
        tiles = tuple(Tile(each.path, each.offset, at * width, width) for at, each in halves)
        spans.append(TiledSpan(path=first.path, offset=first.offset, nbytes=2 * half, tiles=tiles, row_bytes=2 * width))
    return StoredTensor(spec=tensor.spec, spans=tuple(spans))


# Read back as the PEFT adapter that it stands for.


class GgufAdapter(Struct, frozen=True, kw_only=True):
    """An adapter in a GGUF file."""

    adapter: AdapterDir
    """The PEFT adapter that it stands for: under PEFT's names the tensors of the file, cut and in PEFT's order."""
    stored: Weights
    """The tensors as the file has them."""


def is_gguf(folder: Folder) -> bool:
    """Return whether the folder holds an adapter that was written for llama.cpp."""
    return GGUF_WEIGHTS in folder.files


def read_gguf(folder: Folder, layout: GgufLayout, modules: Iterable[str]) -> GgufAdapter:
    """Return the adapter in the folder, of which these `modules` have LoRA; fused experts are left out.

    Problems of the file are in the adapter's `problems`.
    """
    stored = read_single(folder.root / GGUF_WEIGHTS)
    table = dict(tensor for module in modules for tensor in _of_module(module, layout, stored))
    return GgufAdapter(adapter=adapter_of(folder, stored, table), stored=stored)


def _of_module(module: str, layout: GgufLayout, stored: Weights) -> Iterator[tuple[str, StoredTensor]]:
    """Yield PEFT's names and factors of one module."""
    a, b = (stored.tensors.get(f"{layout.name(module)}.weight.lora_{part}") for part in "ab")
    if a is None or b is None:
        return
    if match := EXPERT.fullmatch(module):
        a, b = (_of_expert(each, int(match["number"])) for each in (a, b))
    if is_input(module):
        yield f"{PREFIX}{module}.lora_embedding_A", transposed(a)
        yield f"{PREFIX}{module}.lora_embedding_B", b
    else:
        yield f"{PREFIX}{module}.lora_A.weight", a
        yield f"{PREFIX}{module}.lora_B.weight", layout.back(module, b)


def _of_expert(stack: StoredTensor, number: int) -> StoredTensor:
    each = stack.nbytes // stack.shape[0]
    return StoredTensor(spec=replace(stack.spec, shape=stack.shape[1:]), spans=tuple(stack.part(number * each, each)))
