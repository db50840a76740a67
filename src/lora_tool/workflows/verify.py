"""Verifying folders: a merged model compared with its base and adapters, a computed adapter with what it was made of,
a served adapter with its base.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from lora_tool.checkpoints import ModelDir, open_model
from lora_tool.checkpoints.sources import Reference, Wanted, located, opened_adapter, opened_model
from lora_tool.core.choices import flag, proportion
from lora_tool.core.errors import LoraToolError, WrongValue, of_system, require_packages
from lora_tool.core.hub_names import ANYWHERE
from lora_tool.core.options import Options, Section, option
from lora_tool.core.report.model import Report, Unread
from lora_tool.plans.core.options import JobsOptions, SpreadOptions
from lora_tool.rules.bases import named_base
from lora_tool.rules.engine.registry import chosen
from lora_tool.rules.options import SelectOptions
from lora_tool.verification.levels import Level
from lora_tool.verification.verified import Verification
from lora_tool.workflows.caller import LIBRARY, Caller

if TYPE_CHECKING:
    from lora_tool.plans.computed import ComputedInputs
    from lora_tool.verification.pairs import Pairs


@dataclass(frozen=True, kw_only=True)
class PairOptions(Options):
    """Pairs of texts that a reward model ranks, and how well it must. Raises `WrongValue` for a share of no pairs."""

    section = Section.CHECKS

    pairs: str | os.PathLike[str] | None = option(
        None,
        "Also rank these pairs with the reward model: .jsonl with prompt, chosen, rejected.",
        metavar="FILE",
        existing=True,
    )
    min_accuracy: float | None = option(
        None,
        "Fail if the merged model ranks less than this share of `pairs` correctly, such as 0.7.",
        parse=proportion,
        metavar="SHARE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pairs is None and self.min_accuracy is not None:
            raise WrongValue("`min_accuracy=SHARE` needs `pairs=FILE`")


def read_given_pairs(options: PairOptions) -> Pairs | None:
    """Return the pairs, None without any. Raises `CorruptFile` or `BadConfig`, and `MissingDependency`."""
    if options.pairs is None:
        return None
    require_packages(("torch", "transformers", "peft"), extra="merge")  # before hours of merging
    from lora_tool.verification.pairs import read_pairs  # only where given

    return read_pairs(Path(options.pairs), least=options.min_accuracy)


def _server_url(given: object) -> str:
    from lora_tool.verification.openai_server import server_url  # a client of HTTP, where one is wanted

    return server_url(given)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(JobsOptions, SelectOptions, SpreadOptions, PairOptions):
    """The options of a verification. Raises `WrongValue` for prompts that nothing is asked."""

    adapters: Sequence[Reference] = option(
        (),
        f"Adapter that was merged: {ANYWHERE}.  [default: the one in lora_tool.json]",
        name="adapter",
        metavar="ADAPTER",
        many=True,
    )
    base: Reference | None = option(
        None,
        f"Base model: {ANYWHERE}.  [default: the one in lora_tool.json, the adapter or config.json]",
        metavar="MODEL",
    )
    level: Level | str = option(
        Level.FULL,
        'How much is compared: "full", every value, or "sample", samples of every tensor.',
        parse=Level,
        library_only=True,
    )
    logits: bool = option(default=False, text="Also run both models and compare their answers.", parse=flag)
    prompts: str | os.PathLike[str] | Sequence[str] | None = option(
        None,
        "Prompts for `logits` and `served`, in a file: one per line, or .jsonl.  [default: eight short ones]",
        metavar="FILE",
        existing=True,
    )

    served: str | None = option(
        None,
        "Ask this running server (vLLM, SGLang, llama.cpp, …) whether it applies the adapter, instead of comparing "
        "files.",
        parse=_server_url,
        metavar="URL",
    )
    served_name: str | None = option(
        None,
        "The server's name for the adapter.  [default: the one it loaded from this folder, or its only one]",
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts is not None and not self.logits and self.served is None:
            raise WrongValue("`prompts=FILE` needs `logits=True` or `served=URL`")
        if self.served is None and self.served_name is not None:
            raise WrongValue("`served_name=NAME` needs `served=URL`")
        given = {
            "adapters=ADAPTER": self.adapters,
            "pairs=FILE": self.pairs,
            "level=sample": self.level == Level.SAMPLE,
        }
        for argument, value in given.items() if self.served is not None else ():
            if value:
                raise WrongValue(f"`{argument}` is for merged models; `served=URL` asks a server about one adapter")


class VerifiedOne(Struct, frozen=True, kw_only=True):
    """What became of one folder of several: its verification, or the `error` that stopped that."""

    folder: str | Path
    verification: Verification | None = None
    error: LoraToolError | None = None

    @property
    def report(self) -> Report:
        """What was found; an error stands in it as a folder that could not be read."""
        if self.error is not None:
            return Report(unread=(Unread.of(str(self.folder), self.error),))
        return Report() if self.verification is None else self.verification.report


def verify(
    merged: Reference,
    options: VerifyOptions,
    caller: Caller = LIBRARY,
    *,
    open_base: Callable[[Path], ModelDir] = open_model,
) -> Verification:
    """Return the result of comparing the folder `merged` with `base` and `adapters`, by default those in its manifest.

    An adapter that was computed from others is compared with their sum, by QR; options that run models are refused.
    Copied tensors are compared byte by byte, merged ones with W + ΔW computed again in float64. Reads everything once
    (`level` "sample": a small part), writes nothing, runs no code of a checkpoint, and holds a few blocks per worker.
    `open_base` opens the folder of a base that a file names.

    Raises `CheckpointError` for inputs that cannot be found or read, `IncompatibleBase` where they do not fit together,
    `MissingDependency` before anything is compared, `WrongValue` for an argument.
    """
    from lora_tool.plans.computed import find_computed  # after the options are known to be right
    from lora_tool.plans.merge.provenance import find_inputs
    from lora_tool.verification.verifying import verify_inputs

    spread = options.spread
    spread.require()
    if options.served is not None:
        return _verify_served(merged, options.served, options)
    pairs = read_given_pairs(options)
    if isinstance(merged, str | os.PathLike):
        merged = located(merged, Wanted.MODEL).path
    computed = find_computed(merged, options.adapters, base=options.base)
    if computed is not None:
        return _verify_computed(computed, merged, options, caller)
    inputs = find_inputs(merged, base=options.base, adapters=options.adapters, open_base=open_base)
    return verify_inputs(
        inputs,
        level=options.level,
        select=options.select,
        ignore=options.ignore,
        logits=options.logits,
        prompts=_prompts(options),
        pairs=pairs,
        jobs=options.jobs,
        spread=spread,
        watch=caller.progress,
    )


def _verify_served(adapter: Reference, url: str, options: VerifyOptions) -> Verification:
    from lora_tool.verification.served import Question, verify_served  # where it is asked for

    rules = chosen(options.select, options.ignore)
    opened = opened_adapter(adapter)
    base: ModelDir | str | None
    base, why_no_base = (
        named_base(opened) if options.base is None else (opened_model(options.base, near=opened.root), "")
    )
    question = Question(url=url, name=options.served_name, prompts=_prompts(options), run_models=options.logits)
    return verify_served(opened, base or why_no_base, question, rules)


def _verify_computed(
    computed: ComputedInputs, folder: Reference, options: VerifyOptions, caller: Caller
) -> Verification:
    from lora_tool.verification.verifying import verify_computed  # for such adapters

    for given, name in ((options.logits, "logits=True"), (options.pairs is not None, "pairs=FILE")):
        if given:
            where = folder if isinstance(folder, str | os.PathLike) else folder.root
            raise WrongValue(f"`{name}` is for merged models, but {where} was not merged")
    return verify_computed(
        computed,
        level=options.level,
        select=options.select,
        ignore=options.ignore,
        jobs=options.jobs,
        watch=caller.progress,
    )


def _prompts(options: VerifyOptions) -> Sequence[str] | None:
    if not isinstance(options.prompts, str | os.PathLike):
        return options.prompts
    from lora_tool.verification.prompts import read_prompts  # only where given

    return read_prompts(Path(options.prompts))


def verify_each(
    folders: Sequence[str | Path], options: VerifyOptions, caller: Caller = LIBRARY
) -> tuple[VerifiedOne, ...]:
    """Return what became of each folder: a base that several name is opened once, and what stops one stops no other.

    Raises `WrongValue` for adapters, which are those of one folder, and `CheckpointError` for a base that is given and
    cannot be read.
    """
    if options.adapters:
        raise WrongValue("`adapters=ADAPTER` applies to one folder; verify it separately")
    if options.base is not None:
        options = replace(options, base=opened_model(options.base))
    open_base = cache(open_model)
    return tuple(_verified(folder, options, caller, open_base) for folder in folders)


def _verified(
    folder: str | Path, options: VerifyOptions, caller: Caller, open_base: Callable[[Path], ModelDir]
) -> VerifiedOne:
    try:
        return VerifiedOne(folder=folder, verification=verify(folder, options, caller, open_base=open_base))
    except LoraToolError as error:
        return VerifiedOne(folder=folder, error=error)
    except OSError as failed:
        return VerifiedOne(folder=folder, error=of_system(failed, folder))
