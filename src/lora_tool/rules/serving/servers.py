"""The servers, and the commands that write an adapter in the form that one takes, for all rules about servers.

What a server takes is in its table (`tables/`), of which the rules get a record. Where another form of the same ΔW helps,
`lora-tool prepare` writes it, and the finding names the command.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from lora_tool.adapters.fused_experts import fused_experts
from lora_tool.adapters.support import UNMERGED
from lora_tool.checkpoints.gguf_adapter import GGUF_ADAPTER
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.keys import Part
from lora_tool.core.report import Severity
from lora_tool.rules.adapter.lt2_config import bias_without_place, refusals_of
from lora_tool.rules.adapter.lt3_head import head_weight, saved_heads
from lora_tool.rules.engine.registry import Fault, Need
from lora_tool.rules.engine.subjects import AdapterSubject, Server
from lora_tool.rules.serving.forms import ServingForm, form_of, has_usual_names
from lora_tool.rules.serving.obstacles import (
    WITH_BASE,
    class_in_the_way,
    experts_in_the_way,
    in_the_way,
    names_in_the_way,
    not_applied,
    refused_ends,
    stacks_in_the_way,
    tied_in_the_way,
)

NEEDS = frozenset({Need.CONFIG, Need.SERVER})
WHOLE = NEEDS | {Need.WEIGHTS}

_OF_BASE = (tied_in_the_way, stacks_in_the_way, experts_in_the_way, class_in_the_way, not_applied, names_in_the_way)
_NEAREST = "--approximate"
_LOWER = "--max-rank"


def fault(
    subject: AdapterSubject,
    where: str | None,
    message: str,
    *,
    severity: Severity | None = None,
    hint: str | None = None,
) -> Fault:
    """Return a fault of the config, whose hint is to merge unless another is given."""
    hint = hint or merged(subject)
    return Fault(message=message, subject=where, path=subject.config_path, severity=severity, hint=hint)


def asked(subject: AdapterSubject) -> Iterator[ServingForm]:
    """Yield what each built-in server takes that the user named, but for PEFT; nothing for a file that only one reads."""
    return (form for form in _asked(subject) if form.server is not Server.PEFT)


def asked_for_peft(subject: AdapterSubject) -> Iterator[ServingForm]:
    """Yield what PEFT takes, if the user named it."""
    return (form for form in _asked(subject) if form.server is Server.PEFT)


def _asked(subject: AdapterSubject) -> Iterator[ServingForm]:
    return iter(()) if subject.checkpoint.kind is GGUF_ADAPTER else every_form(subject)


def every_form(subject: AdapterSubject) -> Iterator[ServingForm]:
    """Yield what each built-in server takes that the user named, whatever the adapter's format is."""
    for server in Server:
        yield from (form_of(word) for word in sorted(subject.servers) if word.partition("@")[0] == server)


def merged(subject: AdapterSubject) -> str:
    """Return the command that makes a model of it, which every server takes; another way out where no merge is exact."""
    refused = tuple(refusals_of(subject))
    no_way = next((each.hint for each in refused if not each.in_memory), None)
    if no_way is not None or bias_without_place(subject):
        return no_way or UNMERGED
    head = head_weight(saved_heads(subject))
    reward = "--rm " if subject.is_reward() and (head is None or head.shape[:1] == (1,)) else ""
    options = f"{reward}{'--allow-in-memory ' * bool(refused)}"
    return f"merge it and serve the merged model: lora-tool merge {options}{shlex.quote(str(subject.checkpoint.root))}"


def prepared(subject: AdapterSubject, form: ServingForm, *options: str, each_expert: bool = False) -> str:
    """Return how the same ΔW is written in the form that the server reads: by a command, if any does the whole adapter."""
    found = command(subject, form, *options, each_expert=each_expert)
    if found is None:
        return _instead(subject, form)
    near = "the nearest LoRA" if _NEAREST in found else "the same ΔW"
    return f"write {near} in the form {form.name} reads: {found}"


def or_merged(subject: AdapterSubject, form: ServingForm, *options: str) -> str:
    """Return how it is written in the form that the server reads, or a model made of it."""
    found, way = command(subject, form, *options), prepared(subject, form, *options)
    return f"{way}; or {merged(subject)}" if found else way


def command(subject: AdapterSubject, form: ServingForm, *options: str, each_expert: bool = False) -> str | None:
    """Return the commands that write the whole adapter in the form that the server reads; None where none do.

    They have the `options`, and those without which `prepare` refuses anything else that the adapter holds. With
    `each_expert`, LoRA on fused experts is written one by one even if the server reads both.
    """
    root, server = shlex.quote(str(subject.checkpoint.root)), shlex.quote(form.word)
    view = subject.view
    try:
        of_base = (each for found in _OF_BASE for each in found(view, form, subject.base))
        rows = [*view.tokens, *(item.module for item in view.parts(Part.PLAIN, Part.SAVED_MODULE))]
        if refused_ends(rows, form, subject.base):
            return None
        ways = [*in_the_way(view, form, based=False, approximate=False), *of_base]
        fused = bool(fused_experts(view))
    except UnsupportedAdapter:
        return None
    if not all(each.options or (fused and each.hint) for each in ways):
        return None
    needed = dict.fromkeys(option for each in ways for option in each.options)
    if form.gguf or not has_usual_names(view, form):
        needed[WITH_BASE] = None
    asked_for = " ".join(dict.fromkeys((*options, *needed))).replace(WITH_BASE, "--base BASE")
    more = asked_for and f" {asked_for}"
    stacks = form.fused and (form.classes is None or form.classes.takes_stacks(subject.base) is not False)
    if fused and ((each_expert and not form.gguf) or not stacks or _LOWER in asked_for):
        first = f"lora-tool convert {root} --to peft-experts --base BASE -o EXPERTS"
        return f"{first}, then lora-tool prepare EXPERTS --for {server}{more} -o OUT"
    return f"lora-tool prepare {root} --for {server}{more} -o OUT"


def _instead(subject: AdapterSubject, form: ServingForm) -> str:
    """Return what else is done with an adapter that has no form for the server."""
    return next((each.hint for each in tied_in_the_way(subject.view, form, subject.base) if each.hint), merged(subject))
