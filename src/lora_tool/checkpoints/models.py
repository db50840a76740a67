"""Transformers models, base and merged: `config.json` and weights, in one file or in shards with an index."""

from __future__ import annotations

import re

from msgspec.structs import replace

from lora_tool.checkpoints import other_formats
from lora_tool.checkpoints.folders import Folder, read_config, without_weights
from lora_tool.checkpoints.kinds import Claim, Kind, ModelDir, ShardedDir, ShardedKind, open_here
from lora_tool.core.errors import Defect, Problem
from lora_tool.core.keys import has_lora_factor
from lora_tool.formats import manifest, model_config
from lora_tool.formats.manifest import Manifest, read_manifest
from lora_tool.formats.model_config import read_model_config
from lora_tool.formats.weights import Weights, read_sharded, read_single

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLE, _PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_READERS = {_WEIGHTS: read_single, _INDEX: read_sharded, _PICKLE: read_single, _PICKLE_INDEX: read_sharded}
"""The single file before the shards, safetensors before torch files: the order in which transformers chooses."""
_OTHER_MODEL = re.compile(r"(?P<name>(?:pytorch_)?model_\d{1,3})\.(?:safetensors|bin)\Z")
"""The second model of one training, and those after it, as accelerate's `save_state` calls them."""
_RANDOM_STATES = re.compile(r"random_states_\d{1,6}\.pkl\Z")
"""What accelerate's `save_state` writes last, beside weights without a config: the state of a training, not a model."""
_SHARD = re.compile(r"(model-\d{5}-of-\d{5}\.safetensors|pytorch_model-\d{5}-of-\d{5}\.bin)\Z")


def _recognise(folder: Folder) -> Claim | None:
    if not _READERS.keys().isdisjoint(folder.files) or any(map(_SHARD.match, folder.files)):
        return Claim.WEIGHTS
    return Claim.CONFIG if model_config.FILE_NAME in folder.files else None


def _open(folder: Folder) -> ModelDir | ShardedDir:
    config, problems = read_config(folder, model_config.FILE_NAME, read_model_config)
    if config is not None and config.model_type is None:
        other_formats.refuse_config(config.path)
    written: Manifest | None = None
    manifest_problems: tuple[Problem, ...] = ()
    if manifest.FILE_NAME in folder.files:
        written, manifest_problems = read_config(folder, manifest.FILE_NAME, read_manifest)
    weights = weights_in(folder)
    found = ModelDir(
        kind=MERGED_MODEL if written is not None else BASE_MODEL if folder.trainer is None else TRAINED_MODEL,
        folder=folder,
        config=config,
        weights=weights,
        manifest=written,
        problems=(*folder.problems, *problems, *manifest_problems, *weights.problems),
    )
    is_state = model_config.FILE_NAME not in folder.files and any(map(_RANDOM_STATES.match, folder.files))
    state = unmerged_model(found) if is_state else None
    if state is None:
        return found
    others = (problem for problem in weights.problems if problem.defect is Defect.STRAY_WEIGHTS)
    return replace(state, problems=(*state.problems, *others))


def weights_in(folder: Folder) -> Weights:
    """Return the weights that transformers would load from the folder; their faults are in `problems`."""
    shards = list(filter(_SHARD.match, folder.files))
    found = next(filter(folder.files.__contains__, _READERS), None)
    others = tuple(_stray(folder, name, _ANOTHER) for name in other_models(folder).values())
    if found is None and not shards:
        other_formats.refuse_files(folder, adapter=False)
        return without_weights(folder, _WEIGHTS)
    if found is None:
        index = _INDEX if shards[0].endswith(".safetensors") else _PICKLE_INDEX
        message = f"is missing, but {len(shards)} shards are there: without the index nothing says which of them belong together"
        return without_weights(folder, index, message)
    weights = _READERS[found](folder.root / found)
    if not weights.is_broken:
        read = {file.path.name for file in weights.files}
        unnamed = "is a weights file that no index names; transformers ignores it"
        others += tuple(_stray(folder, name, unnamed) for name in shards if name not in read)
    return replace(weights, problems=(*weights.problems, *others))


def other_models(folder: Folder) -> dict[str, str]:
    """Return name → file of the further models that a training saved with the model in the folder."""
    return {match["name"]: name for name in folder.files if (match := _OTHER_MODEL.match(name))}


def _stray(folder: Folder, name: str, message: str) -> Problem:
    return Problem(defect=Defect.STRAY_WEIGHTS, path=str(folder.root / name), message=message, fatal=False)


_ANOTHER = "is another model of the same training; transformers ignores it"


BASE_MODEL = Kind(name="base model", sign=model_config.FILE_NAME, command="validate", recognise=_recognise, open=_open)
MERGED_MODEL = replace(BASE_MODEL, name="merged model", command="verify")
TRAINED_MODEL = replace(BASE_MODEL, name="trainer checkpoint")


# A PEFT model that was saved as if it were a model: `pytorch_model.bin` or `model.safetensors` with LoRA in it.
# DeepSpeed's `zero_to_fp32.py` and `save_16bit_model` write such files of LoRA runs, and accelerate's `merge-weights`.
# Only the names of the tensors tell them from a model's: the kind is not in the registry, which goes by names of files.

_MODEL_FILE = re.compile(r"(model|pytorch_model)(_\d{1,3}|-\d{5}-of-\d{5})?\.(safetensors|bin)\Z")


def unmerged_model(found: ModelDir) -> ShardedDir | None:
    """Return the training state that a folder holds in place of a model, or beside it; None for a model alone."""
    held = any(map(has_lora_factor, found.tensors)) or other_models(found.folder)
    return open_here(UNMERGED_MODEL, _MODEL_FILE, found.folder) if held else None


UNMERGED_MODEL: ShardedKind = ShardedKind(
    name="PEFT model's state dict",
    sign="pytorch_model.bin with LoRA",
    landmarks=(),
    weights=(),
    recognise=lambda _: None,
    open=lambda folder: open_here(UNMERGED_MODEL, _MODEL_FILE, folder),
)
