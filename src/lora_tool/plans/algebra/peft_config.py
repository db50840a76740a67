"""The `adapter_config.json` of an adapter that has one scaling for all modules: 1, where its factors hold all of ΔW."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lora_tool.adapters.fused_experts import fused_experts
from lora_tool.adapters.support import refusals_of_config
from lora_tool.adapters.targeting import is_all_linear
from lora_tool.adapters.view import AdapterView
from lora_tool.core.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.formats.adapter_config import FILE_NAME, INITS_RECOMPUTED, AdapterConfig
from lora_tool.formats.files import json_bytes, parse_json, read_json
from lora_tool.plans.algebra.ranks import largest_of_experts
from lora_tool.plans.algebra.terms import alpha_for
from lora_tool.plans.core.steps import SideFile

_WHERE = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
"""The fields that say which modules have LoRA."""
_MUST_AGREE = ("lora_bias", "ensure_weight_tying", "fan_in_fan_out", "target_parameters")
_BIASES = ("none", "lora_only", "all")
PLAIN: Mapping[str, Any] = {
    "use_rslora": False,
    "init_lora_weights": True,
    "use_dora": False,
    "inference_mode": True,
    "eva_config": None,
    "corda_config": None,
    "lora_ga_config": None,
    "loftq_config": {},
}
"""The fields of every adapter whose B·A is its ΔW."""


def config_of_sum(
    views: Sequence[AdapterView],
    ranks: Mapping[str, int],
    *,
    scale: float = 1.0,
    base: Path | None = None,
    head_of: AdapterView | None = None,
    as_dora: bool = False,
) -> SideFile:
    """Return the config of the sum of adapters on `base`, by default the one that they name; ranks by target module.

    PEFT scales by alpha / r, which is `scale` in every module; other than 1 only where all have one rank, with which a
    whole alpha gives it. Trained tokens are those of `head_of` where several have some. With `as_dora` the magnitudes of
    the first, if it has any, are written with the factors. Raises `UnsupportedAdapter` where the adapters' configs
    contradict each other in what cannot be added up.
    """
    first = views[0].config
    for name in _MUST_AGREE:
        for view in views[1:]:
            if getattr(view.config, name) != getattr(first, name):
                raise UnsupportedAdapter(
                    f"`{name}` is {getattr(first, name)} in {first.path}, {getattr(view.config, name)} in "
                    f"{view.config.path}: one adapter cannot have both",
                    hint="merge them into one model instead: lora-tool merge A B -o OUT",
                )
    raw = {**read_json(first.path), **PLAIN, **rank_fields(ranks, scale), **_targets(views, tuple(ranks))}
    raw["use_dora"] = as_dora and any(layer.magnitude is not None for layer in views[0].layers)
    saved = [name for view in views for name in view.config.modules_to_save]
    raw["modules_to_save"] = list(dict.fromkeys(saved)) or None
    raw["bias"] = max((view.config.bias for view in views), key=_BIASES.index)
    if trained := sorted((view for view in views if view.tokens), key=lambda view: view is not head_of):
        raw["trainable_token_indices"] = _tokens(trained)
    raw["base_model_name_or_path"] = str(base.resolve()) if base else base_of(first)
    reason = f"that of {first.path.parent}, with scaling {scale:g} everywhere"
    return SideFile(filename=FILE_NAME, content=json_bytes(raw, indent=2, sort_keys=True), reason=reason)


def _tokens(views: Sequence[AdapterView]) -> Any:  # noqa: ANN401 - a list or a table, as PEFT has it
    """Return the field of trained tokens: that of the first, unless others trained those of other embeddings too."""
    held = {module: each.indices for view in reversed(views) for module, each in view.tokens.items()}
    if held.keys() == views[0].tokens.keys():
        return read_json(views[0].config.path).get("trainable_token_indices")
    return {module.rpartition(".")[2]: list(indices) for module, indices in sorted(held.items())}


def base_of(config: AdapterConfig) -> str | None:
    """Return the base that an adapter names; a folder by its absolute path, which holds from any working directory."""
    if not config.base_model or Path(config.base_model).is_absolute():
        return config.base_model
    relative = config.path.parent / config.base_model
    return str(relative.resolve()) if relative.is_dir() else config.base_model


def rank_fields(ranks: Mapping[str, int], scale: float = 1.0) -> dict[str, Any]:
    """Return r, lora_alpha and their patterns, by which PEFT finds these ranks, and the `scale` for each.

    PEFT loads LoRA on single experts as fused experts, and takes their rank only from r.
    """
    usual = largest_of_experts(ranks) or Counter(ranks.values()).most_common(1)[0][0]
    others = {module: rank for module, rank in ranks.items() if rank != usual}
    if not _found(ranks, usual, others):  # one path is the end of another
        others = {f"^{re.escape(module)}": rank for module, rank in others.items()}
    return {"r": usual, "lora_alpha": alpha_for(scale, usual), "rank_pattern": others, "alpha_pattern": dict(others)}


def experts_pattern(targets: object, matrices: Iterable[str]) -> str:
    """Return the pattern for `target_modules` that matches these matrices of single experts, and what `targets` does.

    Their paths have a number, and none where PEFT asks for them on transformers 5, which stacks them.
    """
    experts = rf".*\.experts\.(?:\d+\.)?(?:{'|'.join(matrices)})"
    names = "|".join(map(re.escape, targets)) if isinstance(targets, list) else ""
    before = rf"(?:.*\.)?(?:{names})" if names else targets if isinstance(targets, str) else ""
    return f"{before}|{experts}" if before else experts


def with_experts(config: SideFile, modules: Iterable[str]) -> SideFile:
    """Return the config with these matrices of single experts among its targets."""
    raw = parse_json(config.content or b"{}", Path(config.filename))
    matrices = sorted({module.rpartition(".")[2] for module in modules})
    raw["target_modules"] = experts_pattern(raw.get("target_modules"), matrices)
    return replace(config, content=json_bytes(raw, indent=2, sort_keys=True))


def is_narrowed(config: AdapterConfig) -> bool:
    """Return whether the config may keep LoRA off a module whose name, the last part of its path, others with LoRA have."""
    by_pattern = isinstance(config.target_modules, str) and not is_all_linear(config)
    by_path = any("." in name for name in config.target_names)
    return by_pattern or by_path or bool(config.exclude_modules or config.layers_to_transform)


def all_but(modules: Iterable[str]) -> str:
    """Return the pattern for `exclude_modules` that matches every path except these."""
    return f"(?!{exactly(modules)}$).*"


def exactly(modules: Iterable[str]) -> str:
    """Return a pattern that matches only these paths; layers with the same modules share one part of it."""
    layers: dict[tuple[str, str], set[str]] = {}
    for module in modules:
        before, index, after = [*re.split(r"(?<=\.)(\d+)(?=\.)", module, maxsplit=1), "", ""][:3]
        layers.setdefault((before, index), set()).add(after)
    alike: dict[tuple[str, frozenset[str]], list[str]] = {}
    for (before, index), within in layers.items():
        alike.setdefault((before, frozenset(within)), []).append(index)
    paths = [
        re.escape(before) + _one_of(indices) + _one_of(map(re.escape, within))
        for (before, within), indices in alike.items()
    ]
    return _one_of(paths)


def _one_of(patterns: Iterable[str]) -> str:
    listed = sorted(patterns)
    return listed[0] if len(listed) == 1 else f"(?:{'|'.join(listed)})"


def _found(ranks: Mapping[str, int], usual: int, patterns: Mapping[str, int]) -> bool:
    config = AdapterConfig(path=Path(FILE_NAME), r=usual, rank_pattern=patterns)
    return all(config.rank(module) == rank for module, rank in ranks.items())


def _targets(views: Sequence[AdapterView], modules: Sequence[str]) -> dict[str, Any]:
    """Return the fields that name the modules: the adapters' own where those mean the same, else each by its path."""
    raws = [read_json(view.config.path) for view in views]
    fields = [{name: _unordered(raw.get(name)) for name in _WHERE} for raw in raws]
    if all(each == fields[0] for each in fields):
        return {name: raws[0].get(name) for name in _WHERE}
    plain = all(isinstance(raw.get("target_modules"), list) and not any(map(raw.get, _WHERE[1:])) for raw in raws)
    names = {name for raw in raws for name in raw["target_modules"]} if plain else set(modules)
    return {**dict.fromkeys(_WHERE), "target_modules": sorted(names)}


def _unordered(value: object) -> object:
    return tuple(sorted(map(str, value))) if isinstance(value, list) else value or None


def require_sums(view: AdapterView) -> None:
    """Return if the adapter's ΔW is a sum of products that other products can be added to.

    Raises `UnsupportedAdapter` naming the first feature in the way.
    """
    require_known(view)
    config = view.config
    root = shlex.quote(str(view.adapter.root))
    merge = f"merge it instead, which is exact: lora-tool merge {root}"
    if config.use_dora or any(layer.magnitude is not None for layer in view.layers):
        raise UnsupportedAdapter(
            f"{config.path}: DoRA scales the rows of W + ΔW, so its change is not a product of two factors", hint=merge
        )
    if config.init_lora_weights in INITS_RECOMPUTED:
        raise UnsupportedAdapter(
            f"{config.path}: `init_lora_weights` {config.init_lora_weights}: PEFT subtracts the untrained factors from the "
            "base first, so B·A alone is not the change",
            hint=f"write it as plain LoRA first: lora-tool prepare {root} --for peft --base BASE -o PLAIN",
        )
    if fused_experts(view):
        raise UnsupportedAdapter(
            f"{config.path}: `target_parameters`: the factors of fused experts lie interleaved in one tensor",
            hint=f"write the experts one by one first: lora-tool convert {root} --to peft-experts --base BASE -o EXPERTS; or {merge}",
        )
    if not view.layers:
        raise UnsupportedAdapter(
            f"{view.adapter.root} has no LoRA layers, so there is nothing to compute with", hint=merge
        )


def require_known(view: AdapterView) -> None:
    """Return if the adapter's config asks for nothing that changes a model otherwise than by factors.

    Raises `UnsupportedAdapter` naming the first such feature.
    """
    for refusal in refusals_of_config(view):
        in_memory = f"merge it with PEFT: lora-tool merge --allow-in-memory {shlex.quote(str(view.adapter.root))}"
        raise UnsupportedAdapter(
            f"{view.config.path}: {refusal.text}", hint=in_memory if refusal.in_memory else refusal.hint
        )


def require_one_base(views: Sequence[AdapterView]) -> None:
    """Return if all adapters name one base, or none. Raises `IncompatibleBase`."""
    named = [(base_of(view.config), view) for view in views if view.config.base_model]
    for name, view in named[1:]:
        if name != named[0][0]:
            raise IncompatibleBase(
                f"{named[0][1].adapter.root} was trained on {named[0][0]}, but {view.adapter.root} on {name}: ΔW of different "
                "bases cannot be added",
                hint="if the two are the same model, name the one to use: `base=MODEL`",
            )
