"""The names that PEFT gives an adapter's tensors, for an adapter with other names."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from lora_tool.adapters.dialects import foreign_in, translated
from lora_tool.adapters.mlx import is_mlx, read_mlx
from lora_tool.adapters.readings import Readings
from lora_tool.adapters.view import AdapterView, bare_path, view_of
from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.checkpoints.folders import read_folder
from lora_tool.checkpoints.sources import Reference, opened_adapter, opened_model
from lora_tool.core import keys
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.keys import PREFIX, Part
from lora_tool.core.progress import decided
from lora_tool.core.tensors import StoredTensor
from lora_tool.formats.adapter_config import AdapterConfig
from lora_tool.formats.files import expanded
from lora_tool.formats.patterns import is_path
from lora_tool.formats.stored import same_values
from lora_tool.models.model_tensors import ModuleNames, module_names
from lora_tool.plans.base.task import auto_class_for
from lora_tool.rules.bases import named_base


class PeftNames(Struct, frozen=True, kw_only=True):
    """An adapter's tensors by the names that PEFT loads."""

    tensors: Mapping[str, StoredTensor]
    """PEFT's name → the tensor, by its name in the file."""
    dropped: tuple[tuple[str, str], ...]
    """Names in the file that PEFT has no place for, each with the reason."""
    config: AdapterConfig
    """The adapter's config, in which no module has a wrapper in its path either."""
    changes: Mapping[str, Any]
    """The fields of `adapter_config.json` that become others."""
    why: tuple[str, ...] = ()
    """What about them changes, in words."""


def peft_names(view: AdapterView, model: ModuleNames | None, hint: str) -> PeftNames:
    """Return the adapter's tensors by the names that PEFT loads; `model` are its base's modules, where they are known.

    Raises `UnsupportedAdapter` for a file of several adapters, for names that fit two readings, with the `hint`, and
    where two tensors with different values are one for PEFT.
    """
    _require_one_adapter(view)
    readings = {prefixed: Readings(view, model, prefixed=prefixed).chosen(hint) for prefixed in (True, False)}
    tensors = view.adapter.tensors
    names: dict[str, str] = {}
    dropped: list[tuple[str, str]] = []
    whole_paths: dict[str, str] = {}
    for name, key in view.adapter.keys.items():
        if key.part is Part.ORIGINAL_MODULE:
            dropped.append((name, "the frozen original of a module that was trained whole"))
            continue
        path = whole_paths[view.paths[key.module]] = readings[key.prefixed].path(view.paths[key.module])
        first = names.setdefault(replace(key, module=path).canonical, name)
        if first is name:
            continue
        if not same_values(tensors[first], tensors[name]):
            raise UnsupportedAdapter(
                f"`{name}` and `{first}` would be one tensor of the adapter, but have different values",
                hint="remove the one that was not trained, or save the adapter again with PEFT",
            )
        dropped.append((name, f"the same as `{first}`"))
    changes = dict(_changes(view.config, whole_paths))
    return PeftNames(
        tensors={new: tensors[name] for new, name in names.items()},
        dropped=tuple(dropped),
        config=replace(view.config, **{_ATTRIBUTES.get(name, name): value for name, value in changes.items()}),
        changes={name: list(value) if isinstance(value, tuple) else value for name, value in changes.items()},
        why=(f"{', '.join(changes)} as the tensors are named",) if changes else (),
    )


def _require_one_adapter(view: AdapterView) -> None:
    named = sorted({layer.adapter_name for layer in view.layers if layer.adapter_name is not None})
    if len(named) > 1:
        raise UnsupportedAdapter(
            f"{view.adapter.root} holds {len(named)} adapters ({', '.join(named)}), but PEFT loads only one from a file",
            hint="save each into its own folder: model.save_pretrained(FOLDER, selected_adapters=[NAME])",
        )


_ATTRIBUTES = {"trainable_token_indices": "token_indices"}
"""Field of the file → its name in `AdapterConfig`, where the two differ."""
_ONE_VALUE = "write the module's path once, without the wrapper, with the value that was trained"
_LISTS = ("target_modules", "exclude_modules", "modules_to_save", "target_parameters")
_TABLES = ("rank_pattern", "alpha_pattern", "trainable_token_indices")


def _changes(config: AdapterConfig, whole_paths: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield the fields in which paths have wrappers or prefixes, without them; regular expressions stay as they are.

    One of the `whole_paths`, those of the adapter's modules, becomes the path that the module gets, if it is of one
    layer: others may be the ends of several.
    """

    def meant(entry: str) -> str:
        bare = _bare(entry)
        return bare if keys.split_layer(bare)[0] is None else whole_paths.get(bare, bare)

    for name in _LISTS:
        entries = getattr(config, name)
        if isinstance(entries, tuple) and (bare := tuple(map(meant, entries))) != entries:
            yield name, tuple(dict.fromkeys(bare))
    for name in _TABLES:
        renamed: dict[str, Any] = {}
        table = getattr(config, _ATTRIBUTES.get(name, name))
        for key, value in table.items():
            if renamed.setdefault(meant(key), value) != value:
                raise UnsupportedAdapter(f"{config.path}: `{name}` has two values for `{meant(key)}`", hint=_ONE_VALUE)
        if renamed != table:
            yield name, renamed


def _bare(entry: str) -> str:
    return bare_path(keys.unwrapped(entry)) if is_path(entry) else entry


# An adapter that is to be converted, PEFT's or MLX-LM's, as PEFT has it.


class Convertible(Struct, frozen=True, kw_only=True):
    """An adapter that is to be converted, as PEFT has it."""

    adapter: AdapterDir
    rebuilt: Mapping[str, Any] | None = None
    """The fields of PEFT's config, of an adapter of another program."""


def convertible(reference: Reference, base: Reference | None = None) -> Convertible:
    """Return the adapter that is named: PEFT's, that of a dialect, or MLX-LM's in a folder here.

    Raises as `opened_adapter`, `translated`, `read_mlx`.
    """
    folder = expanded(reference) if isinstance(reference, str | os.PathLike) else None
    if folder is None or not folder.is_dir() or not is_mlx(read_folder(folder)):
        return _from_dialect(opened_adapter(reference), base)
    model = None if base is None else opened_model(base, near=folder)
    found = read_mlx(folder, None if model is None else model.tensors)
    named = {} if model is None else {"base_model_name_or_path": str(model.root.resolve())}
    return Convertible(adapter=found.adapter, rebuilt={**found.fields, **named})


def _from_dialect(adapter: AdapterDir, base: Reference | None) -> Convertible:
    if not foreign_in(adapter):  # as nearly always
        return Convertible(adapter=adapter)
    model = named_base(adapter)[0] if base is None else opened_model(base, near=adapter.root)
    found = translated(view_of(adapter), model)
    return Convertible(adapter=found.adapter, rebuilt=found.fields)


# The modules of an adapter's base model, which give names their lost prefix.


def modules_of(base: ModelDir | None, adapter: AdapterConfig) -> ModuleNames | None:
    """Return the modules of the base as the adapter's class has them: by the tables, else by transformers' own class.

    None without a base, for models of custom code, and where transformers is needed and not installed or cannot tell.
    """
    if base is None or base.config is None:
        return None
    known = module_names(base.config, base.modules, adapter)
    if known is not None or base.config.custom_code or not _can_ask():
        return known
    from lora_tool.models.mapping.modules import built_modules

    decided(f"names: transformers says which modules a {base.config.model_type} has")
    own = adapter.trained_class or (None if adapter.task_type else next(iter(base.config.architectures), None))
    return built_modules(base.whole_config, base.tensors, own, auto_class_for(adapter.task_type))


def way_out(model_type: str | None) -> str:
    """Return the hint for names that only the modules of such a base would explain, where they are not known."""
    if _can_ask():
        return f"write the whole names into the file: {PREFIX}<module>.lora_A.weight"
    return f"install transformers, which knows the modules of a {model_type}: pip install 'lora-tool[merge]'"


def _can_ask() -> bool:
    return all(map(find_spec, ("torch", "transformers")))
