"""LT321: whether an adapter in the folder of a model was left unmerged."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from lora_tool.checkpoints import ADAPTER_PICKLE, ADAPTER_WEIGHTS, UNMERGED
from lora_tool.core.report import Severity
from lora_tool.formats import adapter_config
from lora_tool.rules.engine.registry import Fault, rule
from lora_tool.rules.engine.subjects import ModelSubject


@rule("LT321", Severity.WARNING, on=ModelSubject)
def unmerged(subject: ModelSubject) -> Iterator[Fault]:
    """The model's adapter lies beside it, unmerged.

    What it does: Looks for an adapter in `lora_adapter`, where verl's `model_merger` puts it, in a model's folder.
    Why it matters: verl's "merged" folder is the base with the adapter beside it: loading or serving the folder gives
    the base, without the training.
    Example: After `python -m verl.model_merger merge`, `OUT/model.safetensors` holds the weights that the run began
    with.
    What to do: Merge it: `lora-tool merge OUT/lora_adapter`, which uses the folder around it as the base.
    """
    folder = subject.checkpoint.folder
    names = folder.names_in(UNMERGED) if UNMERGED in folder.folders else ()
    if adapter_config.FILE_NAME in names and {ADAPTER_WEIGHTS, ADAPTER_PICKLE} & {*names}:
        adapter = folder.root / UNMERGED
        message = "is an adapter that was not merged into the model in this folder, which is only the base"
        yield Fault(message=message, path=adapter, hint=f"lora-tool merge {shlex.quote(str(adapter))}")
