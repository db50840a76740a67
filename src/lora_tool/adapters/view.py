"""One view of an adapter: its tensors by what they do to a model, grouped once for all callers.

The view describes and never judges: a factor that is missing is None, two tensors for one place are the first and a
repeat. It is made from names and headers alone.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.adapters.experts import parameter_of
from lora_tool.checkpoints import AdapterDir
from lora_tool.core.keys import LINEAR_FACTORS, PREFIX, AdapterKey, Part, parse_all, without_numbers, without_wrapped
from lora_tool.core.records import kept
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.adapter_config import FILE_NAME, AdapterConfig
from lora_tool.models.ends import MATRIX

FACTORS = frozenset({Part.LORA_A, Part.LORA_B, Part.EMBEDDING_A, Part.EMBEDDING_B})
"""The parts that hold A and B, and the bias of B."""
LAYER_PARTS = FACTORS | {Part.MAGNITUDE}
"""Everything that belongs to the LoRA of a module."""

Found = TypeVar("Found")
Place: TypeAlias = tuple[Part, str | None]
"""Part and leaf: where in its layer a tensor stands. The magnitude's leaf is None, under whatever name it was saved."""

_FROZEN = frozenset({Part.BASE_LAYER, Part.TOKENS_BASE})
_BASE_LAYER = f".{Part.BASE_LAYER.value}"
_LINEAR = frozenset({(Part.LORA_A, "weight"), (Part.LORA_B, "weight"), (Part.LORA_B, "bias"), (Part.MAGNITUDE, None)})
_EMBEDDING = frozenset({(Part.EMBEDDING_A, None), (Part.EMBEDDING_B, None), (Part.MAGNITUDE, None)})


class LoraLayer(Struct, frozen=True, kw_only=True, eq=False):
    """The LoRA tensors of one module. `module` is its path in the model, without anything that was put before it."""

    module: str
    adapter_name: str | None
    """The adapter's name, where the tensors' names still have it."""
    parts: Mapping[Place, StoredTensor]
    target: str
    """The module as the base knows it: PEFT nests the parameters of one module as ``experts.base_layer``."""
    path: str
    """What the config's patterns are matched with: the target, or the parameter of it that is changed."""
    scaling: float | None
    """What B·A is multiplied by; None where the config cannot be read."""
    kind: int
    """Layers of one kind differ in the numbers in their paths and in their values alone: the config treats them alike,
    and their tensors have the same types and shapes.
    """
    a: StoredTensor | None
    """The matrix that maps to the rank: (r, in); (r, vocabulary) of an embedding."""
    b: StoredTensor | None
    """The matrix that maps from the rank: (out, r)."""
    pair: tuple[StoredTensor, StoredTensor] | None
    """A and B, where both are there, hold values, and are matrices or the kernels of a convolution."""
    bias: StoredTensor | None
    """The bias of lora_B, of `lora_bias` adapters."""
    magnitude: StoredTensor | None
    """DoRA's vector of column norms."""
    embedding: bool
    """Whether the module is an embedding, whose A, not B, begins as zeros."""

    @property
    def zero_initialised(self) -> StoredTensor | None:
        """The factor that is zero before training and must not be so afterwards."""
        return self.a if self.embedding else self.b

    @property
    def factors(self) -> tuple[StoredTensor, ...]:
        """A and B, those that are there."""
        return tuple(filter(None, (self.a, self.b)))

    @property
    def strays(self) -> tuple[StoredTensor, ...]:
        """Those of its tensors that PEFT's layer, linear or embedding, does not have: the bias of a lora_A."""
        places = self.parts.keys()
        strays: AbstractSet[Place] = min(places - _LINEAR, places - _EMBEDDING, key=len)
        return tuple(map(self.parts.__getitem__, strays))

    @property
    def any_tensor(self) -> StoredTensor:
        """The first of its tensors, to name the layer by."""
        return next(iter(self.parts.values()))

    @property
    def rank(self) -> int | None:
        """The rank that both factors have; None where they disagree. Grouped convolutions split B's."""
        pair = self.pair
        if pair is None:
            return None
        a, b = pair
        grouped = len(a.shape) > MATRIX and b.shape[1] and a.shape[0] % b.shape[1] == 0
        return a.shape[0] if a.shape[0] == b.shape[1] or grouped else None


class WholeTensor(Struct, frozen=True, kw_only=True, eq=False):
    """A tensor of an adapter that is in no LoRA layer, as it stands in the file."""

    tensor: StoredTensor
    part: Part
    module: str
    """Its module's path in the base, without anything that was put before or into it."""
    leaf: str | None

    @property
    def name(self) -> str:
        """The model's own name of the tensor: ``score.weight``."""
        return ".".join(filter(None, (self.module, self.leaf)))


class TrainedTokens(Struct, frozen=True, kw_only=True, eq=False):
    """Single rows of an embedding that were trained: [rows, columns], and where each belongs."""

    rows: StoredTensor
    indices: tuple[int, ...]

    @property
    def of_none(self) -> bool:
        """Whether PEFT was given a list of no tokens, and saved a matrix of no rows."""
        return not self.indices and self.rows.shape[:1] == (0,) != self.rows.shape  # ZeRO-3 leaves [0]


class AdapterView(Struct, frozen=True, kw_only=True, eq=False):
    """The tensors of an adapter, by their effect on a model."""

    adapter: AdapterDir
    config: AdapterConfig
    """PEFT's defaults where the file could not be read."""
    paths: Mapping[str, str]
    """Module path as the tensors' names have it → in the model, without anything that was put before it."""
    layers: tuple[LoraLayer, ...]
    """One for each module, and for each adapter's name where a file holds several."""
    kinds: tuple[LoraLayer, ...]
    """The first layer of each kind: of a hundred thousand layers of experts there are a dozen."""
    whole: tuple[WholeTensor, ...]
    """Every tensor that is in no layer, in the order of the file."""
    saved: Mapping[str, StoredTensor]
    """The model's own name → what replaces or adds to the base's: plain tensors, `modules_to_save`, trained biases."""
    frozen: Mapping[str, StoredTensor]
    """The model's own name → the frozen tensor under LoRA or trained tokens, where the adapter carries it."""
    plain: frozenset[str]
    """The model's own names of the plain tensors."""
    tokens: Mapping[str, TrainedTokens]
    """Embedding → its rows that were trained by themselves."""
    repeats: Mapping[str, StoredTensor]
    """Tensor name → the tensor that is in the file for the same place already."""

    def found(self, look: Callable[[LoraLayer], Iterable[Found]]) -> Iterator[Found]:
        """Yield what `look` finds in each layer, in their order; a kind whose first layer gives nothing is skipped.

        `look` may depend on the headers of the layer's tensors, on its settings in the config, and on its path but for
        the numbers: layers of one kind differ in nothing else.
        """
        fruitful = {first.kind for first in self.kinds if next(iter(look(first)), None) is not None}
        for layer in self.layers if fruitful else ():
            if layer.kind in fruitful:
                yield from look(layer)

    def parts(self, *parts: Part) -> Iterator[WholeTensor]:
        """Yield the tensors of these parts that are in no layer, in the order of the file."""
        for item in self.whole:
            if item.part in parts:
                yield item


@kept
def view_of(adapter: AdapterDir) -> AdapterView:
    """Return the view of an opened adapter, whether or not it is sound: made once, and the same for everybody."""
    config = adapter.config or AdapterConfig(path=adapter.root / FILE_NAME)
    tensors = adapter.tensors
    paths: dict[str, str] = {}
    held: dict[tuple[str, str | None], dict[Place, StoredTensor]] = defaultdict(dict)
    repeats: dict[str, StoredTensor] = {}
    whole: list[WholeTensor] = []
    for name, key in adapter.keys.items():
        if key.module not in paths:
            paths[key.module] = bare_path(key.module)
        tensor, part, module = tensors[name], key.part, paths[key.module]
        if part in LAYER_PARTS:
            # PEFT keeps the magnitude in a module of its own, and saves an embedding's under both names
            place = (part, None if part is Part.MAGNITUDE else key.leaf)
            first = held[module, key.adapter_name].setdefault(place, tensor)
            if first is not tensor:
                repeats[name] = first
        else:
            whole.append(WholeTensor(tensor=tensor, part=part, module=without_wrapped(module), leaf=key.leaf))
    layers = tuple(_layers(held, None if adapter.config is None else config))
    saved = _saved(whole, config, repeats)
    frozen: dict[str, StoredTensor] = {}
    tokens: dict[str, TrainedTokens] = {}
    for item in whole:
        if item.part is Part.TOKENS_DELTA:
            tokens[item.module] = TrainedTokens(rows=item.tensor, indices=config.tokens(item.module))
        elif item.part in _FROZEN and item.tensor.name not in repeats and saved.get(item.name) is not item.tensor:
            frozen[item.name] = item.tensor
    return AdapterView(
        adapter=adapter,
        config=config,
        paths=paths,
        layers=layers,
        kinds=tuple({layer.kind: layer for layer in reversed(layers)}.values()),
        whole=tuple(whole),
        saved=saved,
        frozen=frozen,
        plain=frozenset(item.name for item in whole if item.part is Part.PLAIN),
        tokens=tokens,
        repeats=repeats,
    )


def _layers(
    held: Mapping[tuple[str, str | None], Mapping[Place, StoredTensor]], config: AdapterConfig | None
) -> Iterator[LoraLayer]:
    alike = config is not None and config.ignores_numbers
    kinds: dict[object, int] = {}
    scalings: dict[str, float] = {}
    together: Counter[tuple[str, str | None]] = Counter()  # how many parameters of each module have LoRA
    if config is not None and config.target_parameters:
        together.update((module.replace(_BASE_LAYER, ""), name) for module, name in held)
    for (module, name), parts in held.items():
        form = without_numbers(module) if alike else module
        target = module.replace(_BASE_LAYER, "") if _BASE_LAYER in module else module
        path = _path(module, target, config, together[target, name]) if together and config else target
        if config is not None and form not in scalings:
            scalings[form] = config.scaling(path)
        kind = form, name, tuple((place, tensor.dtype, tensor.shape) for place, tensor in parts.items())
        a = parts.get((Part.LORA_A, "weight")) or parts.get((Part.EMBEDDING_A, None))
        b = parts.get((Part.LORA_B, "weight")) or parts.get((Part.EMBEDDING_B, None))
        fits = a is not None and b is not None and a.nbytes and b.nbytes and len(a.shape) == len(b.shape) >= MATRIX
        yield LoraLayer(
            module=module,
            adapter_name=name,
            parts=parts,
            target=target,
            path=path,
            scaling=scalings.get(form),
            kind=kinds.setdefault(kind, len(kinds)),
            a=a,
            b=b,
            pair=(a, b) if a is not None and b is not None and fits else None,
            bias=parts.get((Part.LORA_B, "bias")),
            magnitude=parts.get((Part.MAGNITUDE, None)),
            embedding=(Part.EMBEDDING_A, None) in parts or (Part.EMBEDDING_B, None) in parts,
        )


def _path(module: str, target: str, config: AdapterConfig, count: int) -> str:
    if not config.target_parameters or config.targets(target):
        return target
    nested = module.count(_BASE_LAYER)
    found = parameter_of(target, config.target_parameters, nested=nested, count=count)
    return target if found is None else f"{target}.{found}"


def _saved(
    whole: list[WholeTensor], config: AdapterConfig, repeats: dict[str, StoredTensor]
) -> dict[str, StoredTensor]:
    """Return the whole tensors by the model's names; a second one for the same name goes into `repeats`.

    A plain name goes first: it is the one that PEFT loads.
    """
    saved: dict[str, StoredTensor] = {}
    plain, copies = [], []
    for item in whole:
        if item.part is Part.SAVED_MODULE:
            copies.append(item)
        elif item.part is Part.PLAIN or (
            item.part is Part.BASE_LAYER and item.leaf == "bias" and config.bias != "none"
        ):
            plain.append(item)
    for item in (*plain, *copies):
        first = saved.setdefault(item.name, item.tensor)
        if first is not item.tensor:
            repeats[item.tensor.name] = first
    return saved


# The beginnings of tensor names: what PEFT, trainers and wrappers put before and into a module path.


def bare_path(module: str) -> str:
    """Return the module path of a parsed name without what PEFT and DistributedDataParallel put before it."""
    path = module.rpartition(PREFIX)[2]
    while path.startswith("module."):
        path = path.removeprefix("module.")
    return path


def is_bare(name: str, key: AdapterKey) -> bool:
    """Return whether a name, parsed as `key`, is PEFT's without what PEFT puts before a path."""
    return key.module == bare_path(key.module) and name == key.canonical.removeprefix(PREFIX)


def with_prefix(adapter: AdapterDir) -> AdapterDir:
    """Return the adapter under PEFT's names, where all of its names are bare; any other as it is."""
    if not all(is_bare(name, key) for name, key in adapter.keys.items()):
        return adapter
    tensors = {
        f"{PREFIX}{name}": replace(tensor, spec=replace(tensor.spec, name=f"{PREFIX}{name}"))
        for name, tensor in adapter.tensors.items()
    }
    return replace(adapter, weights=replace(adapter.weights, tensors=tensors), keys=parse_all(tensors))


def drift(key: AdapterKey) -> str | None:
    """Return how the beginning of a tensor's name differs from the form that PEFT loads; None if it does not."""
    if not key.prefixed:
        return f"does not begin with `{PREFIX}`"
    if key.wrapper:
        return f"has `{key.wrapper}.` in it, which torch.compile, FSDP or checkpointing put there"
    if PREFIX in key.module:
        return f"has `{PREFIX}` twice"
    if key.part in LINEAR_FACTORS and key.leaf == "weight" and not key.text.endswith(".weight"):
        return "does not end with `.weight`"
    return "has `module.` in it, which DistributedDataParallel put there" if key.module.startswith("module.") else None


# LoRA with one factor of a pair missing: PEFT loads the other, and initialises the missing one.


_ZEROS, _NOISE = "zeros", "noise"
_HALF_SAVED = "use another step: a save that was interrupted, or of one pipeline stage, has a part of the tensors"
_OTHER_HALF = {
    Part.LORA_A: (Part.LORA_B, _ZEROS),
    Part.LORA_B: (Part.LORA_A, _NOISE),
    Part.EMBEDDING_A: (Part.EMBEDDING_B, _NOISE),
    Part.EMBEDDING_B: (Part.EMBEDDING_A, _ZEROS),
}
"""Factor → the other of its pair, and what PEFT puts there where it is missing."""


class HalfPair(NamedTuple):
    """A pair that is not whole."""

    name: str
    """A tensor of it that is there."""
    lacking: tuple[str, ...]
    """What is not there: one factor, or both where only a magnitude is."""
    instead: str
    """What PEFT puts in its place."""
    hint: str | None = None
    """What to do, where that depends on the folder."""

    @property
    def message(self) -> str:
        """The message of the finding about the tensor."""
        are = "are" if self.lacking[1:] else "is"
        return f"its {' and '.join(self.lacking)} {are} missing, and PEFT would put {self.instead} there"


def half_pair_in(layer: LoraLayer) -> Iterator[HalfPair]:
    """Yield the pair of the layer if it is not whole."""
    if layer.a is None or layer.b is None:
        lacking = tuple(part for part, factor in (("lora_A", layer.a), ("lora_B", layer.b)) if factor is None)
        name = (layer.a or layer.b or layer.any_tensor).name
        yield HalfPair(name, lacking, _ZEROS if layer.zero_initialised is None else _NOISE)


def half_pairs_among(parsed: Mapping[str, AdapterKey]) -> Iterator[HalfPair]:
    """Yield the pairs with only one factor in a checkpoint whose names are `parsed`."""
    held = {(key.adapter_name, key.module, key.part) for key in parsed.values()}
    for name, key in parsed.items():
        other, instead = _OTHER_HALF.get(key.part, (key.part, ""))
        if (key.adapter_name, key.module, other) not in held:
            yield HalfPair(name, (other.value,), instead, _HALF_SAVED)
