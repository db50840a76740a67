"""A merge that only PEFT can do: the model loaded with transformers, merged by PEFT, and its weights saved."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

from lora_tool.checkpoints import AdapterDir
from lora_tool.core.display import size
from lora_tool.core.errors import ExecutionError, MissingDependency, UnsupportedAdapter
from lora_tool.core.machine import CONTROL_GROUP
from lora_tool.core.tensors import FLOAT_NAMES
from lora_tool.formats.stored import read_part
from lora_tool.formats.weights import TORCH_SUFFIX
from lora_tool.models.mapping.quiet import quiet
from lora_tool.plans.merge.in_memory import InMemory


def available_bytes() -> int | None:
    """Return how much memory this process may still take, by the system and its control group; None if unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        found.append(int(fields["MemAvailable"].split()[0]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        limit, taken = (
            int((CONTROL_GROUP / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current")
        )
        stat = (CONTROL_GROUP / "memory.stat").read_text(encoding="ascii").splitlines()
        # the page cache counts as used, but the kernel frees it when memory is needed
        files = sum(int(line.split()[1]) for line in stat if line.startswith(("active_file ", "inactive_file ")))
        found.append(limit - taken + files)
    return min(found, default=None)


def require_memory(request: InMemory) -> None:
    """Return if the machine has the memory that the merge takes, or does not report it. Raises `ExecutionError`."""
    available = available_bytes()
    if available is not None and available < request.needed_bytes:
        raise ExecutionError(
            f"merging in memory takes about {size(request.needed_bytes)}, this machine has {size(available)} free",
            hint="merge it on a machine with more memory, or serve the adapter unmerged",
        )


def merge_with_peft(request: InMemory, folder: Path) -> None:
    """Write the merged model's config and weights into `folder`, as PEFT's defaults give them.

    Raises `UnsupportedAdapter` where PEFT cannot merge it, or would leave out a tensor of an adapter;
    `MissingDependency` without PEFT.
    """
    for file in request.base.weights.files:
        if file.path.suffix == TORCH_SUFFIX:
            raise UnsupportedAdapter(
                f"{file.path}: a merge in memory would load it as a pickle, which can run code",
                hint="write it as safetensors, once: from_pretrained(BASE), save_pretrained(NEW), then `base=NEW`",
            )
    for package in ("torch", "transformers", "peft"):
        try:
            __import__(package)
        except ImportError as error:
            raise MissingDependency(package, extra="merge") from error
    with quiet():
        try:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                merged = _merged(request, Path(scratch))
            merged.save_pretrained(folder)
        except UnsupportedAdapter:
            raise
        # PEFT and transformers raise whatever they like
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            names = ", ".join(str(adapter.root) for adapter in request.adapters)
            raise UnsupportedAdapter(f"{names}: PEFT cannot merge it: {first}") from error


def _merged(request: InMemory, scratch: Path) -> Any:  # noqa: ANN401 - a transformers model
    import transformers
    from peft import PeftModel  # heavy, and only here

    choices: dict[str, Any] = {
        "dtype": FLOAT_NAMES[request.dtype] if request.dtype else "auto",
        "local_files_only": True,
    }
    if request.num_labels is not None:
        choices["num_labels"] = request.num_labels
    # the class by its name where it is known: an auto class may take another one
    model = getattr(transformers, request.class_name or "").from_pretrained(request.base.root, **choices)
    names = ["default", *(f"adapter{number}" for number in range(2, len(request.adapters) + 1))]
    folders = [_as_peft_saves(adapter, scratch / name) for name, adapter in zip(names, request.adapters, strict=True)]
    adapted = PeftModel.from_pretrained(model, folders[0])
    for name, folder in zip(names[1:], folders[1:], strict=True):
        adapted.load_adapter(folder, adapter_name=name)
    for name, adapter in zip(names, request.adapters, strict=True):
        _require_all_loaded(adapted, adapter, name)
    return adapted.merge_and_unload(adapter_names=names)


def _as_peft_saves(adapter: AdapterDir, folder: Path) -> Path:
    """Return the adapter's folder, or a new one at `folder` with its tensors where PEFT would not read them all.

    PEFT does not know the names of a raw state dict, and we never give it a torch file.
    """
    whole = all(file.path.suffix != TORCH_SUFFIX for file in adapter.weights.files)
    known = _names_in_peft(adapter)
    if adapter.config is None or (whole and all(theirs == name for name, theirs in known.items())):
        return adapter.root
    import torch
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for name, theirs in known.items():
        stored = adapter.tensors[name]
        data = bytearray(read_part(stored, 0, stored.nbytes))
        tensor = torch.frombuffer(data, dtype=getattr(torch, FLOAT_NAMES[stored.dtype])).reshape(stored.shape)
        if not torch.equal(tensors.setdefault(theirs, tensor), tensor):
            raise UnsupportedAdapter(
                f"{stored.path}: `{name}`: differs from another tensor of the same module, and PEFT would load only one of them"
            )
    folder.mkdir()
    (folder / adapter.config.path.name).write_bytes(adapter.config.path.read_bytes())
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _names_in_peft(adapter: AdapterDir) -> dict[str, str]:
    """Return PEFT's name for each tensor of the file; those of other methods than LoRA are as PEFT saved them."""
    if adapter.config is not None and adapter.config.is_of_another_kind:
        return {name: name for name in adapter.tensors}
    return {name: key.canonical for name, key in adapter.keys.items()}


def _require_all_loaded(model: Any, adapter: AdapterDir, name: str) -> None:  # noqa: ANN401 - a PeftModel
    """Raise unless every tensor of the adapter's file is one of the model's: PEFT silently ignores others."""
    from peft import get_peft_model_state_dict

    loaded = get_peft_model_state_dict(model, adapter_name=name)
    own = set(_names_in_peft(adapter).values())
    # whole tensors of the model, as of resized embeddings, are loaded into it
    left = sorted(own - loaded.keys() - model.state_dict().keys())
    missing = [tensor for tensor in loaded if tensor not in own and ".base_layer." not in tensor]
    for found, what in ((left, "PEFT would leave it out"), (missing, "PEFT needs it, but it is not in the file")):
        if found:
            raise UnsupportedAdapter(f"{adapter.root}: `{found[0]}`: {what} ({len(found)} in all)")
