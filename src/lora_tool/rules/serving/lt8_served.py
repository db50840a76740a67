"""LT823 and LT824: what a running server answers with an adapter."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from lora_tool.core.report import Severity
from lora_tool.rules.engine.registry import Fault, Unchecked, rule
from lora_tool.rules.serving.asked import COARSE, ServedSubject


@rule("LT823", Severity.ERROR, on=ServedSubject)
def base_is_served(subject: ServedSubject) -> Iterator[Fault | Unchecked]:
    """The server answers with the adapter as it does without it.

    What it does: `lora-tool verify ADAPTER --served URL` asks the server for the log probabilities of next tokens, or
    for the scores of a classifier, with the adapter and with the base, each twice, and compares the difference with
    that of two answers to one request.
    Why it matters: Servers load adapters and ignore tensors that they have no place for. Everything then measured is
    the base.
    Example: The file calls the experts `mlp.experts`, vLLM's class calls them `block_sparse_moe.experts`.
    What to do: Look which tensors the server ignores, `lora-tool validate ADAPTER --for SERVER --base BASE`, and whether
    it was started with this adapter.
    """
    found = subject.served
    if found.no_effect:
        yield Unchecked(reason="the adapter changes nothing (ΔW is zero), so no answer can show whether it is applied")
        return
    if found.applied:
        if found.peft is None and found.moved < COARSE:
            message = (
                f"with `{found.adapter}` the answers differ from the base's by only {found.moved:.2g}, which rounding "
                "in a 16-bit server could explain"
            )
            adapter, url = shlex.quote(str(subject.checkpoint.root)), shlex.quote(found.url)
            again = f"lora-tool verify {adapter} --served {url} --base BASE"
            hint = f"compare them with PEFT's, which needs torch, peft and the base: {again}"
            yield Fault(message=message, severity=Severity.INFO, hint=hint)
        return
    if found.peft is not None and found.peft.expected <= 2 * found.indistinct:
        yield Unchecked(
            reason=f"the adapter moves these answers by {found.peft.expected:.2g} at most, less than the server's vary"
        )
        return
    expected = "" if found.peft is None else f"; PEFT's differ by {found.peft.expected:.3g}"
    message = (
        f"{found.url} answers with `{found.adapter}` as with its base `{found.base}`: the {found.what} differ by "
        f"{found.moved:.2g} at most, two answers to one request by {found.noise:.2g}{expected}"
    )
    yield Fault(message=message)


@rule("LT824", Severity.ERROR, on=ServedSubject)
def other_than_peft(subject: ServedSubject) -> Iterator[Fault | Unchecked]:
    """The server's answers with the adapter are not PEFT's.

    What it does: `lora-tool verify ADAPTER --served URL` compares what the server answers with what transformers and
    PEFT compute in float32. It allows four times the distance that the answers of the base alone have, plus
    0.0001.
    Why it matters: The server may apply only some of the modules, another scaling, or another adapter, and the text
    still reads well.
    Example: llama.cpp scales rsLoRA by `lora_alpha / r` instead of `lora_alpha / √r`.
    What to do: Let `lora-tool prepare ADAPTER --for SERVER --base BASE -o OUT` write the adapter in the server's form,
    and serve OUT.
    """
    found = subject.served
    if found.peft is None:
        yield Unchecked(reason=f"the answers were not compared with PEFT's: {found.why_no_peft}")
    elif not found.peft.decides and not found.no_effect:
        yield Unchecked(
            reason=f"the server's answers without the adapter are already {found.peft.base:.2g} from those of the base "
            f"here, and the adapter changes them by {found.peft.expected:.2g}: another base, or one that is quantised"
        )
    elif found.peft.adapter > found.peft.allowed and found.applied:
        message = (
            f"the {found.what} that {found.url} gives with `{found.adapter}` are up to {found.peft.adapter:.3g} "
            f"from PEFT's; its arithmetic explains {found.peft.allowed:.2g}, and the adapter changes them by "
            f"{found.peft.expected:.3g}"
        )
        yield Fault(message=message)
