"""The head of a classifier that is made of a judge, or of another classifier: its rows, its type, and what to say of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct, to_builtins
from msgspec.structs import replace

from lora_tool.adapters.view import AdapterView
from lora_tool.checkpoints import AdapterDir, ModelDir, label_names
from lora_tool.core.display import counted
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.keys import PREFIX, parse
from lora_tool.core.tensors import TensorAction, TensorSpec
from lora_tool.formats.tokenizer import Tokenizer, ends_prompts_with
from lora_tool.formats.vocabulary import vocabulary_of
from lora_tool.models.judges import judge_class
from lora_tool.plans.algebra.head_rows import (
    Layer,
    RowShare,
    exact_type,
    head_of_rows,
    is_of_head,
    output_layer,
    score_layer,
)
from lora_tool.plans.base.side_files import pad_token, written_tokenizer
from lora_tool.plans.base.task import names_classifier
from lora_tool.plans.convert.labels import (
    Asked,
    Label,
    label_rows,
    labels_asked,
    other_spellings,
    token_rows,
    tokens_named,
)
from lora_tool.plans.core.steps import Step

_SCORE = "score"
_TASK = "SEQ_CLS"
_TASKS = (None, "CAUSAL_LM", _TASK)
"""The task types of adapters that a head is made of."""


class NewHead(Struct, frozen=True, kw_only=True):
    """The head that is made: which rows it is of, the step that makes it, and what there is to say of it."""

    asked: Asked
    labels: tuple[Label, ...]
    step: Step
    classifier: str | None = None
    """The class of a judge's classifier; None where the input is a classifier."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def is_new(self) -> bool:
        """Whether the input is a judge, which has an output layer and no head."""
        return self.classifier is not None

    @property
    def module(self) -> str:
        """The path of the head."""
        return parse(self.step.out.name).module

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON data, for the manifest."""
        return {"asked": to_builtins(self.asked), "head": [label.as_json() for label in self.labels]}


def head_for(source: AdapterDir | ModelDir, base: ModelDir, view: AdapterView | None, asked: Asked) -> NewHead:
    """Return the head that is asked for, of a model, or of an adapter, whose `view` it is, and its base. Reads its rows.

    Raises `UnsupportedAdapter` and `IncompatibleBase` for what has no such head, `WrongValue` where no tokens are known.
    """
    adapters = () if view is None else (view.adapter,)
    if view is not None and view.config.task_type not in _TASKS:
        raise UnsupportedAdapter(
            f"{view.config.path}: task_type {view.config.task_type}: expected an adapter of a causal LM or of a classifier",
            hint="give the judge, or the reward model",
        )
    if _classifies(base, view):
        layer = score_layer(base, view)
        names = _label_names(base, layer, view)
        each = (Label(name=name, terms=((name, at, asked.scale),)) for at, name in enumerate(names))
        labels = labels_asked(asked, label_rows(names, source.root)) or tuple(each)
        return _made(source, layer, asked, labels, classifier=None)
    found = judge_class(base.whole_config)
    layer = output_layer(base, view)
    tokenizer = written_tokenizer(adapters, base)
    words = vocabulary_of(tokenizer)
    if words is None:
        raise UnsupportedAdapter(
            f"{source.root}: no tokenizer with a vocabulary lies in the folder, so lora-tool cannot tell which rows its "
            "tokens have",
            hint="copy the tokenizer of the training into it",
        )
    asked = tokens_named(base, words, asked)
    labels = labels_asked(asked, token_rows(words, layer.weight.shape[0]))
    head = _made(source, layer, asked, labels, classifier=found.classifier, factor=found.factor)
    notes = (*other_spellings(words, labels), *_without_bias(layer, labels, found.factor))
    return replace(head, notes=(*head.notes, *notes), warnings=tuple(_padding(tokenizer, adapters, base)))


def _classifies(base: ModelDir, view: AdapterView | None) -> bool:
    """Return whether the input has a head with labels already."""
    if view is not None and (view.config.task_type == _TASK or any(map(is_of_head, view.saved))):
        return True
    return names_classifier(base.whole_config.architectures) and (view is None or view.config.task_type is None)


def _label_names(base: ModelDir, layer: Layer, view: AdapterView | None) -> list[str]:
    """Return the names of a classifier's labels: its manifest's or config's, where it has as many as the head has rows."""
    rows = layer.weight.shape[0]
    table = base.whole_config.raw.get("id2label")
    named = {int(at): str(label) for at, label in table.items()} if isinstance(table, dict) else {}
    own = () if view is None else label_names(view.adapter)
    if len(own) == rows:
        return [*own]
    return [named[at] if named.keys() == {*range(rows)} else f"LABEL_{at}" for at in range(rows)]


def _made(
    source: AdapterDir | ModelDir,
    layer: Layer,
    asked: Asked,
    labels: tuple[Label, ...],
    *,
    classifier: str | None,
    factor: float = 1.0,
) -> NewHead:
    rows = [
        [RowShare(layer=layer, row=row, coefficient=coefficient * factor) for _, row, coefficient in label.terms]
        for label in labels
    ]
    op, stored = head_of_rows(rows), layer.weight.dtype
    exact = exact_type(op, stored)
    # loaders of quantised weights keep every plain one in its type, and a hidden state of 16 bits meets no float32 head
    quantised = isinstance(source, ModelDir) and source.whole_config.quantization is not None
    module = _SCORE if classifier is not None else layer.module
    name = f"{module}.weight" if isinstance(source, ModelDir) else f"{PREFIX}{module}.weight"
    out = TensorSpec(name=name, dtype=stored if quantised else exact, shape=op.shape)
    reason = f"rows of {layer.module}: {'; '.join(map(str, labels))}"
    step = Step(out=out, op=op, action=TensorAction.COMPUTED, reason=reason)
    notes = [f"{module}: {counted(len(labels), 'label')}, {'; '.join(f'{label.name} = {label}' for label in labels)}"]
    if exact is not stored:
        rounded = (
            "rounded, because loaders of quantised weights take no other type"
            if quantised
            else "which a loader may round"
        )
        notes.append(f"{module} is {out.dtype}, {rounded}: {stored} does not hold its values")
    if asked.scale < 0:
        notes.append("a negative scale turns the order of the scores round")
    return NewHead(asked=asked, labels=labels, step=step, classifier=classifier, notes=tuple(notes))


def _without_bias(layer: Layer, labels: Sequence[Label], factor: float) -> Iterator[str]:
    """Yield by which constant one score is lower without the output layer's bias, which `score` has no place for.

    Raises `UnsupportedAdapter` where it changes the order of several labels.
    """
    if layer.bias is None:
        return
    from lora_tool.formats.stored_numbers import numbers  # numpy, only where values are read

    values = numbers(layer.bias)
    constants = {sum(float(values[row]) * number * factor for _, row, number in label.terms) for label in labels}
    if len(constants) > 1:
        raise UnsupportedAdapter(
            f"{layer.bias.path}: `{layer.bias.name}` differs between the labels, and a classifier's `{_SCORE}` has no bias: "
            "another label could win",
            hint="make one score, which the bias moves by a constant: `yes=T`, `no=T`",
        )
    (constant,) = constants
    if constant:
        yield f"without `{layer.bias.name}`: every score is {constant:.9g} lower than the difference of the logits"


_NO_PAD = (
    "no pad_token_id: neither tokenizer nor base config names a pad token, so the classifier can only score one text at a "
    "time; set pad_token in tokenizer_config.json and convert again"
)


def _padding(tokenizer: Tokenizer, adapters: Sequence[AdapterDir], base: ModelDir) -> Iterator[str]:
    """Yield what is wrong with the pad token: transformers scores the last token that is another."""
    pad = pad_token(adapters, base)
    if pad is None:
        if base.whole_config.pad_token_id is None:
            yield _NO_PAD
        return
    if ends_prompts_with(tokenizer, pad):
        yield (
            f"prompts of the chat template end in the pad token, `{pad.token}`: a classifier scores the token before it, "
            "not the one after which the judge answers; set another pad_token in tokenizer_config.json, and convert again"
        )
