"""Saves of a run whose adapters have names, each in a folder of its own.

`PeftModel.save_pretrained` puts every adapter but the one called `default` into a folder of its name (peft 0.21); the HF
Trainer writes its states beside those folders.
"""

from __future__ import annotations

from lora_tool.checkpoints.adapters import ADAPTER, adapters_below
from lora_tool.checkpoints.folders import Folder, is_called_save, listed, read_folder
from lora_tool.checkpoints.kinds import AdapterDir, Claim, Kind, NamedAdapters, step_of
from lora_tool.core.errors import CheckpointError
from lora_tool.formats import trainer_state
from lora_tool.formats.files import inside


def _recognise(folder: Folder) -> Claim | None:
    is_save = is_called_save(folder.name) or trainer_state.FILE_NAME in folder.files
    return Claim.INSIDE if is_save and folder.folders and adapters_below(folder.root) else None


def _open(folder: Folder) -> NamedAdapters:
    roots = [root for root in adapters_below(folder.root) if inside(folder.root, root)]
    adapters = (ADAPTER.open(read_folder(root)) for root in roots)
    return NamedAdapters(
        kind=NAMED_ADAPTERS,
        folder=folder,
        problems=folder.problems,
        adapters=tuple(adapter for adapter in adapters if isinstance(adapter, AdapterDir)),
    )


NAMED_ADAPTERS = Kind(
    name="adapter set",
    article="an",
    sign="NAME/adapter_config.json",
    command="ls",
    recognise=_recognise,
    open=_open,
)


def trained_among(found: NamedAdapters) -> tuple[AdapterDir, ...]:
    """Return the adapters of a save that were trained, all of them where no other save says which were not."""
    return tuple(adapter for adapter in found.adapters if not is_frozen(adapter)) or found.adapters


def adapter_name(adapter: AdapterDir) -> str:
    """Return the name of an adapter in a save, with a word on one that was not trained."""
    return f"{adapter.root.name} (frozen)" if is_frozen(adapter) else adapter.root.name


def is_frozen(adapter: AdapterDir) -> bool:
    """Return whether an adapter with a name is the same in the first and the last save of its run: a reference."""
    from lora_tool.formats.manifest import fingerprint  # slow to import, and for runs with such adapters only

    around, name = adapter.root.absolute().parent, adapter.root.name
    run = around.parent if is_called_save(around.name) else around
    saves = [run / save / name for save in sorted(filter(is_called_save, listed(run)), key=step_of)]
    saves = [save for save in saves if ADAPTER.recognise(Folder(root=save, files=listed(save), folders=()))]
    if len(saves) < 2:  # noqa: PLR2004 - one save shows no change
        return False
    try:
        others = [ADAPTER.open(read_folder(save)) for save in (saves[0], saves[-1])]
        return {fingerprint(other.weights) for other in others if isinstance(other, AdapterDir)} == {
            fingerprint(adapter.weights)
        }
    except (CheckpointError, OSError):
        return False
