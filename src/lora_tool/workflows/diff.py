"""Comparing two adapters, or two models."""

from __future__ import annotations

import shlex

from lora_tool.checkpoints import AdapterDir, Checkpoint, ModelDir, as_adapter, require_whole, unexpected
from lora_tool.checkpoints.sources import Reference, opened
from lora_tool.core.errors import NotACheckpoint
from lora_tool.core.options import named_in_errors
from lora_tool.core.progress import StageWatch
from lora_tool.workflows.inspection.comparison import Comparison, compare_adapters, compare_models
from lora_tool.workflows.notebook import default_watch


@named_in_errors
def diff(first: Reference, second: Reference, *, watch: StageWatch | None = None) -> Comparison:
    """Return how `second` differs from `first`, two adapters or two models, module by module: all weights are read.

    Adapters are compared by their ΔW. `watch` is asked for the progress of the reading, by default a bar in a notebook.
    Raises `CheckpointError`.
    """
    pair = _comparable(opened(first)), _comparable(opened(second))
    with (watch or default_watch())("comparing", sum(each.weights.nbytes for each in pair)) as progress:
        match pair:
            case AdapterDir() as one, AdapterDir() as other:
                return compare_adapters(one, other, progress)
            case ModelDir() as model, ModelDir() as other_model:
                return compare_models(model, other_model, progress)
    kinds = f"{pair[0].root} is {pair[0].kind.with_article}, {pair[1].root} is {pair[1].kind.with_article}"
    adapter = next(each.root for each in pair if isinstance(each, AdapterDir))
    raise NotACheckpoint(
        f"{kinds}: give two adapters or two models to compare",
        hint=f"merge the adapter first: lora-tool merge {shlex.quote(str(adapter))}",
    )


def _comparable(checkpoint: Checkpoint) -> AdapterDir | ModelDir:
    if not isinstance(checkpoint, AdapterDir | ModelDir):
        raise unexpected(checkpoint, "an adapter or a model")
    require_whole(checkpoint)
    return as_adapter(checkpoint) if isinstance(checkpoint, AdapterDir) else checkpoint
