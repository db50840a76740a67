"""Converting an adapter, or a judge of any kind: found, planned, written, and read back."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.checkpoints.sources import (
    Reference,
    beside,
    opened,
    opened_adapter,
    opened_model,
    source_of,
    unfetched,
)
from lora_tool.core.choices import codes, flag
from lora_tool.core.errors import NotACheckpoint, UnsupportedAdapter, WrongValue
from lora_tool.core.options import option
from lora_tool.plans.convert.forms import AdapterForm
from lora_tool.plans.convert.labels import Asked, factor, finite
from lora_tool.plans.convert.peft_names import convertible
from lora_tool.plans.core.options import OUTPUT, ResumableOptions
from lora_tool.rules.bases import named_base
from lora_tool.rules.options import IgnoreOptions
from lora_tool.workflows.caller import LIBRARY, Caller, Done
from lora_tool.workflows.writing import carry_out, hashing, require_apart, require_output


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(ResumableOptions, IgnoreOptions):
    """The options of a conversion."""

    out: str | os.PathLike[str] | None = option(
        None, "Folder to write.  [default: FOLDER-peft for the form peft, and so on]", **OUTPUT
    )
    base: Reference | None = option(
        None, "Base model; its modules complete names that lost their prefix.  [default: the config's]", metavar="MODEL"
    )
    reward: bool = option(
        default=False,
        text="Turn the value head beside the adapter into a reward model's score head.",
        parse=flag,
        name="rm",
    )
    yes: str | None = option(
        None, "For seq-cls: the token, or the label, whose logit is the score.", parse=str, metavar="T"
    )
    no: str | None = option(
        None, "For seq-cls: the token, or the label, whose logit is subtracted from it.", parse=str, metavar="T"
    )
    labels: Sequence[str] = option(
        (),
        "For seq-cls: a label and its token, or the label that it was, such as safe=safe. May be repeated.",
        parse=str,
        name="label",
        metavar="NAME=T",
        many=True,
    )
    scale: float = option(1.0, "For seq-cls: multiply the scores by this number.", parse=factor, metavar="C")
    offset: float | None = option(
        None, "For seq-cls: refused, with the server's option that adds it.", parse=finite, metavar="B"
    )
    ignore: Iterable[str] = option((), "Continue despite these findings: LT207.", parse=codes)
    verify: bool = option(
        default=False,
        text="Read samples back and check them before the output gets its name.",
        parse=flag,
        off="no-verify",
    )

    @property
    def asked(self) -> Asked:
        """The head that is asked for. Raises `WrongValue` for options that contradict each other."""
        return Asked(yes=self.yes, no=self.no, labels=tuple(self.labels), scale=self.scale)


def convert(adapter: Reference, to: AdapterForm | str, options: ConvertOptions, caller: Caller = LIBRARY) -> Done:
    """Write `adapter`, PEFT's or MLX-LM's, in the format `to`, with every value as it is.

    "peft" gives tensors the names that PEFT loads, "mlx" is MLX-LM's format, "peft-experts" and "peft-fused" have LoRA
    on experts one by one, or fused. "seq-cls" takes a model, too: rows of the output layer of a judge, or of the head of
    a classifier, become the head of a classifier. Raises `FindingsFound`, `CheckpointError`, `PlanError` for what has no such form,
    `ExecutionError`, `VerificationFailed`, `WrongValue`.
    """
    form = AdapterForm(to)
    if form is AdapterForm.SEQ_CLS:
        return _to_seq_cls(adapter, options, caller)
    if options.asked != Asked():
        raise WrongValue('`yes`, `no`, `label` and `scale` need `to="seq-cls"`: they choose the rows of a head')
    if options.reward and form is not AdapterForm.PEFT:
        raise WrongValue('`reward=True` needs `to="peft"`: it writes a reward adapter in PEFT\'s format')
    if options.out is not None:
        require_output(Path(options.out), options, adapter)
    found = convertible(adapter, options.base)
    out = Path(options.out) if options.out is not None else beside(source_of(found.adapter.root), form)
    require_apart(out, options, found.adapter.root)
    from lora_tool.plans.convert.plan_convert import plan_convert  # after the inputs are known to be right

    with hashing(caller, found.adapter):
        if options.base is None:
            base, why = named_base(found.adapter)
        else:
            base, why = opened_model(options.base, near=found.adapter.root), ""
        plan = plan_convert(
            found.adapter,
            to=form,
            rebuilt=found.rebuilt,
            base=base,
            why_no_base=why,
            reward=options.reward,
            ignore=options.ignore,
        )
        return carry_out(plan, out, options, caller)


def _to_seq_cls(source: Reference, options: ConvertOptions, caller: Caller) -> Done:
    """Write a judge or a classifier, an adapter or a model, as a classifier with the head that is asked for."""
    asked = options.asked
    if options.reward:
        raise WrongValue('`reward=True` takes a value head, which `to="seq-cls"` does not: give `yes=T` and `no=T`')
    if options.offset is not None:
        served = f'{{"logit_mean": {-options.offset:g}, "use_activation": false}}'
        raise UnsupportedAdapter(
            "a classifier's `score` has no bias that could hold an offset; a constant changes no comparison of scores",
            hint=f"the server adds it: vllm serve OUT --pooler-config '{served}'",
        )
    if options.out is not None:
        require_output(Path(options.out), options, source)
    found = _adapter_or_model(source)
    if isinstance(found, ModelDir) and options.base is not None:
        raise WrongValue(f"`base=MODEL` is for adapters, but {found.root} is {found.kind.with_article}")
    out = Path(options.out) if options.out is not None else beside(source_of(found.root), AdapterForm.SEQ_CLS)
    require_apart(out, options, found.root)
    from lora_tool.plans.convert.plan_seq_cls import plan_seq_cls  # after the inputs are known to be right

    with hashing(caller, found):
        base = None
        if isinstance(found, AdapterDir):
            base = named_base(found)[0] if options.base is None else opened_model(options.base, near=found.root)
        return carry_out(plan_seq_cls(found, base, asked, ignore=options.ignore), out, options, caller)


def _adapter_or_model(source: Reference) -> AdapterDir | ModelDir:
    """Return what a path or a Hub id means; of a model on the Hub the weights are downloaded. Raises `CheckpointError`."""
    try:
        found = opened(source)
    except NotACheckpoint:
        if not isinstance(source, str) or unfetched(source).hub_id is None:
            raise
        return opened_model(source)
    return found if isinstance(found, ModelDir) else opened_adapter(found)
