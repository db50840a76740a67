"""What lies in a folder, by name."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from lora_tool.errors import NotACheckpoint, Problem
from lora_tool.formats import tokenizer, trainer_state
from lora_tool.formats.trainer_state import TrainerState, try_trainer_state
from lora_tool.path_suggestions import no_such_folder, not_a_folder

_OTHER_TRAINED = re.compile(
    r"(non_lora_(trainables|state_dict)|mm_projector|value_head|v_head|reward_head|vit)\.(safetensors|bin|pt|pth)\Z"
)
_WHOLE_MODEL = frozenset({"pytorch_model.bin", "model.safetensors"})
_LICENCES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY", "COPYING")
_CHECKPOINT = re.compile(r"checkpoint-(?P<step>\d+)\Z")


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
    def licence_files(self) -> tuple[str, ...]:
        """Names of the files that say what may be done with the model."""
        return tuple(name for name in self.files if name.upper().startswith(_LICENCES))

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

    def names_in(self, folder: str) -> tuple[str, ...]:
        """Return the names of what lies in one of its `folders`, "." for itself; nothing where it cannot be listed."""
        return self.files if folder == "." else listed(self.root / folder)


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


def listed(path: Path) -> tuple[str, ...]:
    """Return the names of what lies in the folder `path`; nothing where it cannot be listed."""
    try:
        return tuple(entry.name for entry in os.scandir(path))
    except OSError:
        return ()
