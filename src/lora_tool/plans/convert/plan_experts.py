"""Planning an adapter in the other layout of experts: every value as it is, and a config that says the new ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from lora_tool.adapters.experts import LISTED
from lora_tool.adapters.view import AdapterView, LoraLayer, view_of
from lora_tool.checkpoints import AdapterDir, ModelDir
from lora_tool.core.errors import UnsupportedAdapter
from lora_tool.core.tensors import TensorAction
from lora_tool.formats.adapter_config import FILE_NAME, ExpertLayout, adapter_config
from lora_tool.formats.files import json_bytes, parse_json, read_json
from lora_tool.plans.algebra.peft_config import base_of, exactly, experts_pattern
from lora_tool.plans.algebra.whole_plan import adapter_plan, whole_tensors
from lora_tool.plans.convert.experts import Converted, to_each_expert, to_fused
from lora_tool.plans.convert.forms import AdapterForm
from lora_tool.plans.core.ops import Copy
from lora_tool.plans.core.plan import Plan
from lora_tool.plans.core.steps import SideFile, Step
from lora_tool.rules.engine.subjects import Server
from lora_tool.rules.judging import MergeJudge
from lora_tool.rules.serving.forms import FORMS
from lora_tool.rules.serving.together import hides_experts, lacking, stacked_otherwise


def plan_experts(adapter: AdapterDir, to: AdapterForm, base: ModelDir | None, *, ignore: Iterable[str] = ()) -> Plan:
    """Return the plan of an adapter whose LoRA on experts has the other layout. The rules judge it first.

    `base` gives the names of each expert's matrices in its checkpoint. Raises `FindingsFound`, and `UnsupportedAdapter`
    for an adapter without LoRA on experts, and for parts that the other layout has no place for.
    """
    view = view_of(adapter)
    # Unsloth's names of experts are in no base: the sizes are compared when their parameters are known
    listed = to is AdapterForm.PEFT_FUSED and any(LISTED.fullmatch(layer.module) for layer in view.layers)
    report = MergeJudge(ignore=tuple(ignore)).as_stored((adapter,), None if listed else base)
    if to is AdapterForm.PEFT_FUSED:
        found = to_fused(view, base)
    elif base is None:
        raise UnsupportedAdapter(
            f"{adapter.root}: only the base has the names of each expert's matrices",
            hint="give the model that the adapter was trained on: `base=MODEL`",
        )
    else:
        found = to_each_expert(view, base)
    if not found.steps:
        raise UnsupportedAdapter(f"{adapter.root} has no LoRA on experts that {to} would lay out differently")
    others = [
        Step(
            out=replace(tensor.spec, name=view.adapter.keys[tensor.name].canonical),
            op=Copy(source=tensor),
            action=TensorAction.COPIED,
            reason="copied",
        )
        for layer in view.layers
        if layer.module not in found.modules
        for tensor in layer.parts.values()
    ]
    whole, config = whole_tensors((view,)), _config(view, found, to)
    plan = adapter_plan(
        (adapter,),
        (1.0,),
        (*others, *found.steps, *whole.steps),
        config,
        dropped=(*whole.dropped, *found.dropped),
        findings=report.findings,
        notes=(f"{to} from adapter {adapter.root}: {len(found.modules)} modules on experts become {len(found.forms)}",),
        ranks=(),
        base=base if found.needs_base else None,
        manifest={"operation": "convert", "to": to.value},
    )
    if to is not AdapterForm.PEFT_EXPERTS or base is None:
        return plan
    return replace(plan, warnings=(*plan.warnings, *_not_for_peft(found, config, base)))


def _not_for_peft(found: Converted, config: SideFile, base: ModelDir) -> Iterator[str]:
    """Yield why PEFT does not load the written adapter as it is, where it stacks LoRA on single experts."""
    model_type = base.whole_config.model_type
    if hides_experts(base):
        yield f"PEFT with transformers 5 finds no LoRA on single experts of a {model_type}: keep the other layout for it"
    peft = FORMS[Server.PEFT].together
    if peft is None or not peft.is_of(model_type):
        return
    path = Path(config.filename)
    otherwise = stacked_otherwise(adapter_config(parse_json(config.content or b"{}", path), path), found.forms)
    why = "takes that on gate and up only beside down" if lacking(found.forms, peft) else otherwise
    if why:
        yield (
            f"PEFT with transformers 5 stacks LoRA on experts again, and {why}: for PEFT, continue with "
            "lora-tool prepare EXPERTS --for peft --base MODEL -o OUT, where EXPERTS is what is written here"
        )


def _config(view: AdapterView, found: Converted, to: AdapterForm) -> SideFile:
    raw = read_json(view.config.path)
    raw |= _patterns(view, found, to)
    others = [layer for layer in view.layers if layer.module not in found.modules]
    left = [layer.target for layer in others]
    listed = raw.get("target_modules")
    # LoRA on the weight of a router stays as it is
    parameters = [name for name in view.config.target_parameters or () if _is_one_of(name, others)]
    if to is AdapterForm.PEFT_FUSED:
        if isinstance(listed, list):
            raw["target_modules"] = [name for name in listed if any(f".{each}".endswith(f".{name}") for each in left)]
        elif isinstance(listed, str):  # a pattern that still matched experts would have PEFT fuse them again
            modules = [layer.target for layer in others if layer.path == layer.target]
            raw["target_modules"] = exactly(modules) if modules else []
        raw["target_parameters"] = [*parameters, *found.targets]
        if view.config.by_unsloth:
            raw["lora_B_layout"] = ExpertLayout.RANK_MAJOR.value
    else:
        raw["target_modules"] = experts_pattern(listed, found.targets)
        raw["target_parameters"] = parameters or None
        raw.pop("lora_B_layout", None)
    raw["base_model_name_or_path"] = base_of(view.config)
    return SideFile(
        filename=FILE_NAME,
        content=json_bytes(raw, indent=2, sort_keys=True),
        reason=f"that of {view.config.path.parent}, with its experts' targets",
    )


def _is_one_of(parameter: str, layers: Iterable[LoraLayer]) -> bool:
    return any(f".{layer.path}".endswith(f".{parameter}") for layer in layers)


def _patterns(view: AdapterView, found: Converted, to: AdapterForm) -> Mapping[str, Any]:
    """Return the patterns by which PEFT finds the ranks and alphas of the written adapter."""
    config = view.config
    ranks = {name: rank for name, rank in config.rank_pattern.items() if "experts" not in name}
    alphas = {name: alpha for name, alpha in config.alpha_pattern.items() if "experts" not in name}
    forms: dict[str, set[tuple[int, float]]] = {}
    for name, form in found.forms.items():
        end = name.rpartition(".")[2]
        forms.setdefault(rf"experts\.\d+\.{end}" if to is AdapterForm.PEFT_EXPERTS else f"experts.{end}", set()).add(
            form
        )
    for name, held in forms.items():
        if len(held) > 1:
            raise UnsupportedAdapter(
                f"{config.path}: the layers' `{name}` would have several ranks or scalings: {sorted(held)}"
            )
        rank, scaling = held.pop()
        alpha = scaling * (math.sqrt(rank) if config.use_rslora else rank)
        near = math.isclose(alpha, round(alpha), rel_tol=1e-15)
        if rank != config.r:
            ranks[name] = rank
        if not math.isclose(alpha, config.lora_alpha, rel_tol=1e-15):
            alphas[name] = round(alpha) if near else alpha
    return {"rank_pattern": ranks, "alpha_pattern": alphas}
