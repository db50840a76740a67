"""Which adapters can be computed with: those of one base whose ΔW is scaling · B·A."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from lora_tool.adapters.fused_experts import fused_experts
from lora_tool.adapters.support import refusals_of_config
from lora_tool.adapters.view import AdapterView
from lora_tool.core.errors import IncompatibleBase, UnsupportedAdapter
from lora_tool.formats.adapter_config import INITS_RECOMPUTED
from lora_tool.plans.algebra.peft_config import base_of


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
