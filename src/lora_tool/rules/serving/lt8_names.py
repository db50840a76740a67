"""LT816: modules that a server refuses, or does not find, by their names."""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.core.display import named
from lora_tool.core.report import Severity
from lora_tool.rules.engine.registry import Fault, Need, rule
from lora_tool.rules.engine.subjects import AdapterSubject
from lora_tool.rules.serving.servers import WHOLE, asked, asked_for_peft, fault, merged


@rule("LT816", Severity.ERROR, on=AdapterSubject, needs=WHOLE | {Need.BASE_IN_PART})
def served_names(subject: AdapterSubject) -> Iterator[Fault]:
    """Modules that the server refuses, or does not find, by their names.

    What it does: For PEFT, looks for LoRA on `out_proj` and `conv1d` of a Mamba, Falcon-H1 or Nemotron-H base, which it
    refuses when it loads the adapter.
    Why it matters: PEFT stops when it loads the adapter.
    Example: LoRA on `backbone.layers.0.mixer.out_proj` with a Nemotron-H base.
    What to do: Merge the adapter and serve the merged model: `lora-tool merge ADAPTER`.
    """
    config = None if subject.base is None else subject.base.config
    model_type = str(config and config.model_type)
    for form in (*asked_for_peft(subject), *asked(subject)):
        names = form.refused.get(model_type, ())
        refused = [layer.target for layer in subject.layers if layer.target.rpartition(".")[2] in names]
        if refused:
            message = f"{form.name} refuses LoRA on {named(refused, 3)} of a {model_type} model"
            yield fault(subject, refused[0], message, hint=merged(subject))
