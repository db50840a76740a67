"""The end tokens of a merged language model: it must stop where the chat template of its training ends a turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.formats.files import json_bytes
from lora_tool.formats.generation_config import FILE_NAME, ends_of, ids, read_generation_config
from lora_tool.formats.model_config import ModelConfig
from lora_tool.formats.tokenizer import Tokenizer, own_files, tokenizer_of, turn_end
from lora_tool.plans.core.steps import SideFile

_EOS = "eos_token_id"


class Generation(Struct, frozen=True, kw_only=True):
    """The generation settings that change with the tokenizer of a merged language model."""

    config: Mapping[str, Any] = field(default_factory=dict)
    """Changes of `config.json`."""
    file: SideFile | None = None
    """`generation_config.json`, where it is not the base's own."""
    notes: tuple[str, ...] = ()


def generation_of(adapters: Sequence[AdapterDir], base: ModelDir) -> Generation:
    """Return what changes where the tokenizer that is written is not the one that the base is set for.

    As transformers' Trainer aligns a model before it trains it, bos, eos and pad are the tokenizer's. The base's ends
    stay, and what ends a turn of the chat template comes to them: the adapter's, or the base's own, which an adapter
    without a tokenizer was trained with.
    """
    if base.config is None:
        return Generation()
    tokenizer = _written(adapters, base)
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
        config=_config_changes(base.config, special, more, alone=not old),
        file=_file(old, special, more),
        notes=(note,) if note else (),
    )


def _written(adapters: Sequence[AdapterDir], base: ModelDir) -> Tokenizer:
    """Return the tokenizer that lies beside the merged model: each file from the first folder that has it."""
    paths: dict[str, Path] = {}
    for folder in (base.folder, *(each.folder for each in reversed(adapters))):
        paths |= own_files(folder.root, folder.tokenizer_files)
    return tokenizer_of(paths)


def _config_changes(
    config: ModelConfig, special: Mapping[str, int], more: Sequence[int], *, alone: bool
) -> dict[str, Any]:
    """Return what `config.json` must say, in its `text_config` where that says it now.

    It names the tokenizer's end where `generation_config.json` has the others, and all of them where it stands `alone`.
    """
    inner = config.raw.get("text_config")
    if isinstance(inner, dict) and not special.keys() & config.raw.keys():
        changes = _changed(inner, special, _config_ends(inner, more, alone=alone))
        return {"text_config": changes} if changes else {}
    return _changed(config.raw, special, _config_ends(config.raw, more, alone=alone))


def _config_ends(table: Mapping[str, Any], more: Sequence[int], *, alone: bool) -> Sequence[int]:
    known = ids(table.get(_EOS))
    if alone:
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
