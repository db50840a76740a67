"""The words for folders: what each kind of checkpoint holds, as frozen data."""

from __future__ import annotations

import enum
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_tool import keys
from lora_tool.display import shortened
from lora_tool.errors import NotACheckpoint, Problem
from lora_tool.formats import tokenizer, trainer_state
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.formats.manifest import Manifest
from lora_tool.formats.model_config import ModelConfig
from lora_tool.formats.trainer_state import TrainerState, try_trainer_state
from lora_tool.formats.weights import Weights
from lora_tool.path_suggestions import no_such_folder, not_a_folder
from lora_tool.tensors import TensorTable

_TAG = re.compile(r"global_step\d+\Z")
_OTHER_TRAINED = re.compile(
    r"(non_lora_(trainables|state_dict)|mm_projector|value_head|v_head|reward_head|vit)\.(safetensors|bin|pt|pth)\Z"
)
_WHOLE_MODEL = frozenset({"pytorch_model.bin", "model.safetensors"})
_CHECKPOINT = re.compile(r"checkpoint-(?P<step>\d+)\Z")


@enum.unique
class Kind(str, enum.Enum):
    """What a folder is, in the words that reports use."""

    BASE_MODEL = "base model"
    MERGED_MODEL = "merged model"
    ADAPTER = "adapter"
    TRAINER_CHECKPOINT = "trainer checkpoint"
    ZERO = "DeepSpeed checkpoint"
    DCP = "FSDP checkpoint"
    RUN = "run folder"

    def __str__(self) -> str:
        return str(self.value)

    @property
    def with_article(self) -> str:
        """The kind as a sentence has it: "an adapter", "an FSDP checkpoint"."""
        return f"{'an' if self in (Kind.ADAPTER, Kind.DCP) else 'a'} {self}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """What lies in a folder, by name, and what every kind of checkpoint may have beside its weights."""

    root: Path
    files: tuple[str, ...]
    folders: tuple[str, ...]
    trainer: TrainerState | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def tokenizer_files(self) -> tuple[str, ...]:
        """Names of the tokenizer's and processor's files, the chat template among them."""
        return tuple(name for name in self.files if name in tokenizer.FILE_NAMES or name.endswith(".tiktoken"))

    @property
    def trained_beside(self) -> tuple[str, ...]:
        """Names of weights that trainers put beside an adapter, which PEFT does not read.

        LLaVA's projector, LLaMA-Factory's value head, ms-swift's vision tower; TRL's value head is called as a model.
        """
        no_model = () if "config.json" in self.files else _WHOLE_MODEL
        return tuple(name for name in self.files if _OTHER_TRAINED.match(name) or name in no_model)

    @property
    def is_numbered(self) -> bool:
        """Whether it is itself a `checkpoint-N` folder of a run."""
        return _CHECKPOINT.match(self.root.name) is not None

    @property
    def checkpoints(self) -> tuple[str, ...]:
        """Names of the `checkpoint-N` folders in it, by step."""
        steps = {name: int(match["step"]) for name in self.folders if (match := _CHECKPOINT.match(name))}
        return tuple(sorted(steps, key=steps.__getitem__))

    @property
    def tags(self) -> tuple[str, ...]:
        """Names of the `global_stepN` folders in it, by step."""
        return tuple(sorted(filter(_TAG.match, self.folders), key=lambda name: int(name.removeprefix("global_step"))))

    @property
    def training_state(self) -> tuple[str, ...]:
        """Names of the folders in it that a training checkpoint is in: DeepSpeed's tags, or accelerate's for FSDP."""
        return self.tags or tuple(name for name in self.folders if name.startswith("pytorch_model_fsdp_"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A folder that was opened, and what was found wrong while it was."""

    folder: Folder
    problems: tuple[Problem, ...] = ()

    @property
    def root(self) -> Path:
        return self.folder.root

    def __repr__(self) -> str:
        problems = f", {len(self.problems)} problems" if self.problems else ""
        return f"{type(self).__name__}({shortened(str(self.root), 300)!r}{problems})"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ModelDir(_Opened):
    """A transformers model: config and weights. A manifest of ours makes it a merged model."""

    config: ModelConfig | None
    weights: Weights
    manifest: Manifest | None = None

    @property
    def kind(self) -> Kind:
        if self.manifest is not None:
            return Kind.MERGED_MODEL
        return Kind.BASE_MODEL if self.folder.trainer is None else Kind.TRAINER_CHECKPOINT

    @property
    def tensors(self) -> TensorTable:
        return self.weights.tensors


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class AdapterDir(_Opened):
    """A PEFT adapter: config and weights. With a `trainer_state.json` it is a trainer checkpoint."""

    config: AdapterConfig | None
    weights: Weights
    keys: Mapping[str, keys.AdapterKey]
    """Tensor name → its parsed form, for every tensor."""

    @property
    def kind(self) -> Kind:
        return Kind.ADAPTER if self.folder.trainer is None else Kind.TRAINER_CHECKPOINT

    @property
    def tensors(self) -> TensorTable:
        return self.weights.tensors


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ZeroDir(_Opened):
    """A DeepSpeed checkpoint: tags with one pair of rank files per process."""

    latest: str | None
    """What the file `latest` names; None where there is none, or where `root` is itself a tag."""
    rank_files: Mapping[str, tuple[str, ...]]
    """Tag → names of its rank files; the tag is "." where they lie in `root` itself."""

    @property
    def kind(self) -> Kind:
        return Kind.ZERO


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DcpDir(_Opened):
    """A torch distributed checkpoint, as FSDP2 writes it: `.metadata` and `.distcp` files."""

    parts: Mapping[str, tuple[str, ...]]
    """Folder with a `.metadata` ("." or a sub-folder) → names of its `.distcp` files."""

    @property
    def kind(self) -> Kind:
        return Kind.DCP


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunDir(_Opened):
    """A training run's output folder that holds `checkpoint-N` folders and no finished weights."""

    @property
    def kind(self) -> Kind:
        return Kind.RUN


Checkpoint = ModelDir | AdapterDir | ZeroDir | DcpDir | RunDir


def unexpected(found: Checkpoint, expected: str, *, hint: str | None = None) -> NotACheckpoint:
    """Return the error for a checkpoint of another kind than was `expected`; without a hint, the command that takes it."""
    return NotACheckpoint(
        f"{found.root} is {found.kind.with_article}: expected {expected}",
        hint=hint or f"lora-tool {_command_for(found)} {shlex.quote(str(found.root))}",
    )


def _command_for(found: Checkpoint) -> str:
    """Return the command that goes on from this kind of checkpoint."""
    if isinstance(found, AdapterDir):
        return "merge"
    if isinstance(found, ModelDir):
        return "validate" if found.manifest is None else "verify"
    return "ls" if isinstance(found, RunDir) else "consolidate"


def read_folder(root: Path) -> Folder:
    """Return what lies in the folder `root`, by name. Raises `NotACheckpoint` where it cannot be listed."""
    if not root.exists():
        raise no_such_folder(root)
    if not root.is_dir():
        raise not_a_folder(root)
    files: list[str] = []
    folders: list[str] = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                # what is neither file nor folder is listed as a file, so that reading it gives a problem, not silence
                is_folder = Path(entry).is_dir() if entry.is_symlink() else entry.is_dir()
                (folders if is_folder else files).append(entry.name)
    except OSError as error:
        raise NotACheckpoint(f"{root} cannot be listed: {error.strerror}") from error
    trainer: TrainerState | None = None
    problems: tuple[Problem, ...] = ()
    if trainer_state.FILE_NAME in files:
        trainer, problems = try_trainer_state(root / trainer_state.FILE_NAME)
    return Folder(
        root=root, files=tuple(sorted(files)), folders=tuple(sorted(folders)), trainer=trainer, problems=problems
    )
