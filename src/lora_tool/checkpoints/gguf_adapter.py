"""Adapters in llama.cpp's format: one GGUF file, without a config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from lora_tool.checkpoints import other_formats
from lora_tool.checkpoints.folders import Folder
from lora_tool.checkpoints.kinds import AdapterDir, Claim, Kind
from lora_tool.core import keys
from lora_tool.core.keys import PREFIX, Part
from lora_tool.core.tensors import StoredTensor, TensorTable
from lora_tool.formats import adapter_config, model_config
from lora_tool.formats.gguf import ARCHITECTURE, KIND
from lora_tool.formats.stored import transposed
from lora_tool.formats.weights import GGUF_SUFFIX, Weights, read_single
from lora_tool.models.ends import is_input
from lora_tool.models.gguf_names import ALPHA, module_names

_FACTORS = {"lora_a": ("lora_A.weight", "lora_embedding_A"), "lora_b": ("lora_B.weight", "lora_embedding_B")}
_STACK = 3


def _files(folder: Folder) -> list[str]:
    return [name for name in folder.files if name.endswith(GGUF_SUFFIX)]


def _recognise(folder: Folder) -> Claim | None:
    configs = {model_config.FILE_NAME, adapter_config.FILE_NAME} & {*folder.files}
    return Claim.WEIGHTS if len(_files(folder)) == 1 and not configs else None


def _open(folder: Folder) -> AdapterDir:
    (name,) = _files(folder)
    stored = read_single(folder.root / name)
    if stored.files and stored.files[0].metadata.get(KIND, "adapter") != "adapter":
        other_formats.refuse_files(folder)
    return adapter_of(folder, stored, {name: _called(name, tensor) for name, tensor in _renamed(stored)})


GGUF_ADAPTER = Kind(name="GGUF adapter", sign="adapter.gguf", command="inspect", recognise=_recognise, open=_open)


def adapter_of(folder: Folder, stored: Weights, table: TensorTable) -> AdapterDir:
    """Return the PEFT adapter that a file stands for; `table` has its factors under PEFT's names."""
    metadata: Mapping[str, str] = stored.files[0].metadata if stored.files else {}
    parsed = keys.parse_all(table)
    ranks = {
        key.module: table[name].shape[0]
        for name, key in parsed.items()
        if key.part in (Part.LORA_A, Part.EMBEDDING_A) and table[name].shape
    }
    rank = Counter(ranks.values()).most_common(1)[0][0] if ranks else 1
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": float(metadata.get(ALPHA, "1")),
        "rank_pattern": {module: own for module, own in ranks.items() if own != rank},
        "target_modules": sorted(ranks),
        "inference_mode": True,
    }
    return AdapterDir(
        kind=GGUF_ADAPTER,
        folder=folder,
        config=adapter_config.adapter_config(fields, folder.root / _files(folder)[0]),
        weights=replace(stored, tensors=table),
        keys=parsed,
        problems=(*folder.problems, *stored.problems),
    )


def _called(name: str, tensor: StoredTensor) -> StoredTensor:
    return replace(tensor, spec=replace(tensor.spec, name=name))


def _renamed(stored: Weights) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the factors under PEFT's names, those of experts one by one; other tensors keep their names."""
    named = module_names(stored.files[0].metadata.get(ARCHITECTURE, "")) if stored.files else module_names("")
    for name, tensor in stored.tensors.items():
        place, _, part = name.rpartition(".weight.")
        if part not in _FACTORS:
            yield name, tensor
            continue
        module = named(place)
        if len(tensor.shape) == _STACK:
            each = tensor.nbytes // max(1, tensor.shape[0])
            spec = replace(tensor.spec, shape=tensor.shape[1:])
            for number in range(tensor.shape[0]):
                spans = tuple(tensor.part(number * each, each))
                path = module.replace("*", str(number))
                yield f"{PREFIX}{path}.{_FACTORS[part][0]}", StoredTensor(spec=spec, spans=spans)
        elif is_input(module):
            yield f"{PREFIX}{module}.{_FACTORS[part][1]}", transposed(tensor) if part == "lora_a" else tensor
        else:
            yield f"{PREFIX}{module}.{_FACTORS[part][0]}", tensor
