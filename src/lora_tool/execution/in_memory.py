"""A merge that only PEFT can do: the model loaded with transformers, merged by PEFT, and its weights saved."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lora_tool.checkpoint import AdapterDir
from lora_tool.display import size
from lora_tool.errors import ExecutionError, MissingDependency, UnsupportedAdapter
from lora_tool.formats.weights import TORCH_SUFFIX
from lora_tool.plan.in_memory import InMemory

_TYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}


def available_bytes() -> int | None:
    """Return how much memory this process may still take, by the system and its control group; None if unknown."""
    found = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        found.append(int(fields["MemAvailable"].split()[0]) * 1024)
    with contextlib.suppress(OSError, ValueError, KeyError):
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text(encoding="ascii"))
        used = int((group / "memory.current").read_text(encoding="ascii"))
        held = dict(line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines())
        cached = int(held["active_file"]) + int(held["inactive_file"])  # given up as soon as it is wanted
        found.append(limit - used + cached)
    return min(found, default=None)


def require_memory(asked: InMemory) -> None:
    """Return if the machine has the memory that the merge takes, or does not tell. Raises `ExecutionError`."""
    available = available_bytes()
    if available is not None and available < asked.needed_bytes:
        raise ExecutionError(
            f"merging in memory takes about {size(asked.needed_bytes)}, this machine has {size(available)} free",
            hint="merge it on a machine with more memory, or serve the adapter unmerged",
        )


def merge_with_peft(asked: InMemory, folder: Path) -> None:
    """Write the merged model's config and weights into `folder`, as PEFT's defaults give them.

    Raises `UnsupportedAdapter` where PEFT cannot merge it, or would leave out a tensor of an adapter;
    `MissingDependency` without PEFT.
    """
    for file in (*asked.base.weights.files, *(file for adapter in asked.adapters for file in adapter.weights.files)):
        if file.path.suffix == TORCH_SUFFIX:
            raise UnsupportedAdapter(
                f"{file.path}: in memory, PEFT would load it as a pickle", hint="convert it to safetensors first"
            )
    for package in ("torch", "transformers", "peft"):
        try:
            __import__(package)
        except ImportError as error:
            raise MissingDependency(package, extra="merge") from error
    with _quiet():
        try:
            _merged(asked).save_pretrained(folder)
        except UnsupportedAdapter:
            raise
        # PEFT and transformers raise whatever they like
        except Exception as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            names = ", ".join(str(adapter.root) for adapter in asked.adapters)
            raise UnsupportedAdapter(f"{names}: PEFT cannot merge it: {first}") from error


def _merged(asked: InMemory) -> Any:  # noqa: ANN401 - a transformers model
    import transformers  # noqa: PLC0415
    from peft import PeftModel  # noqa: PLC0415 - heavy, and only here

    choices: dict[str, Any] = {"dtype": _TYPES[asked.dtype.value] if asked.dtype else "auto", "local_files_only": True}
    if asked.num_labels is not None:
        choices["num_labels"] = asked.num_labels
    # the class by its name where it is known: an auto class may take another one
    name = asked.facts.class_name if asked.facts else asked.task.auto_class
    model = getattr(transformers, name or "").from_pretrained(asked.base.root, **choices)
    names = ["default", *(f"adapter{number}" for number in range(2, len(asked.adapters) + 1))]
    adapted = PeftModel.from_pretrained(model, asked.adapters[0].root)
    for name, adapter in zip(names[1:], asked.adapters[1:], strict=True):
        adapted.load_adapter(adapter.root, adapter_name=name)
    for name, adapter in zip(names, asked.adapters, strict=True):
        _require_all_loaded(adapted, adapter, name)
    return adapted.merge_and_unload(adapter_names=names)


def _require_all_loaded(model: Any, adapter: AdapterDir, name: str) -> None:  # noqa: ANN401 - a PeftModel
    """Raise unless every tensor of the adapter's file is one of the model's: PEFT ignores others without a word."""
    from peft import get_peft_model_state_dict  # noqa: PLC0415

    loaded = get_peft_model_state_dict(model, adapter_name=name)
    left = [tensor for tensor in adapter.tensors if tensor not in loaded]
    missing = [tensor for tensor in loaded if tensor not in adapter.tensors and ".base_layer." not in tensor]
    for found, what in ((left, "PEFT would leave it out"), (missing, "PEFT needs it, and it is not in the file")):
        if found:
            raise UnsupportedAdapter(f"{adapter.root}: `{found[0]}`: {what} ({len(found)} in all)")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the libraries' progress bars and warnings from the terminal; what matters is checked."""
    from transformers.utils import logging  # noqa: PLC0415

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.enable_progress_bar()
        logging.set_verbosity(level)
