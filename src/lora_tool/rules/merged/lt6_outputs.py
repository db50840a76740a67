"""LT620: what a merged model answers, by the evidence of having asked it."""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.report import Severity
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.merged.subject import MergedSubject


@rule("LT620", Severity.ERROR, on=MergedSubject, needs=frozenset({Need.OUTPUTS}))
def other_answers(subject: MergedSubject) -> Iterator[Fault]:
    """The merged model answers otherwise than its base with the adapter.

    What it does: Asks both the same, in float32, and compares logits or rewards. What rounding the weights explains is
    measured: a third run moves every changed weight at random by up to half a unit in the last place. `lora-tool verify
    --logits`.

    Why it matters: The tensors may each be what the plan says, and the model another all the same: another config, a
    tensor under a name that nothing loads, ends that are tied again on loading.

    Example: LoRA on `lm_head` merged into embeddings that `config.json` ties.

    What to do: Look at the other findings first; serve the adapter unmerged until it is clear.
    """
    found = subject.outputs
    if found is None or found.explained:
        return
    message = (
        f"{found.what} differ by {found.largest:.3g} at most and {found.mean:.3g} on average; rounding the weights "
        f"explains {found.allowed_largest:.3g} and {found.allowed_mean:.3g}"
    )
    yield Fault(message=message)
