"""LT320: whether a trained language model stops where its chat template ends a turn."""

from __future__ import annotations

from collections.abc import Iterator

from lora_tool.core.report import Severity
from lora_tool.formats import generation_config
from lora_tool.formats.generation_config import ends_of, read_generation_config
from lora_tool.formats.tokenizer import read_tokenizer, turn_end
from lora_tool.models.ends import LANGUAGE_MODELS
from lora_tool.rules.engine.registry import Fault, Need, Unchecked, rule
from lora_tool.rules.engine.subjects import ModelSubject

_TRAINING_FILES = frozenset({"training_args.bin", "trainer_state.json"})


@rule("LT320", Severity.WARNING, on=ModelSubject, needs=frozenset({Need.CONFIG}))
def never_stops(subject: ModelSubject) -> Iterator[Fault | Unchecked]:
    """The model does not stop at the end of a turn.

    What it does: Compares the token that ends a turn in the tokenizer's chat template, or its `eos_token` if there is
    no template, with the `eos_token_id` of `generation_config.json` or `config.json`. It only checks folders that were
    evidently trained or merged, because base models are published with a chat template that they were not trained with.
    Why it matters: The model has learnt to end its answer with that token, but generation continues after it up to the
    maximum length, so the model invents further turns.
    Example: `chat_template.jinja` ends turns with `<|im_end|>` (151645), and `generation_config.json` has
    `"eos_token_id": 151643`.
    What to do: Add the id to `eos_token_id` in `generation_config.json`, which may be a list: `[151643, 151645]`.
    `lora-tool merge` does so with the tokenizer beside the adapter, or else the base's.

    `lora-tool validate --fix` adds it to an existing model.
    """
    model = subject.checkpoint
    config = model.config
    if (
        config is None
        or not _was_trained(subject)
        or not any(name.endswith(LANGUAGE_MODELS) for name in config.architectures)
    ):
        return
    if not model.folder.tokenizer_files:
        yield Unchecked(reason="the folder has no tokenizer, which says what ends a turn")
        return
    generation = read_generation_config(model.root)
    ends, end = ends_of(config, generation), turn_end(read_tokenizer(model.root, model.folder.files))
    if end is not None and ends and not end.ids & {*ends}:
        path = model.root / generation_config.FILE_NAME if generation.get("eos_token_id") is not None else config.path
        listed = ", ".join(map(str, ends))
        message = f"is {listed}, but `{end.token.token}` ({end.token.id}) ends a turn in {end.token.path.name}"
        yield Fault(subject="eos_token_id", message=message, path=path)


def _was_trained(subject: ModelSubject) -> bool:
    folder = subject.checkpoint.folder
    compared = subject.expected is not None or subject.base is not None
    return compared or folder.is_numbered or bool(_TRAINING_FILES & {*folder.files})
