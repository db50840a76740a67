"""LT208 and LT209: the values themselves. These rules read weights."""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.keys import Part
from lora_tool.report.model import Severity
from lora_tool.rules.registry import Case, Hit, rule
from lora_tool.rules.weights_scan import scan
from lora_tool.tensors import StoredTensor


def _tensors(case: Case) -> Iterator[StoredTensor]:
    weights = case.adapter or case.model
    if weights is not None:
        yield from (t for t in weights.tensors.values() if t.dtype.is_float and t.spec.numel)


@rule("LT208", Severity.ERROR, "the adapter never moved: every lora_B is zero", deep=True)
def all_zero(case: Case) -> Iterator[Hit]:
    """Every lora_B (of an embedding: every lora_embedding_A) is zero, as PEFT initialises them.

    Why it matters: the adapter changes nothing; the merged model is the base. The run did not train it: a learning
    rate of 0, frozen parameters, gradients that were all zero, or it was saved before the first step.

    Example: a GRPO run whose rewards were all equal ends with loss 0 and this adapter.

    What to do: look at grad_norm in trainer_state.json; train again.
    """
    adapter = case.adapter
    if adapter is None:
        return
    started_at_zero = [
        adapter.tensors[name]
        for name, key in adapter.keys.items()
        if key.leaf != "bias" and key.part in (Part.LORA_B, Part.EMBEDDING_A)
    ]
    readable = [tensor for tensor in started_at_zero if tensor.dtype.is_float and tensor.spec.numel]
    if readable and all(scan(tensor).all_zero for tensor in readable):
        yield Hit(
            path=str(readable[0].path),
            message=f"all {len(readable)} lora_B are zero: the adapter is as untrained, merging it changes nothing",
            hint="look at grad_norm and loss in trainer_state.json, then train again",
        )


@rule("LT209", Severity.ERROR, "NaN or infinity in the weights", deep=True)
def not_finite(case: Case) -> Iterator[Hit]:
    """A weight is NaN or infinite.

    Why it matters: it spreads to every output, or worse, does not: under SDPA one NaN in a q_proj gave a finite,
    wrong score. PEFT and transformers load and merge it without a word.

    Example: a reward model trained in fp16 overflowed; the log shows loss 0.0 because NaN is filtered there.

    What to do: use an earlier checkpoint; train in bf16, or with gradient clipping and loss scaling.
    """
    for tensor in _tensors(case):
        found = scan(tensor)
        if found.nonfinite:
            yield Hit(
                path=str(tensor.path),
                subject=tensor.name,
                message=f"{found.nonfinite:,} of {tensor.spec.numel:,} values are NaN or infinite, first at {found.first}",
                hint="use an earlier checkpoint, and train in bf16 or with a smaller learning rate",
            )
