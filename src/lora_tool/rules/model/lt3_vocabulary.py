"""LT309 and LT310: layers and token rows that a model's config or tokenizer expects, and the weights do not have."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.checkpoints.quantised import as_matrices
from lora_tool.core.display import named, some
from lora_tool.core.keys import Part
from lora_tool.core.report import Severity
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.model_config import ModelConfig
from lora_tool.formats.tokenizer import tokens_in_use
from lora_tool.models import architecture_of
from lora_tool.models.ends import INPUTS, MATRIX, is_input
from lora_tool.rules.engine.registry import Fault, Need, Unchecked, rule
from lora_tool.rules.engine.subjects import AdapterSubject, ModelSubject, Subject

_WHOLE = frozenset({Need.WEIGHTS, Need.CONFIG})
_FEWER_LAYERS = frozenset({"albert", "efficientnet"})
"""Model types that use the weights of one layer for several, or count the parts of a layer."""
MORE_ROWS = frozenset({"cpmant", "mllama", "mllama_text_model", "molmo2_text"})
"""Model types that have rows for images or prompts, too, which `vocab_size` does not count."""
_INPUT_WEIGHTS = tuple(f"{name}.weight" for name in INPUTS)


@rule("LT309", Severity.ERROR, on=Subject, needs=_WHOLE | {Need.BASE_IN_PART})
def token_without_row(subject: Subject) -> Iterator[Fault]:
    """A special token has no row in the embeddings.

    What it does: Compares the ids of the tokenizer's pad and eos token and of the control tokens in its chat template,
    and a model's `pad_token_id`, with the rows of the embeddings: the adapter's if it has them, else the base's.
    Why it matters: Tokens were added to the tokenizer, but the embeddings were not resized, or were resized and not
    saved. The first padded batch or chat fails with an IndexError, or on a GPU with "device-side assert triggered"; most
    models cannot even be built with such a `pad_token_id`.
    Example: `tokenizer.json` gives `[PAD]` the id 32000, but `embed_tokens.weight` has 32,000 rows.
    What to do: Use an existing token as the pad token (`tokenizer.pad_token = tokenizer.eos_token`), or resize the
    embeddings (`model.resize_token_embeddings(len(tokenizer))`) and save them with the adapter. If training resized
    them and saved no row, the trained rows are lost: train again with `save_embedding_layers=True`.

    If the tokenizer's pad token has a row, `lora-tool validate --fix` writes its id into a model's config.
    """
    checkpoint = subject.checkpoint
    rows = _largest(subject)
    if rows is None or not isinstance(checkpoint, AdapterDir | ModelDir):
        return
    lacking = [
        (role, token) for role, token in tokens_in_use(checkpoint.root, checkpoint.folder.files) if token.id >= rows
    ]
    for role, same in itertools.groupby(lacking, lambda each: each[0]):
        tokens = [token for _, token in same]
        message = f"`{tokens[0].token}` has the id {tokens[0].id:,}, but the embeddings have {rows:,} rows"
        more = f"; so it is with {named([token.token for token in tokens[1:]])}" if tokens[1:] else ""
        yield Fault(subject=role, message=f"{message}{more}", path=tokens[0].path)
    if "pad_token" not in dict(lacking) and isinstance(checkpoint, ModelDir) and checkpoint.config is not None:
        pad = checkpoint.config.pad_token_id
        if pad is not None and pad >= rows:
            message = f"is {pad:,}, but the embeddings have {rows:,} rows"
            yield Fault(subject="pad_token_id", message=message, path=checkpoint.config.path)


def _largest(subject: Subject) -> int | None:
    """Return how many tokens the embeddings know, None where there are none to look at."""
    if isinstance(subject, AdapterSubject):
        whole = subject.view.parts(Part.PLAIN, Part.SAVED_MODULE, Part.BASE_LAYER)
        own = [(item.module, item.tensor, 0) for item in whole]
        embeddings = subject.view.found(lambda layer: [layer] if layer.embedding else [])
        own += [(layer.target, layer.a, 1) for layer in embeddings if layer.a]
        rows = [held.shape[at] for path, held, at in own if is_input(path) and len(held.shape) == MATRIX]
        base = {} if subject.base is None else embedding_rows(as_matrices(subject.base).tensors)
        return max([*rows, *base.values()], default=None)
    held = subject.matrices if isinstance(subject, ModelSubject) else subject.tensors
    return max(embedding_rows(held).values(), default=None)


def embedding_rows(tensors: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Return the rows of each input embedding."""
    return {
        name: tensor.shape[0]
        for name, tensor in tensors.items()
        if name.endswith(_INPUT_WEIGHTS) and is_input(name.removesuffix(".weight")) and len(tensor.shape) == MATRIX
    }


@rule("LT310", Severity.ERROR, on=ModelSubject, needs=_WHOLE)
def not_whole(subject: ModelSubject) -> Iterator[Fault | Unchecked]:
    """Weights that do not match the config.

    What it does: Compares `num_hidden_layers` in `config.json` with the layers in the weights, for encoder and decoder
    separately, and `vocab_size` with the embedding's rows.
    Why it matters: transformers initialises missing layers at random, with only a log line, and the model talks
    nonsense. Another number of rows makes loading fail. Config and weights belong to two models, or a shard was lost
    and the index rewritten.
    Example: `config.json` has `"num_hidden_layers": 32`, but the weights have only layers 0 to 15.
    What to do: Copy the config and the weights again, from one place.
    """
    config = subject.plain.config
    if config is not None and config.quantization:
        yield Unchecked(reason=f"lora-tool does not read weights quantised by {config.quantization}")
    elif config is not None and config.custom_code and architecture_of(config.model_type or "") is None:
        yield Unchecked(reason="the model has its own code, which alone says how many layers and rows it has")
    elif config is not None:
        yield from _other_than_the_config(subject, config)


def _other_than_the_config(subject: ModelSubject, config: ModelConfig) -> Iterator[Fault]:
    path = str(config.path)
    if config.model_type not in _FEWER_LAYERS:
        yield from _lost_layers(subject, config)
    found = None if config.model_type in MORE_ROWS else vocabulary_without_rows(subject)
    if found is not None:
        name, count = found
        message = f"is {config.vocab_size:,}, but `{name}` has {count:,} rows"
        yield Fault(subject="vocab_size", message=message, path=path)


def _lost_layers(subject: ModelSubject, config: ModelConfig) -> Iterator[Fault]:
    from lora_tool.models.layers import length, stacks  # only models need it

    found = stacks(subject.shapes)
    lengths = {stack: count for stack, layers in found.items() if (count := length(config, stack, layers)) is not None}
    for stack, wanted in lengths.items():
        lost = sorted(set(range(min(wanted, 100_000))) - found[stack].keys())
        if lost:
            where = f"layer {some(lost)}" + (f" of `{stack}`" if len(lengths) > 1 else "")
            message = f"is {wanted}, but the weights have no tensor of {where}"
            yield Fault(subject="num_hidden_layers", message=message, path=config.path)


def vocabulary_without_rows(subject: ModelSubject) -> tuple[str, int] | None:
    """Return an embedding and its rows, where none has as many as the config's `vocab_size`."""
    config, rows = subject.plain.config, embedding_rows(subject.matrices)
    if not rows or config is None or config.vocab_size is None or config.vocab_size in rows.values():
        return None
    return next(iter(rows.items()))
