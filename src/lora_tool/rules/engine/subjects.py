"""What the rules look at: an opened folder, and for an adapter its layers, gathered once for all rules."""

from __future__ import annotations

import enum
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lora_tool.architectures import Architecture
from lora_tool.checkpoint import AdapterDir, Checkpoint, ModelDir, RunDir
from lora_tool.choices import Choice
from lora_tool.errors import Problem
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.keys import PREFIX, WRAPPERS, AdapterKey, Part
from lora_tool.rules.engine.scan import Scans
from lora_tool.rules.engine.scan_model import WeightScan
from lora_tool.tensors import StoredTensor, TensorSpec, TensorTable

_WRAPPERS = re.compile(rf"(?:^|(?<=\.))({'|'.join(sorted(WRAPPERS))})\.")
_LAYER_PARTS = frozenset({Part.LORA_A, Part.LORA_B, Part.EMBEDDING_A, Part.EMBEDDING_B, Part.MAGNITUDE})


@enum.unique
class Server(Choice):
    """What an adapter is to be served with, unmerged."""

    PEFT = "peft"
    VLLM = "vllm"
    SGLANG = "sglang"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An opened folder of any kind. Its scans are kept, so that no weight is read twice."""

    checkpoint: Checkpoint
    scans: Scans = field(default_factory=Scans, compare=False)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """What was wrong with the files when the folder was opened."""
        return self.checkpoint.problems

    @property
    def kind(self) -> str:
        """What the folder is, in the words of reports."""
        return str(self.checkpoint.kind)

    @property
    def home(self) -> str:
        """The path of a finding that names none: the weights file of an adapter, else the folder."""
        return str(self.checkpoint.root)

    @property
    def tensors(self) -> TensorTable:
        """The tensors whose headers were read; none for the folders of rank files."""
        return self.checkpoint.tensors if isinstance(self.checkpoint, AdapterDir | ModelDir) else {}

    def scan(self, tensor: StoredTensor) -> WeightScan:
        """Return what the tensor's values are like, reading them the first time. Raises as `Scans.of`."""
        return self.scans.of(tensor, self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSubject(Subject):
    """A run folder without finished weights, and those of its checkpoints that could be opened."""

    checkpoint: RunDir
    inner: tuple[Checkpoint, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSubject(Subject):
    """A model folder."""

    checkpoint: ModelDir
    num_labels: int | None = None
    task: str | None = None

    @property
    def expected(self) -> Mapping[str, TensorSpec] | None:
        """The tensors that the folder should hold, by its manifest; None where it has none."""
        manifest = self.checkpoint.manifest
        return None if manifest is None else manifest.tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The LoRA tensors of one module. `module` is its path in the model, without anything that was put before it."""

    module: str
    parts: Mapping[tuple[Part, str | None], StoredTensor]
    a: StoredTensor | None = field(init=False, repr=False, compare=False)
    """The matrix that maps to the rank: (r, in); (r, vocabulary) of an embedding."""
    b: StoredTensor | None = field(init=False, repr=False, compare=False)
    """The matrix that maps from the rank: (out, r)."""
    target: str = field(init=False, repr=False, compare=False)
    """The module as the base knows it: PEFT nests the parameters of one module as ``experts.base_layer``."""

    def __post_init__(self) -> None:
        # a dozen rules ask a hundred thousand layers for them
        parts = self.parts
        object.__setattr__(self, "a", parts.get((Part.LORA_A, "weight")) or parts.get((Part.EMBEDDING_A, None)))
        object.__setattr__(self, "b", parts.get((Part.LORA_B, "weight")) or parts.get((Part.EMBEDDING_B, None)))
        object.__setattr__(self, "target", self.module.replace(".base_layer", ""))

    @property
    def bias(self) -> StoredTensor | None:
        """The bias of lora_B, of `lora_bias` adapters."""
        return self.parts.get((Part.LORA_B, "bias"))

    @property
    def magnitude(self) -> StoredTensor | None:
        """DoRA's vector of column norms."""
        return self.parts.get((Part.MAGNITUDE, None)) or self.parts.get((Part.MAGNITUDE, "weight"))

    @property
    def embedding(self) -> bool:
        """Whether the module is an embedding, whose A, not B, begins as zeros."""
        return (Part.EMBEDDING_A, None) in self.parts or (Part.EMBEDDING_B, None) in self.parts

    @property
    def zero_initialised(self) -> StoredTensor | None:
        """The factor that is zero before training and must not be so afterwards."""
        return self.a if self.embedding else self.b

    @property
    def pair(self) -> tuple[StoredTensor, StoredTensor] | None:
        """A and B, where both are there, hold values, and are matrices or the kernels of a convolution."""
        a, b = self.a, self.b
        if a is None or b is None or not (a.spec.numel and b.spec.numel):
            return None
        return (a, b) if len(a.shape) == len(b.shape) >= 2 else None  # noqa: PLR2004 - matrices

    @property
    def rank(self) -> int | None:
        """The rank that both factors have; None where they disagree. Grouped convolutions split B's."""
        pair = self.pair
        if pair is None:
            return None
        a, b = pair
        grouped = len(a.shape) > 2 and b.shape[1] and a.shape[0] % b.shape[1] == 0  # noqa: PLR2004
        return a.shape[0] if a.shape[0] == b.shape[1] or grouped else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseMatch:
    """A base model whose tensor names mean the adapter's modules: `strip` taken off a module path, `add` put before."""

    base: ModelDir
    arch: Architecture
    strip: str = ""
    add: str = ""

    def name(self, module: str) -> str:
        """Return the module path as the base's files have it."""
        return self.add + module.removeprefix(self.strip)

    def tensor(self, module: str, leaf: str = "weight") -> StoredTensor | None:
        """Return the base's tensor of the module, None where there is none."""
        return self.base.tensors.get(f"{self.name(module)}.{leaf}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSubject(Subject):
    """An adapter folder, its layers and plain tensors by module path, and the base it is compared with."""

    checkpoint: AdapterDir
    config: AdapterConfig
    """PEFT's defaults where the file could not be read; rules that need the config do not run then."""
    layers: tuple[Layer, ...]
    paths: Mapping[str, str]
    """Tensor name → the path of its module in the model, without anything that was put before it."""
    base: ModelDir | None = None
    match: BaseMatch | str | None = None
    """How the base names the modules; a sentence where names cannot tell; None without a base."""
    num_labels: int | None = None
    task: str | None = None
    servers: frozenset[Server] = frozenset()
    """What the adapter must be fit for (`--for`)."""

    @property
    def why_no_match(self) -> str | None:
        """Why names cannot tell which of the base's tensors the adapter means; None where they can."""
        return self.match if isinstance(self.match, str) else None

    @property
    def keys(self) -> Mapping[str, AdapterKey]:
        """Tensor name → its parsed form."""
        return self.checkpoint.keys

    @property
    def home(self) -> str:
        """The file that holds the tensors."""
        return next((str(file.path) for file in self.checkpoint.weights.files), str(self.checkpoint.root))

    @property
    def config_path(self) -> str:
        """The path of `adapter_config.json`."""
        return str(self.config.path)

    def plain(self) -> Iterator[tuple[StoredTensor, str, AdapterKey]]:
        """Yield the tensors of the model itself that the adapter carries: tensor, module path, key."""
        for name, key in self.keys.items():
            if key.part is Part.PLAIN:
                yield self.tensors[name], self.paths[name], key

    def is_reward(self) -> bool:
        """Whether a classification or reward model is expected: by its task type, or asked for."""
        return self.config.task_type == "SEQ_CLS" or self.task in ("reward", "seq-cls")


def bare_path(module: str) -> str:
    """Return a module path without the prefixes that PEFT, torch.compile, FSDP and DDP put before and into it."""
    path = _WRAPPERS.sub("", module)
    path = path.rpartition(PREFIX)[2]
    while path.startswith("module."):
        path = path.removeprefix("module.")
    return path


def drift(key: AdapterKey) -> str | None:
    """Return what is wrong with the beginning of a tensor's name, None for the form that PEFT loads."""
    if not key.prefixed:
        return f"does not begin with `{PREFIX}`"
    path = key.module
    wrapper = _WRAPPERS.search(path)
    if wrapper:
        return f"has `{wrapper[0]}` in it, which torch.compile, FSDP or checkpointing put there"
    if PREFIX in path:
        return f"has `{PREFIX}` twice"
    return "has `module.` in it, which DistributedDataParallel put there" if path.startswith("module.") else None


def layers_of(adapter: AdapterDir, paths: Mapping[str, str]) -> tuple[Layer, ...]:
    """Return the LoRA layers of an adapter, each adapter name's for itself."""
    parts: dict[tuple[str, str | None], dict[tuple[Part, str | None], StoredTensor]] = defaultdict(dict)
    for name, key in adapter.keys.items():
        if key.part in _LAYER_PARTS:
            parts[paths[name], key.adapter_name].setdefault((key.part, key.leaf), adapter.tensors[name])
    return tuple(Layer(module=module, parts=found) for (module, _), found in parts.items())
