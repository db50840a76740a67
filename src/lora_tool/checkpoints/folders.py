"""The files and folders in a folder, by name."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.checkpoints.path_suggestions import no_such_folder, not_a_folder
from lora_tool.core.errors import BadConfig, BrokenFile, Defect, NotACheckpoint, Problem
from lora_tool.formats import generation_config, manifest, model_card, tokenizer, trainer_state
from lora_tool.formats.files import require_inside
from lora_tool.formats.trainer_state import TrainerState, read_trainer_state
from lora_tool.formats.weights import Weights

Config = TypeVar("Config")

_OTHER_TRAINED = re.compile(
    r"(non_lora_(trainables|state_dict)|mm_projector|value_head|v_head|reward_head|vit)\.(safetensors|bin|pt|pth)\Z"
)
_WHOLE_MODEL = frozenset({"pytorch_model.bin", "model.safetensors"})
_LICENCES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY", "COPYING")
_CHECKPOINT = re.compile(r"checkpoint-\d+\Z")
_NUMBERED = r"(?:global_?|epoch_?)?(?:step|iter|iteration|epoch|checkpoint|ckpt)[-_=]?\d{1,18}"
_SAVE = re.compile(
    rf"{_NUMBERED}(?:[-_]?{_NUMBERED})*(?:[-_]\w+=-?\d+(?:\.\d+)?)*(?:_hf)?(?:-v\d{{1,6}})?(?:\.ckpt)?\Z", re.IGNORECASE
)
"""What training programs call the folders of a run: torchtitan's `step-500`, torchtune's `epoch_2`, AutoModel's
`epoch_0_step_9`, AReaL's `epoch0epochstep9globalstep9`, OpenRLHF's `global_step20_hf`, Lightning's
`epoch=1-step=20-val_loss=0.32.ckpt`."""
_IN_PROGRESS = re.compile(r"(?:tmp[-_])(?:checkpoint|global_step|step|iter)[-_]?\d+\Z")
"""What some programs call a save until all of it is written."""


class Folder(Struct, frozen=True, kw_only=True):
    """The names in a folder, and the files that every kind of checkpoint may have with its weights."""

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
    def templates(self) -> tuple[str, ...]:
        """Paths in the folder of the named chat templates."""
        if tokenizer.TEMPLATES not in self.folders:
            return ()
        return tokenizer.templates_among(self.names_in(tokenizer.TEMPLATES))

    @property
    def licence_files(self) -> tuple[str, ...]:
        """Names of the files with the model's licence."""
        return tuple(name for name in self.files if name.upper().startswith(_LICENCES))

    @property
    def copied_files(self) -> tuple[str, ...]:
        """Paths in the folder of the files that commands copy or publish with the weights, byte for byte."""
        others = (generation_config.FILE_NAME, model_card.FILE_NAME, manifest.FILE_NAME)
        found = filter(others.__contains__, self.files)
        return (*self.tokenizer_files, *self.templates, *self.licence_files, *found)

    @property
    def trained_beside(self) -> tuple[str, ...]:
        """Names of weights that trainers save with an adapter, and PEFT does not read.

        LLaVA's projector, LLaMA-Factory's value head, ms-swift's vision tower; TRL's value head is called as a model.
        """
        no_model = () if "config.json" in self.files else _WHOLE_MODEL
        return tuple(name for name in self.files if _OTHER_TRAINED.match(name) or name in no_model)

    @property
    def name(self) -> str:
        """Its name, also where it was given as `.`."""
        return self.root.absolute().name

    @property
    def is_numbered(self) -> bool:
        """Whether it is itself a `checkpoint-N` folder of a run."""
        return is_numbered(self.name)

    @property
    def is_in_progress(self) -> bool:
        """Whether it has the name of a save that its program renames when all of it is written."""
        return _IN_PROGRESS.match(self.name) is not None

    def names_in(self, folder: str) -> tuple[str, ...]:
        """Return the names in one of its `folders`, "." for itself; none where it cannot be listed."""
        return self.files if folder == "." else listed(self.root / folder)


def is_numbered(name: str) -> bool:
    """Return whether a folder of this name is a `checkpoint-N` of a run."""
    return _CHECKPOINT.match(name) is not None


def is_called_save(name: str) -> bool:
    """Return whether programs call a save of a run so; other folders may have such a name, too."""
    return _SAVE.match(name) is not None


def read_folder(root: Path) -> Folder:
    """Return the folder `root` with the names in it. Raises `NotACheckpoint` where it cannot be listed."""
    if not root.exists():
        raise no_such_folder(root)
    if not root.is_dir():
        raise not_a_folder(root)
    files: list[str] = []
    folders: list[str] = []
    try:
        with os.scandir(root) as entries:
            for entry in entries:
                # devices, pipes and dead links count as files, so that reading one is reported as a problem
                is_folder = Path(entry).is_dir() if entry.is_symlink() else entry.is_dir()
                (folders if is_folder else files).append(entry.name)
    except OSError as error:
        raise NotACheckpoint(f"{root} cannot be listed: {error.strerror}") from error
    folder = Folder(root=root, files=tuple(sorted(files)), folders=tuple(sorted(folders)))
    if trainer_state.FILE_NAME not in files:
        return folder
    trainer, problems = read_config(folder, trainer_state.FILE_NAME, read_trainer_state)
    return replace(folder, trainer=trainer, problems=problems)


def listed(path: Path) -> tuple[str, ...]:
    """Return the names in the folder `path`; none where it cannot be listed."""
    try:
        return tuple(entry.name for entry in os.scandir(path))
    except OSError:
        return ()


def read_config(folder: Folder, name: str, read: Callable[[Path], Config]) -> tuple[Config | None, tuple[Problem, ...]]:
    """Return the file `name` of the folder, read by `read`, None where that fails, and its problems."""
    path = folder.root / name
    try:
        if name not in folder.files:
            raise BadConfig.of(path, Defect.BAD_FIELD, _absent(folder, name))
        require_inside(folder.root, path)
        config = read(path)
    except BrokenFile as error:
        return None, (error.problem,)
    return config, getattr(config, "problems", ())


def without_weights(folder: Folder, expected: str, message: str | None = None) -> Weights:
    """Return the weights of a folder without the file `expected`: none, and the problem that reports it."""
    message = message or _absent(folder, expected)
    problem = Problem(defect=Defect.NO_WEIGHTS, path=str(folder.root / expected), message=message)
    return Weights(files=(), tensors={}, problems=(problem,))


def _absent(folder: Folder, name: str) -> str:
    """Return the message for a missing file, with its substitute: a folder, an unfinished save or download, the file
    under another spelling, or weights of a variant.
    """
    if name in folder.folders:
        return "is a folder, not a file"
    stem, _, suffix = name.rpartition(".")

    def is_like(other: str) -> bool:
        begun = other.lower().lstrip(".").startswith(name.lower())
        return begun or (suffix != "json" and other.startswith(f"{stem}.") and other.endswith(f".{suffix}"))

    found = renamed(folder, name) or next(filter(is_like, folder.files), None)
    return "is missing" if found is None else f"is missing, but {found} is there"


def renamed(folder: Folder, name: str) -> str | None:
    """Return the file that a browser or a file manager saved under another name, `adapter_model (1).safetensors`."""
    stem, _, suffix = map(re.escape, name.rpartition("."))
    copy = re.compile(rf"(?i:copy of )?{stem}(?: ?\(\d+\)| ?-? ?(?i:copy)(?: ?\(?\d+\)?)?)?\.{suffix}\Z")
    return next((other for other in folder.files if other != name and copy.match(other)), None)
