"""Whether a running server applies an adapter: its answers with the adapter, those of the base, and PEFT's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.adapters.targeting import trained_for
from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.checkpoints.sources import source_of
from lora_tool.core.display import size
from lora_tool.core.errors import LoraToolError, MissingDependency, UnsupportedAdapter, require_packages
from lora_tool.core.progress import told
from lora_tool.core.report import Severity
from lora_tool.models.ends import head_of
from lora_tool.rules.engine.registry import Rule, chosen
from lora_tool.rules.judging import Judge
from lora_tool.rules.serving.asked import ServedEvidence, ServedSubject
from lora_tool.verification.levels import Level
from lora_tool.verification.openai_server import OpenAIServer, Prompt, farthest
from lora_tool.verification.prompts import asked_of
from lora_tool.verification.served_names import served_models
from lora_tool.verification.verified import Verification

if TYPE_CHECKING:
    from lora_tool.verification.predictions import Predictions

_LARGE = 32 << 30
"""Bytes of a base from which on it is run only where that is asked for."""
_SLOW = 2 << 30
_CLASSIFIER = "SEQ_CLS"
_CHANGES_NOTHING = "LT208"
"""The rule about adapters whose ΔW is zero."""


class Question(Struct, frozen=True, kw_only=True):
    """What a server is asked: its address, its name for the adapter where that was given, and the prompts.

    `run_models` has any base compared with PEFT; without it only one that is small enough, if PEFT is installed.
    """

    url: str
    name: str | None = None
    prompts: Sequence[str] | None = None
    run_models: bool = False
    scores: bool = False
    """Whether the adapter is a classifier's, whose scores are compared instead of next tokens."""


def verify_served(adapter: AdapterDir, base: ModelDir | str, question: Question, rules: Sequence[Rule]) -> Verification:
    """Return what a server answers with the adapter, judged by those of the `rules` that judge this.

    `base` is a sentence where there is none to compute with. Raises `ServerError` and `PlanError` for a server that
    cannot be asked, `UnsupportedAdapter` for an adapter of another task, `MissingDependency` if `run_models` is set.
    """
    task = None if adapter.config is None else trained_for(adapter.config)
    if task not in (None, "CAUSAL_LM", _CLASSIFIER):
        raise UnsupportedAdapter(
            f"{adapter.root} was trained for {task}: `served=URL` compares the next tokens of language models, and the "
            "scores of classifiers"
        )
    found = _asked(adapter, base, replace(question, scores=task == _CLASSIFIER))
    here = None if isinstance(base, str) else str(base.root)
    subject = ServedSubject(checkpoint=adapter, served=found, base=here)
    judge = Judge(rules=tuple(rule for rule in rules if rule.on is ServedSubject), deep=False)
    return Verification(
        merged=adapter.root,
        base=found.base,
        adapters=(),
        level=Level.FULL,
        precision=None,
        evidence={},
        report=judge.folder(subject),
        served=found,
    )


def _asked(adapter: AdapterDir, base: ModelDir | str, question: Question) -> ServedEvidence:
    server = OpenAIServer(url=question.url)
    ask = server.score if question.scores else server.predict
    ours, plain = served_models(server, _places(adapter), _places_of_base(adapter, base), question.name)
    predictions, why_not = _predictions(adapter, base, question)
    texts, what = asked_of(question.prompts)
    prompts: Sequence[Prompt] = texts if predictions is None else predictions.ids
    # in turn, so that a cache or other work of the server meets both
    rounds = [[[ask(each.fields, prompt) for each in (plain, ours)] for prompt in prompts] for _ in range(2)]
    (first_base, first), (second_base, second) = (tuple(zip(*answers, strict=True)) for answers in rounds)
    peft = None
    if predictions is not None:
        try:
            peft = predictions.compared(first, first_base)
        except UnsupportedAdapter as error:
            why_not = str(error)
    return ServedEvidence(
        url=question.url,
        adapter=ours.name,
        base=plain.name,
        program=ours.program,
        inputs=what if predictions is None else predictions.what,
        what="scores" if question.scores else "log probabilities",
        values=sum(map(len, first)),
        moved=min(farthest(first, first_base), farthest(second, second_base)),
        noise=max(farthest(first, second), farthest(first_base, second_base)),
        no_effect=_changes_nothing(adapter, has_head=question.scores),
        peft=peft,
        why_no_peft=why_not,
    )


def _places(checkpoint: AdapterDir | ModelDir) -> frozenset[str]:
    """Return what a server may call the folder: its path, and its id on the Hub."""
    source = source_of(checkpoint.root)
    return frozenset({str(source.path), source.hub_id or str(source.path)})


def _places_of_base(adapter: AdapterDir, base: ModelDir | str) -> frozenset[str]:
    named = adapter.config.base_model if adapter.config is not None else None
    return (frozenset() if isinstance(base, str) else _places(base)) | frozenset(filter(None, [named]))


def _predictions(adapter: AdapterDir, base: ModelDir | str, question: Question) -> tuple[Predictions | None, str]:
    """Return what runs the base with PEFT, or why nothing does. Raises as `_prepared` where it was asked for."""
    try:
        return _prepared(adapter, base, question), ""
    except LoraToolError as error:  # of an adapter that does not fit the base, too: PEFT would leave parts of it out
        if question.run_models:
            raise
        return None, f"{error}; {error.hint}" if isinstance(error, MissingDependency) else str(error)


def _prepared(adapter: AdapterDir, base: ModelDir | str, question: Question) -> Predictions:
    """Return what runs the base with PEFT.

    Raises `MissingDependency`, `UnsupportedAdapter` for what is not run, and as `plan_merge` for what does not fit.
    """
    if isinstance(base, str):
        raise UnsupportedAdapter(base)
    require_packages(("torch", "transformers", "peft"), extra="merge")
    if base.weights.nbytes > _LARGE and not question.run_models:
        raise UnsupportedAdapter(f"{base.root} has {size(base.weights.nbytes)}; `logits=True` runs it all the same")
    from lora_tool.verification.predictions import prepare  # torch, where it is installed

    if base.weights.nbytes > _SLOW:
        told(f"running {base.root} with PEFT, whose answers the server's are compared with …")
    return prepare(adapter, base, question.prompts, scores=question.scores)


def _changes_nothing(adapter: AdapterDir, *, has_head: bool) -> bool:
    """Whether ΔW is zero, and nothing is saved beside it; `has_head`: the base that is served has the adapter's head."""
    judge = Judge(rules=chosen([_CHANGES_NOTHING]))
    subject = judge.subject(adapter)
    view = subject.view
    beside = view.tokens or [name for name in view.saved if not (has_head and head_of(name.rpartition(".")[0]))]
    return not beside and bool(judge.folder(subject).at_least(Severity.ERROR))
