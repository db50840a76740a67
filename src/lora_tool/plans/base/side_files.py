"""The files next to the weights: config, tokenizer, licence. Copied byte for byte, or written with a reason."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from lora_tool.checkpoints import AdapterDir, Folder, ModelDir, saves_in
from lora_tool.checkpoints.quantised import quantisation_table
from lora_tool.checkpoints.registry import piece_folders
from lora_tool.core.display import and_more
from lora_tool.core.errors import CorruptFile
from lora_tool.core.tensors import FLOAT_NAMES, DType
from lora_tool.formats import generation_config, model_config
from lora_tool.formats.files import json_bytes, read_json, read_object, same_content
from lora_tool.formats.generation_config import FILE_NAME, ends_of, ids, read_generation_config
from lora_tool.formats.model_config import ModelConfig
from lora_tool.formats.tokenizer import SpecialToken, Tokenizer, own_files, read_tokenizer, tokenizer_of, turn_end
from lora_tool.plans.core.steps import SideFile, copied_file

_QUANTISATION, _EXCLUDED = "hf_quant_config.json", "exclude_modules"


def pad_token(adapters: Sequence[AdapterDir], base: ModelDir) -> SpecialToken | None:
    """Return the pad token of the tokenizer that goes with the model: an adapter folder's, else the base's."""
    for owner in (*adapters, base):
        if owner.folder.tokenizer_files:
            found = read_tokenizer(owner.root, owner.folder.tokenizer_files).special("pad_token")
            if found is not None:
                return found
    return None


def config_file(base: ModelDir, changes: Mapping[str, Any]) -> SideFile:
    """Return `config.json`: the base's own bytes where nothing changes, else the base's object with `changes`."""
    config = base.whole_config
    raw = dict(config.raw)
    # the code that it names is not copied, and transformers has the class itself
    own_code = raw.pop("auto_map", None) is not None
    if not own_code and not config.edited and all(raw.get(name) == value for name, value in changes.items()):
        return SideFile(filename=model_config.FILE_NAME, source=config.path, reason="copied from the base")
    inner = raw.get("text_config")
    raw.update(changes)
    if isinstance(inner, dict) and "text_config" in changes:
        raw["text_config"] = {**inner, **changes["text_config"]}
    in_order = "dynamic" in quantisation_table(config)  # patterns of GPTQ: the first that matches counts
    content = json_bytes(raw, indent=2, sort_keys=not in_order)
    reason = "the base's" + (", with " + ", ".join(sorted(changes)) if changes else "")
    reason += ", without auto_map" if own_code else ""
    if config.edited:
        reason += ", with fewer quantised modules" if config.quantization else ", without quantization"
    return SideFile(filename=model_config.FILE_NAME, content=content, reason=reason)


def classifier_changes(
    base: ModelDir, class_name: str, num_labels: int, pad_token_id: int | None, names: Sequence[str] = ()
) -> dict[str, Any]:
    """Return what `config.json` must say for `AutoModelForSequenceClassification` to build the same model.

    `names` are those of the labels, where there are as many; else they keep the base's.
    """
    changes: dict[str, Any] = {"architectures": [class_name], **_labels(base, num_labels, names)}
    if pad_token_id is not None:
        changes["pad_token_id"] = pad_token_id
        # transformers' classifiers read the pad token of the text config, not the outer one
        if isinstance(base.whole_config.raw.get("text_config"), dict):
            changes["text_config"] = {"pad_token_id": pad_token_id}
    return changes


def label_changes(base: ModelDir, num_labels: int) -> dict[str, Any]:
    """Return what `config.json` must say for a class with this number of labels; nothing where it already does."""
    said = base.whole_config.num_labels
    return (
        {} if num_labels == (model_config.TRANSFORMERS_LABELS if said is None else said) else _labels(base, num_labels)
    )


def _labels(base: ModelDir, num_labels: int, names: Sequence[str] = ()) -> dict[str, Any]:
    raw = base.whole_config.raw
    named = len(names) == num_labels
    labels = {str(at): name for at, name in enumerate(names)} if named else raw.get("id2label")
    if not isinstance(labels, dict) or len(labels) != num_labels:
        labels = {str(number): f"LABEL_{number}" for number in range(num_labels)}
    changes: dict[str, Any] = {
        "id2label": labels,
        "label2id": {label: int(number) for number, label in labels.items()},
    }
    if "num_labels" in raw:
        changes["num_labels"] = num_labels
    if num_labels == 1 and raw.get("problem_type") == "single_label_classification":
        changes["problem_type"] = None  # of the base's own head: transformers refuses to load one label with it
    return changes


def dtype_changes(base: ModelDir, dtype: DType | None) -> dict[str, Any]:
    """Return what `config.json` must say for the weights to be loaded in the type that they have."""
    if dtype is None:
        return {}
    # transformers 4 wrote `torch_dtype`, 5 writes `dtype` and reads both
    name = "torch_dtype" if "torch_dtype" in base.whole_config.raw else "dtype"
    return {name: FLOAT_NAMES[dtype]}


def not_merged_beside(adapters: Sequence[AdapterDir]) -> Iterator[str]:
    """Yield a warning for each file of trained weights next to an adapter that does not belong to it."""
    for adapter in adapters:
        for name in adapter.folder.trained_beside:
            yield f"{adapter.root / name} holds trained weights that are not part of the adapter: they are not merged"


def owners(adapters: Sequence[AdapterDir], base: ModelDir) -> list[tuple[Folder, str]]:
    """Return the folders that files are copied from, the first first, each with what to call it."""
    several = len(adapters) > 1
    named = [(each.folder, f"adapter {each.root}" if several else "adapter") for each in adapters]
    return [*named, (base.folder, "base")]


def joined_changes(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes of a config of all `parts`, those inside its `text_config` together."""
    joined: dict[str, Any] = {}
    text: dict[str, Any] = {}
    for part in parts:
        joined |= part
        text |= part.get("text_config", {})
    return joined | {"text_config": text} if text else joined


def copied_files(adapters: Sequence[AdapterDir], base: ModelDir, *, generation: bool) -> Iterator[SideFile]:
    """Yield the tokenizer's files, from the adapters first and the base last, licences and generation config.

    Raises `CorruptFile` for one that is not a regular file inside its folder.
    """
    taken = set()
    for folder, whose in owners(adapters, base):
        for name in (*folder.tokenizer_files, *folder.templates):
            if name not in taken:
                taken.add(name)
                yield copied_file(folder.root, name, f"the {whose}")
    wanted = {*base.folder.licence_files, *((generation_config.FILE_NAME,) if generation else ())}
    for name in base.folder.files:
        if name in wanted:
            yield copied_file(base.root, name, "the base")


def quantisation_file(base: ModelDir, config: ModelConfig) -> Iterator[SideFile]:
    """Yield the file in which modelopt says how weights are quantised: none where, by the new config, none is.

    It also names the modules that only the new config names as plain. Raises `BrokenFile` if it is not a JSON object.
    """
    if _QUANTISATION not in base.folder.files:
        return
    if not config.edited:
        yield copied_file(base.root, _QUANTISATION, "the base")
    elif table := quantisation_table(config):
        raw = read_object(base.root / _QUANTISATION)
        said = raw.get("quantization")
        inner = said if isinstance(said, dict) else {}
        held = inner.get(_EXCLUDED)
        listed = held if isinstance(held, list) else []
        added = [name for name in table.get("ignore") or () if name not in listed]
        content = json_bytes({**raw, "quantization": {**inner, _EXCLUDED: [*listed, *added]}}, indent=2)
        yield SideFile(filename=_QUANTISATION, content=content, reason="the base's, with fewer quantised modules")


def vocabulary_changes(base: ModelDir, size: int) -> dict[str, Any]:
    """Return what `config.json` must say for a model with `size` tokens, where it says it now."""
    raw = base.whole_config.raw
    nested = raw.get("text_config")
    if isinstance(nested, dict) and "vocab_size" in nested:
        changes: dict[str, Any] = {"text_config": {"vocab_size": size}}
        return changes | ({"vocab_size": size} if "vocab_size" in raw else {})
    return {"vocab_size": size}


def other_tokenizers(adapters: Sequence[AdapterDir]) -> Iterator[str]:
    """Yield a warning for each tokenizer file that differs between adapters: the first is copied."""
    names = dict.fromkeys(name for adapter in adapters for name in adapter.folder.tokenizer_files)
    for name in names:
        holders = [adapter.root for adapter in adapters if name in adapter.folder.tokenizer_files]
        if len(holders) > 1 and not all(same_content(holders[0] / name, holder / name) for holder in holders[1:]):
            others = ", ".join(str(holder) for holder in holders[1:])
            yield f"{name} is copied from {holders[0]}; {others} has another one"


def left_out(base: ModelDir, copied: set[str]) -> Iterator[str]:
    """Yield notes on the base's files and folders that are neither weights nor copied, with its code apart."""
    known = {*copied, *saves_in(base.folder), *piece_folders(base.folder)}
    known.update(name.partition("/")[0] for name in copied)
    known.update(file.path.name for file in base.weights.files)
    if base.weights.index:
        known.add(base.weights.index.name)
    others: list[str] = []
    code: list[str] = []
    for names, end in ((base.folder.files, ""), (base.folder.folders, "/")):
        for name in names:
            if name not in known and not name.startswith((".", "__")) and name not in _NOT_WORTH_A_WORD:
                (others if end or not name.endswith(".py") else code).append(f"{name}{end}")
    if others:
        more = and_more(len(others) - _NAMED)
        yield f"not copied from the base: {', '.join(others[:_NAMED])}{more}"
    if code:
        yield f"the base's code is neither run nor copied: {', '.join(code)}"


_NAMED = 40


_NOT_WORTH_A_WORD = ("README.md", "training_args.bin")


def code_named(files: Iterable[SideFile]) -> Iterator[str]:
    """Yield a warning for each copied config that names code (`auto_map`): the code is not copied with it."""
    for file in files:
        if file.source is None or not file.filename.endswith("_config.json"):
            continue
        try:
            table = read_json(file.source)
        except CorruptFile:
            continue  # said by validate; the bytes are copied as they are
        named = table.get("auto_map") if isinstance(table, dict) else None
        if named:
            yield (
                f"{file.filename} names code (`auto_map`), which is not copied: load it from "
                f"{file.source.parent}, or copy the code once you trust it"
            )


def another_dtype(base: ModelDir) -> Iterator[str]:
    """Yield a warning where no weight has the type that the config names: transformers would convert all of them."""
    named = base.whole_config.dtype
    held = {tensor.dtype for tensor in base.tensors.values() if tensor.dtype.is_float}
    if named is not None and held and named not in held:
        found, wanted = ", ".join(sorted(dtype.value for dtype in held)), FLOAT_NAMES[named]
        yield (
            f"{base.root / model_config.FILE_NAME} says {wanted}, but the weights are {found} and keep that dtype; "
            f'`dtype="{wanted}"` merges what transformers and PEFT would load'
        )


# The end tokens of a merged language model: it must stop where the chat template of its training ends a turn.


_EOS = "eos_token_id"


class Generation(Struct, frozen=True, kw_only=True):
    """The generation settings that change with the tokenizer of a merged language model."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Changes of `config.json`."""
    file: SideFile | None = None
    """`generation_config.json`, where it is not the base's own."""
    notes: tuple[str, ...] = ()


SAME_GENERATION = Generation()
"""Where nothing changes."""


def generation_of(adapters: Sequence[AdapterDir], base: ModelDir) -> Generation:
    """Return what changes where the tokenizer that is written is not the one that the base is set for.

    As transformers' Trainer aligns a model before it trains it, bos, eos and pad are the tokenizer's. The base's ends
    stay, and what ends a turn of the chat template comes to them: the adapter's, or the base's own, which an adapter
    without a tokenizer was trained with.
    """
    if base.config is None:
        return SAME_GENERATION
    tokenizer = written_tokenizer(adapters, base)
    named = {f"{role}_id": tokenizer.special(role) for role in ("bos_token", "eos_token", "pad_token")}
    special = {name: token.id for name, token in named.items() if token is not None}
    old = read_generation_config(base.root)
    ends, end = ends_of(base.config, old), turn_end(tokenizer)
    more = [special[_EOS]] if _EOS in special else []
    note = None
    if end is not None and ends and end.ids.isdisjoint(ends):
        more.append(end.token.id)
        stops = f"the base stops only at {', '.join(map(str, ends))}"
        text = f"`{end.token.token}` ({end.token.id}) as well: {end.token.path} ends turns with it, but {stops}"
        note = f"generation stops at {text}"
    return Generation(
        config=_config_changes(base.config, special, more, no_generation=not old),
        file=_file(old, special, more),
        notes=(note,) if note else (),
    )


def written_tokenizer(adapters: Sequence[AdapterDir], base: ModelDir) -> Tokenizer:
    """Return the tokenizer of the model that is written: each file from the first folder that has it."""
    paths: dict[str, Path] = {}
    for folder in (base.folder, *(each.folder for each in reversed(adapters))):
        paths |= own_files(folder.root, folder.tokenizer_files)
    return tokenizer_of(paths)


def _config_changes(
    config: ModelConfig, special: Mapping[str, int], more: Sequence[int], *, no_generation: bool
) -> dict[str, Any]:
    """Return what `config.json` must say, in its `text_config` where that says it now.

    It names all ends with `no_generation` config, else only the tokenizer's: `generation_config.json` has all.
    """
    inner = config.raw.get("text_config")
    if isinstance(inner, dict) and not special.keys() & config.raw.keys():
        changes = _changed(inner, special, _config_ends(inner, more, no_generation=no_generation))
        return {"text_config": changes} if changes else {}
    return _changed(config.raw, special, _config_ends(config.raw, more, no_generation=no_generation))


def _config_ends(table: Mapping[str, Any], more: Sequence[int], *, no_generation: bool) -> Sequence[int]:
    known = ids(table.get(_EOS))
    if no_generation:
        return (*known, *more)
    return known if not more or more[0] in known else more[:1]


def _file(old: Mapping[str, Any], special: Mapping[str, int], more: Iterable[int]) -> SideFile | None:
    changes = _changed(old, special, [*ids(old.get(_EOS)), *more]) if old else {}
    if not changes:
        return None
    content = json_bytes({**old, **changes}, indent=2, sort_keys=True)
    reason = f"the base's, with {', '.join(sorted(changes))} from the tokenizer"
    return SideFile(filename=FILE_NAME, content=content, reason=reason)


def _changed(old: Mapping[str, Any], special: Mapping[str, int], ends: Iterable[int]) -> dict[str, Any]:
    """Return the fields in which `old` differs from the tokenizer's `special` tokens and from `ends`."""
    wanted = list(dict.fromkeys(ends))
    new: dict[str, Any] = {name: number for name, number in special.items() if name != _EOS}
    if {*wanted} != {*ids(old.get(_EOS))}:
        new[_EOS] = wanted if len(wanted) > 1 else wanted[0]
    return {name: value for name, value in new.items() if value != old.get(name)}
