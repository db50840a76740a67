"""PEFT adapters: `adapter_config.json` and one file of weights."""

from __future__ import annotations

import os
import re
from pathlib import Path

from msgspec.structs import replace

from lora_tool.checkpoints import other_formats
from lora_tool.checkpoints.folders import Folder, is_called_save, is_numbered, listed, read_config, without_weights
from lora_tool.checkpoints.kinds import AdapterDir, Claim, Kind
from lora_tool.core import keys
from lora_tool.core.errors import BrokenFile
from lora_tool.core.keys import PREFIX
from lora_tool.formats import adapter_config, manifest, model_config
from lora_tool.formats.adapter_config import read_adapter_config
from lora_tool.formats.fields import is_strings
from lora_tool.formats.weights import Weights, read_single

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PICKLE = "adapter_model.bin"
VALUE_HEAD = "value_head.safetensors"
"""The file in which LLaMA-Factory saves an adapter's value head."""
UNMERGED = "lora_adapter"
"""The folder that verl's `model_merger` puts the adapter into, inside of that of the base."""
_SHARD = re.compile(r"adapter_model-\d{5}-of-\d{5}\.(safetensors|bin)\Z")
_OWN = frozenset({adapter_config.FILE_NAME, ADAPTER_WEIGHTS, ADAPTER_PICKLE})


def _recognise(folder: Folder) -> Claim | None:
    return None if _OWN.isdisjoint(folder.files) else Claim.WEIGHTS


def _open(folder: Folder) -> AdapterDir:
    config, problems = read_config(folder, adapter_config.FILE_NAME, read_adapter_config)
    weights = _weights(folder)
    if not any(name.startswith(PREFIX) for name in weights.tensors):
        other_formats.refuse_tensors(weights)
    if config is not None and config.peft_type is None:
        other_formats.refuse_config(config.path, weights.tensors)
    return AdapterDir(
        kind=ADAPTER if folder.trainer is None else TRAINED_ADAPTER,
        folder=folder,
        config=config,
        weights=weights,
        keys=keys.parse_all(weights.tensors),
        problems=(*folder.problems, *problems, *weights.problems),
    )


def _weights(folder: Folder) -> Weights:
    # safetensors first, as PEFT does where both are there
    for name in (ADAPTER_WEIGHTS, ADAPTER_PICKLE):
        if name in folder.files:
            return read_single(folder.root / name)
    other_formats.refuse_files(folder, adapter=True)
    shards = [name for name in folder.files if _SHARD.match(name)]
    if not shards:
        return without_weights(folder, ADAPTER_WEIGHTS)
    message = f"is missing, but {len(shards)} shards are there ({shards[0]}): PEFT reads an adapter from a single file"
    return without_weights(folder, ADAPTER_WEIGHTS, message)


ADAPTER = Kind(
    name="adapter", article="an", sign=adapter_config.FILE_NAME, command="merge", recognise=_recognise, open=_open
)
TRAINED_ADAPTER = replace(ADAPTER, name="trainer checkpoint", article="a")


def computed_from(adapter: AdapterDir) -> dict[str, str]:
    """Return the fingerprint of every adapter whose ΔW is in this one's, by its manifest, and where that one was.

    Where only the fingerprint is known, the place is "". An adapter that nobody computed of others has none, nor has one
    whose manifest cannot be read.
    """
    found = _manifest_of(adapter)
    return {} if found is None else {**dict.fromkeys(found.merged_adapters, ""), **found.adapters}


def label_names(adapter: AdapterDir) -> tuple[str, ...]:
    """Return the names of the labels of a head that was made for this adapter, which PEFT's config has no place for, by
    its manifest; none of any other adapter.
    """
    found = _manifest_of(adapter)
    head = None if found is None else found.raw.get("head")
    names = [each.get("label") for each in head if isinstance(each, dict)] if isinstance(head, list) else []
    return tuple(names) if is_strings(names) else ()


def _manifest_of(adapter: AdapterDir) -> manifest.Manifest | None:
    """Return the manifest in an adapter's folder, None where it has none that can be read."""
    if manifest.FILE_NAME not in adapter.folder.files:
        return None
    try:
        return manifest.read_manifest(adapter.root / manifest.FILE_NAME)
    except BrokenFile:
        return None


def base_around(adapter: AdapterDir) -> Path | None:
    """Return the folder of the adapter's base where the adapter lies in it and names none: verl's `model_merger` puts
    `lora_adapter` into the folder of the unmerged model. None anywhere else.
    """
    around = adapter.root.absolute().parent
    if adapter.root.absolute().name != UNMERGED:
        return None
    names = listed(around)
    has_weights = any(name.endswith((".safetensors", ".bin")) for name in names)
    return around if model_config.FILE_NAME in names and has_weights else None


def adapters_below(path: str | os.PathLike[str]) -> tuple[Path, ...]:
    """Return the adapter folders in the folder `path`, by name, where `path` itself is not a checkpoint.

    `PeftModel.save_pretrained` puts an adapter that is not called `default` into a folder of its name.
    """
    root = Path(path)
    names = set(listed(root))
    if names & {*_OWN, model_config.FILE_NAME, "model.safetensors"}:
        return ()
    found = [name for name in sorted(names) if adapter_config.FILE_NAME in listed(root / name)]
    # the checkpoints of a run are states of one adapter
    is_run = any(map(is_called_save, found)) or any(map(is_numbered, names))
    return () if is_run else tuple(root / name for name in found)
