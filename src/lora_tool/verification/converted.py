"""Whether an adapter in another form is the one that it was: bits of every tensor, and what they do to each module.

The bits are compared with those that the same conversion gives, planned again. That says nothing of the config, by
which ranks and scalings are found, so ΔW is compared too. A tensor that was only renamed is in a layer of the same
path's end and scaling. LoRA on experts is compared expert by expert: with L = [B | B'] and R = [Aᵀ | A'ᵀ] of one expert
in both layouts and their triangles T_L and T_R, s·B·A - s'·B'·A' has the norm of T_L·C·T_Rᵀ (see `products`). The
columns of a fused lora_B are taken here as PEFT's forward pass does (peft 0.21, `ParamWrapper`), not as the planner
cuts them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from msgspec import Struct
from threadpoolctl import threadpool_limits

from lora_tool.adapters.experts import DOWN, EXPERT, GATE_UP, LISTED, PROJECTIONS, is_single
from lora_tool.adapters.view import AdapterView, LoraLayer, view_of
from lora_tool.core.keys import WRAPPERS
from lora_tool.core.machine import available_cores
from lora_tool.core.progress import Progress
from lora_tool.core.tensors import Span, StoredTensor
from lora_tool.formats.adapter_config import ExpertLayout
from lora_tool.plans.algebra.terms import Term
from lora_tool.plans.computed import ConvertInputs
from lora_tool.plans.convert.forms import AdapterForm
from lora_tool.plans.core.plan import Plan
from lora_tool.rules.merged.evidence import TensorEvidence, Verdict
from lora_tool.verification.checking import check_steps
from lora_tool.verification.elements import Array, Files
from lora_tool.verification.levels import Level
from lora_tool.verification.products import evidence_of_factors

_DOUBLE = np.dtype(np.float64)
_ALIKE = 1e-12
"""How far two scalings, or two products of the same factors in float64, may be apart."""


def check_converted(
    inputs: ConvertInputs, *, level: Level, jobs: int | None, progress: Progress
) -> dict[str, TensorEvidence]:
    """Return the evidence of every tensor; of a module whose ΔW is another, that is told of its lora_B.

    Raises as `ConvertInputs.plan`; `OSError`, `SourceChanged`.
    """
    plan = inputs.plan()
    evidence = check_steps(
        plan.steps, inputs.made.tensors, level=level, precision=plan.precision, jobs=jobs, progress=progress
    )
    before, after = view_of(inputs.before.adapter), view_of(inputs.made)
    layers = after.layers
    found: dict[str, TensorEvidence] = {}
    if inputs.form is AdapterForm.PEFT_EXPERTS:
        found = _experts(before, after, made=after)
    elif inputs.form is AdapterForm.PEFT_FUSED:
        found = _experts(after, before, made=after)
    if found:
        layers = tuple(layer for layer in layers if not _is_of_experts(layer.module))
    for layer, of, tensor in _origins(plan, before, layers):
        if reason := _renamed(layer, of):
            found[tensor.name] = _evidence(layer, reason, None)
    return evidence | {name: each for name, each in found.items() if is_news(each, evidence)}


def is_news(found: TensorEvidence, evidence: Mapping[str, TensorEvidence]) -> bool:
    """Return whether evidence says of a tensor that it is wrong, which is not known of it yet."""
    known = evidence.get(found.name)
    return found.verdict is not Verdict.RIGHT and (known is None or known.verdict is Verdict.RIGHT)


def _origins(
    plan: Plan, before: AdapterView, layers: Sequence[LoraLayer]
) -> Iterator[tuple[LoraLayer, LoraLayer, StoredTensor]]:
    """Yield the layers whose lora_B has another layer's bytes, by the plan, that other layer, and the lora_B."""
    sources = {step.out.name: step.op.source.spans for step in plan.steps}
    known = defaultdict[tuple[Span, ...], list[LoraLayer]](list)
    for layer in before.layers:
        if layer.b is not None:
            known[layer.b.spans].append(layer)
    for layer in layers:
        # experts may share one lora_B
        of = known.get(sources.get(layer.b.name, ())) if layer.b is not None else None
        if of and layer.b is not None:
            yield layer, next((each for each in of if not _renamed(layer, each)), of[0]), layer.b


def _renamed(layer: LoraLayer, of: LoraLayer) -> str:
    """Return in which way a layer does something else than the one that it was before; "" where it does not."""
    if _place(layer.module) != _place(of.module):
        return f"has the values of `{of.module}`, which is another module"
    if not _equal(layer.scaling, of.scaling):
        return f"scales B·A by {layer.scaling:.9g}, but `{of.module}` was scaled by {of.scaling:.9g}"
    return ""


def _place(module: str) -> tuple[str, ...]:
    """Return what of a path stays the same whatever is put before it: from the number of its layer, or its last part."""
    parts = [part for part in module.split(".") if part not in WRAPPERS]
    first = next((at for at, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    return tuple(parts[first:])


def _equal(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and math.isclose(one, other, rel_tol=_ALIKE)


class _Stack(Struct, frozen=True, kw_only=True):
    """The LoRA of one layer's experts in both layouts, of gate and up or of down."""

    fused: LoraLayer
    scaling: float
    grouped: bool
    """Whether all columns of one expert stand beside one another."""
    single: Sequence[Sequence[LoraLayer]]
    """For each expert its matrices, whose rows stand one below the other in the fused layout."""


def _is_of_experts(module: str) -> bool:
    return is_single(module) or _is_fused(module)


def _is_fused(module: str) -> bool:
    return module.removesuffix(".base_layer").endswith(".experts")


def _stacks(fused: AdapterView, single: AdapterView) -> Iterator[_Stack]:
    """Yield what belongs together: by layer, and by the sizes of the matrices."""
    experts: dict[tuple[str, ...], dict[str, dict[int, LoraLayer]]] = defaultdict(lambda: defaultdict(dict))
    for layer in single.layers:
        match = EXPERT.fullmatch(layer.module) or LISTED.fullmatch(layer.module)
        if match is not None and layer.pair is not None:
            experts[_block(match["experts"])][match["projection"]][int(match["number"])] = layer
    for layer in fused.layers:
        if not _is_fused(layer.module) or layer.a is None or layer.b is None:
            continue
        held = experts.get(_block(layer.module.removesuffix(".base_layer")), {})
        size = layer.b.shape[0], layer.a.shape[1]
        for names, parameter in _parameters(held):
            each = [[held[name][at] for name in names] for at in sorted(held[names[0]])]
            pairs = [one.pair for one in each[0]]
            # an expert that lacks a factor is not counted
            if layer.a.shape[0] % len(each) == 0 and size == (
                sum(pair[1].shape[0] for pair in pairs if pair),
                pairs[0] and pairs[0][0].shape[1],
            ):
                yield _Stack(
                    fused=layer,
                    scaling=fused.config.scaling(f"{layer.target}.{parameter}"),
                    grouped=fused.config.expert_layout == ExpertLayout.GROUPED_BY_EXPERT.value,
                    single=each,
                )


def _parameters(held: Mapping[str, Mapping[int, LoraLayer]]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the names of matrices that are one parameter on transformers 5, where all experts have them, and its name."""
    for gate, up, down in PROJECTIONS:
        alone = (((up,), up),) if gate not in held else ()
        for names, parameter in (((gate, up), GATE_UP), *alone, ((down,), DOWN)):
            if names[0] in held and len({tuple(sorted(held.get(name, {}))) for name in names}) == 1:
                yield names, parameter
    yield from (((f"{parameter}s",), parameter) for parameter in (GATE_UP, DOWN) if f"{parameter}s" in held)


def _block(experts: str) -> tuple[str, ...]:
    """Return the place of the layer that the experts are in: what is before it, and the block, have two names."""
    return _place(experts.removesuffix(".experts"))[:-1]


def _experts(fused: AdapterView, single: AdapterView, *, made: AdapterView) -> dict[str, TensorEvidence]:
    """Return the evidence of LoRA on experts, by the lora_B of what was `made`."""
    stacks = list(_stacks(fused, single))
    with Files() as files, threadpool_limits(limits=1, user_api="blas"), ThreadPoolExecutor(available_cores()) as pool:
        compared = [found for some in pool.map(lambda stack: _compared(stack, files), stacks) for found in some]
    ours = {id(layer) for layer in made.layers}
    evidence: dict[str, TensorEvidence] = {}
    for stack, matrix, reason, share in compared:
        layer = matrix if id(matrix) in ours else stack.fused
        found = _evidence(layer, reason, share)
        if found.name not in evidence or reason:
            evidence[found.name] = found
    # half a pair is reported as the tensor that is missing
    missing = (layer for layer in made.layers if _is_of_experts(layer.module) and layer.pair is not None)
    for layer in missing:
        if layer.b is not None and layer.b.name not in evidence:
            evidence[layer.b.name] = _evidence(
                layer, "has no counterpart among the LoRA on experts that it was made of", None
            )
    return evidence


def _compared(stack: _Stack, files: Files) -> list[tuple[_Stack, LoraLayer, str, float]]:
    """Return for every expert's matrix what is wrong with it, and how far apart the two layouts are."""
    found = []
    if stack.fused.a is None or stack.fused.b is None:
        raise AssertionError("a stack has both factors")
    a, b = (files.matrix(each, None, _DOUBLE) for each in (stack.fused.a, stack.fused.b))
    count = len(stack.single)
    rank = len(a) // count
    for at, matrices in enumerate(stack.single):
        rows = a[at * rank : (at + 1) * rank]
        columns = b[:, at * rank : (at + 1) * rank] if stack.grouped else b[:, at::count]
        first = 0
        for layer in matrices:
            if layer.pair is None or layer.scaling is None:
                raise AssertionError("an expert's matrix has both factors")
            down, up = (files.matrix(each, None, _DOUBLE) for each in layer.pair)
            height = len(up)
            share = _distance((stack.scaling, columns[first : first + height], rows), (layer.scaling, up, down))
            reason = (
                ""
                if share <= _ALIKE
                else f"ΔW of `{layer.module}` is {share:.3g} of its size away from that of the other layout"
            )
            found.append((stack, layer, reason, share))
            first += height
    return found


def _distance(one: tuple[float, Array, Array], other: tuple[float, Array, Array]) -> float:
    """Return ‖s·B·A - s'·B'·A'‖, relative to the sum of the sizes of their terms."""
    left = np.concatenate([one[1], other[1]], axis=1)
    right = np.concatenate([one[2], other[2]]).T
    signs = np.concatenate([np.full(len(one[2]), one[0]), np.full(len(other[2]), -other[0])])
    sizes = np.abs(signs) * np.linalg.norm(left, axis=0) * np.linalg.norm(right, axis=0)
    triangles = [np.asarray(np.linalg.qr(each, mode="r")) for each in (left, right)]
    size = float(sizes.sum())
    return float(np.linalg.norm((triangles[0] * signs) @ triangles[1].T)) / size if size else 0.0


def _evidence(layer: LoraLayer, reason: str, share: float | None) -> TensorEvidence:
    if layer.a is None or layer.b is None:
        raise AssertionError("what was written has both factors")
    return evidence_of_factors(Term(a=layer.a, b=layer.b, scale=layer.scaling or 0.0), reason, share)
